"""What all ranks check together before a run builds anything.

Each rank posts what it runs to the launcher's store. Rank 0 compares, and its
verdict ends every rank alike: a run of mixed versions does not begin, nor one
whose nodes do not share the checkpoint folder. The store is used and not a
process group, because the backend is one of the things that may differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import socket
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools import filesystem, utils

import torchtitan_ext
from torchtitan_ext.config.toml_writer import to_dict
from torchtitan_ext.errors import UserError

SHOWN = 5
"""Differences that a line names; the rest are counted."""

MISSING = "none"


class SharedError(UserError):
    """An error that every rank raises with the same words, so that rank 0 alone need print it."""

    exit_code = 2


@dataclass(kw_only=True, frozen=True, slots=True)
class Report:
    """What one rank says of itself."""

    rank: int
    host: str
    facts: dict[str, str]
    """Everything that must be equal on all ranks, by what it is."""
    error: str = ""
    """What this rank's own checks found."""

    folder: str = ""
    """The first rank of each node: the folder of checkpoints that all nodes must share, if there is one."""


def check(config: Any) -> None:
    """All ranks run the same code and config and can write; called on every rank before the model.

    Raises:
        UserError: this process's own devices or dump folder, in a run of one process.
        SharedError: what is wrong on which ranks, the same on all.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    error = ""
    try:
        # One process a host is enough to know its devices and its file system.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            check_devices()
            check_writable(config)
    except UserError as refused:
        if world == 1:
            raise
        error = str(refused)
    if world == 1 or config.comm.mode in ("fake_backend", "local_tensor"):
        return
    folder = shared_folder(config) if os.environ.get("LOCAL_RANK", "0") == "0" else ""
    report = Report(rank=rank, host=socket.gethostname(), facts=facts(config), error=error, folder=folder)
    verdict = meet(report, world=world, timeout_s=config.comm.init_timeout_seconds)
    if verdict:
        raise SharedError(verdict)


# --- this rank -------------------------------------------------------------------------


def facts(config: Any) -> dict[str, str]:
    """What must be equal on all ranks: versions, device, this package's sources, every key of the config."""
    found = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "torchtitan": metadata.version("torchtitan"),
        "torchtitan_ext": torchtitan_ext.__version__,
        # A host whose GPUs cannot be used trains on its processor, in a group of its own.
        "device": utils.device_type,
    }
    folder = Path(torchtitan_ext.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        found[f"torchtitan_ext/{path.relative_to(folder).as_posix()}"] = digest
    for section, table in to_dict(config).items():
        for key, value in table.items():
            found[f"[{section}] {key}"] = json.dumps(value, sort_keys=True, default=str)
    return found


def check_devices() -> None:
    """Whether this host has a device for each of its processes.

    Raises:
        UserError: it has fewer.
    """
    processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), utils.device_module.device_count()
    if utils.device_type == "cpu" or processes <= devices:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise UserError(
        f"{processes} processes were started on {socket.gethostname()} (NGPU), which shows them {devices} "
        f"{utils.device_type} devices" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES = {visible!r})")
    )


def check_writable(config: Any) -> None:
    """Whether the dump folder and the checkpoint folder in it can be written; leaves nothing behind.

    Raises:
        UserError: they cannot, and why.
    """
    dump = config.dump_folder
    if filesystem.is_remote(dump):
        return
    folders = [Path(dump)]
    saves = config.checkpoint.enable and not config.checkpoint.load_only
    if saves and not filesystem.is_remote(config.checkpoint.folder):
        folders.append(Path(dump) / config.checkpoint.folder)
    for folder in folders:
        # A folder that is not there yet can be made if the nearest one above it can be written.
        place = folder.absolute()
        while not os.path.lexists(place):
            place = place.parent
        try:
            # Written for real: permission bits do not know of read-only mounts and quotas.
            with tempfile.NamedTemporaryFile(dir=place, prefix=".writable-"):
                pass
        except OSError as error:
            where = f"{folder}" if place == folder.absolute() else f"{folder} (inside {place})"
            raise UserError(
                f"[job] dump_folder = {dump!r} cannot be written on {socket.gethostname()}: "
                f"{error.strerror or error}: {where}"
            ) from error


# --- one folder for all nodes ----------------------------------------------------------

# Each rank writes its own shards into a checkpoint and rank 0 the metadata that make it whole; on a
# resume any rank may read any shard. Folders of the same name on disks of their own would give
# checkpoints that look whole to rank 0 and lack the other nodes' shards.

LOOK_S = 5.0
"""Seconds in which a file that another node has written may come into sight."""


def shared_folder(config: Any) -> str:
    """The folder that all nodes must share: that of the checkpoints, where they are written here; else ""."""
    checkpoint = config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        return ""
    folder = os.path.join(config.dump_folder, checkpoint.folder)
    return "" if filesystem.is_remote(folder) else folder


def make_folder(folder: str) -> list[Path]:
    """Make a folder and those above it; the new ones, the deepest first."""
    made: list[Path] = []
    path = Path(folder).absolute()
    for place in (*reversed(path.parents), path):
        # Without a look: a file system over a network answers that from its memory, but not this.
        try:
            place.mkdir()
        except OSError:  # it is there, or a part of the way above this user's folders is read-only
            if not place.is_dir():
                _remove(made)
                raise
        else:
            made.insert(0, place)
    return made


def _remove(made: list[Path]) -> None:
    for place in made:
        with contextlib.suppress(OSError):  # somebody has put something into it
            place.rmdir()


def sees(folder: str, name: str, *, limit_s: float = LOOK_S) -> bool:
    """Whether the file that rank 0 wrote is in this node's folder of that name; leaves nothing behind.

    Errors: OSError where the folder cannot be made or written.
    """
    made = make_folder(folder)
    path = os.path.join(folder, name)
    try:
        deadline = time.monotonic() + limit_s
        while True:
            if os.path.exists(path):
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        # The last word has the server, who alone can tell whether the name is still free: NFS may
        # remember for a minute that there was no such file.
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return True
        os.unlink(path)
        return False
    finally:
        _remove(made)


def _look(store: dist.Store, report: Report, *, timeout: datetime.timedelta) -> None:
    """On the first rank of another node: look for rank 0's file, and say whether it is there."""
    store.wait(["marker"], timeout)
    name = store.get("marker").decode()
    if not name:  # nothing is asked
        return
    try:
        answer = "yes" if sees(report.folder, name) else "no"
    except OSError as error:
        answer = error.strerror or str(error)
    store.set(f"seen/{report.rank}", answer)


def _ask(store: dist.Store, reports: Sequence[Report], *, timeout_s: float) -> str:
    """On rank 0: do all nodes see what it writes? What is wrong in one line, or ""."""
    first, others = reports[0], [r for r in reports[1:] if r.folder]
    if not first.folder or not others:
        store.set("marker", "")
        return ""
    name = f".seen-by-all-{uuid.uuid4().hex}"
    made: list[Path] = []
    answers: dict[int, str] = {}
    try:
        made = make_folder(first.folder)
        marker = Path(first.folder) / name
        marker.touch(exist_ok=False)
        try:
            store.set("marker", name)
            answers = _answers(store, others, timeout_s=timeout_s)
        finally:
            marker.unlink(missing_ok=True)
    except OSError as error:
        if not store.check(["marker"]):
            store.set("marker", "")
        return f"{first.folder} cannot be written on {first.host}: {error.strerror or error}"
    verdict = unshared(first, others, answers)
    if verdict:
        _remove(made)
    return verdict


def _answers(store: dist.Store, others: Sequence[Report], *, timeout_s: float) -> dict[int, str]:
    deadline = time.monotonic() + timeout_s
    keys = {report.rank: f"seen/{report.rank}" for report in others}
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def unshared(first: Report, others: Sequence[Report], answers: dict[int, str]) -> str:
    """The nodes that do not see what the first one writes, in one line; "" when all do."""
    wrong = []
    for report in others:
        answer = answers.get(report.rank, "no answer")
        if answer != "yes":
            wrong.append(report.host if answer == "no" else f"{report.host} ({answer})")
    if not wrong:
        return ""
    names = list(dict.fromkeys(wrong))
    more = f" and {len(names) - SHOWN} more hosts" if len(names) > SHOWN else ""
    return (
        f"[job] dump_folder must be on a file system that all hosts share, because every rank writes its "
        f"part of a checkpoint: a file that rank 0 on {first.host} wrote into {first.folder} is not there on "
        f"{', '.join(names[:SHOWN])}{more}"
    )


# --- all ranks -------------------------------------------------------------------------


def meet(report: Report, *, world: int, timeout_s: float) -> str:
    """Post this rank's report and wait for rank 0's verdict: what is wrong in one line, or ""."""
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        base = _connect(report.rank, timeout=timeout)
        # A restarted run may meet at the store it met at before.
        attempt = os.environ.get(ATTEMPT, "0")
        store = dist.PrefixStore(f"torchtitan_ext.startup.{attempt}", base)
        store.set(f"report/{report.rank}", _to_json(report))
        if report.rank == 0:
            reports = _collect(store, world=world, timeout_s=timeout_s)
            verdict = judge(reports, world=world, timeout_s=timeout_s)
            if verdict:
                store.set("marker", "")
            else:
                verdict = _ask(store, reports, timeout_s=timeout_s)
            store.set("verdict", verdict)
            # A rank that serves the store takes it along when it leaves.
            _wait_for_readers(store, len(reports) - 1)
            return verdict
        # Rank 0 may itself wait to the end of its time for others, twice.
        if report.folder:
            _look(store, report, timeout=timeout * 2)
        store.wait(["verdict"], timeout * 3)
        verdict = store.get("verdict").decode()
        # Rank 0 may leave as soon as it has counted, before the answer to this is here.
        with contextlib.suppress(dist.DistError):
            store.add("readers", 1)
        return verdict
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise UserError(
            f"rank {report.rank} on {report.host} got no answer from rank 0 through the store at {address} "
            f"within {timeout_s:g} s: {str(error).splitlines()[0]}"
        ) from error


ATTEMPT = "TORCHTITAN_EXT_ATTEMPT"
"""Environment variable: the launcher's rendezvous round, equal on all nodes."""

_KEPT: list[dist.Store] = []
"""Without a launcher rank 0 serves the store itself, and the process group goes on using its port."""


def _connect(rank: int, *, timeout: datetime.timedelta) -> dist.Store:
    """The store at MASTER_ADDR; unlike the process group's it does not wait for all ranks to come."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not served,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    _KEPT.append(store)
    return store


def _collect(store: dist.Store, *, world: int, timeout_s: float) -> list[Report]:
    """Reports of the ranks that came in time."""
    keys = [f"report/{rank}" for rank in range(world)]
    deadline = time.monotonic() + timeout_s
    # Polled: a wait that times out prints warnings of the store's own.
    while not store.check(keys):
        if time.monotonic() > deadline:
            keys = [key for key in keys if store.check([key])]
            break
        time.sleep(0.05)
    return [_from_json(store.get(key)) for key in keys]


def _wait_for_readers(store: dist.Store, count: int) -> None:
    """All other ranks have read; a rank that died meanwhile does not hold this one for long."""
    deadline = time.monotonic() + 10
    while store.add("readers", 0) < count and time.monotonic() < deadline:
        time.sleep(0.05)


def _to_json(report: Report) -> str:
    return json.dumps(dataclasses.asdict(report))


def _from_json(text: bytes) -> Report:
    return Report(**json.loads(text))


def judge(reports: list[Report], *, world: int, timeout_s: float) -> str:
    """What is wrong with a run of these ranks, in one line; "" when nothing is."""
    came = {report.rank for report in reports}
    missing = [rank for rank in range(world) if rank not in came]
    if missing:
        return (
            f"only {len(came)} of {world} ranks started within {timeout_s:g} s "
            f"([comm] init_timeout_seconds): {_ranks(missing)} did not"
        )
    errors = list(dict.fromkeys(report.error for report in reports if report.error))
    if errors:
        return "; ".join(errors[:SHOWN])
    differences = _differences(reports)
    if not differences:
        return ""
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"ranks do not run the same: {'; '.join(differences[:SHOWN])}{more}"


def _differences(reports: list[Report]) -> list[str]:
    first = reports[0]
    names = list(dict.fromkeys(name for report in reports for name in report.facts))
    found = []
    for name in names:
        values: dict[str, list[Report]] = {}
        for report in reports:
            values.setdefault(report.facts.get(name, MISSING), []).append(report)
        if len(values) == 1:
            continue
        if name.startswith("torchtitan_ext/"):  # the hashes themselves say nothing
            others = [r for r in reports if r.facts.get(name) != first.facts.get(name)]
            found.append(f"{name} on {_where(others)} is not that of {_where([first])}")
        else:
            found.append(f"{name} is " + ", ".join(f"{v} on {_where(who)}" for v, who in values.items()))
    return found


def _where(reports: list[Report]) -> str:
    hosts = list(dict.fromkeys(report.host for report in reports))
    shown = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more hosts" if len(hosts) > 3 else "")
    return f"{_ranks([report.rank for report in reports])} ({shown})"


def _ranks(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 0-3, 6``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
