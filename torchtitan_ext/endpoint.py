"""The way to the first node: who serves the rendezvous, and under which address a node is reached."""

from __future__ import annotations

import socket
import time

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from torchtitan_ext.errors import UserError

DEFAULT_PORT = 29400
"""torchrun's, where an endpoint names no port."""


def prepare(config: LaunchConfig) -> None:
    """Settle who serves the rendezvous and under which address this node is reached.

    torchelastic compares the endpoint with the address of the machine's name,
    which may be another than that of the network between the nodes; here the
    node that owns the address serves.

    Raises:
        UserError: the endpoint cannot be reached in time.
    """
    if config.rdzv_backend != "c10d":
        return
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=DEFAULT_PORT)
    if port == 0:  # this machine alone, any port
        return
    limit = float(config.rdzv_configs.get("join_timeout", 600))
    config.rdzv_configs.setdefault("read_timeout", int(limit))
    own = _own_address(host)
    if own is not None and not _answers(host, port):
        config.rdzv_configs.setdefault("is_host", "true")
    else:
        config.rdzv_configs.setdefault("is_host", "false")
        own = own or _reach(host, port, limit_s=limit)
    if config.local_addr is None and not own.startswith(("127.", "::1")):
        config.local_addr = own


def _own_address(host: str) -> str | None:
    """The address of ``host`` if it is this machine's: one that a socket can be bound to."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return str(address[0])
    return None


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def _reach(host: str, port: int, *, limit_s: float) -> str:
    """Wait until the endpoint answers; the local address of the connection."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            with socket.create_connection((host, port), timeout=min(left, 5)) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or str(error) or type(error).__name__
                raise UserError(
                    f"rendezvous endpoint {host}:{port} cannot be reached from {socket.gethostname()} within "
                    f"{limit_s:g} s ({why}): is the first node's launcher running, is the port open, and is "
                    "RDZV_ENDPOINT the same on all nodes?"
                ) from error
        time.sleep(0.5)
