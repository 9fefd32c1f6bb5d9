"""Real gloo processes for tests, started from a server that has imported everything once."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import pickle
import queue as queues
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CONTEXT = mp.get_context("forkserver")
# Importing torch and torchtitan takes seconds; each process is forked from a server that has them.
_CONTEXT.set_forkserver_preload(["torchtitan_ext.trainer", "torchtitan_ext.config", "tests.distributed.jobs"])


_FIRST_PORT, _LAST_PORT = 12000, 31999
"""Below the ports that the system gives to outgoing connections (32768 and up on Linux)."""

_WORKERS = 8
"""Test workers side by side (pytest-xdist) whose ports never meet."""


def _ports() -> Iterator[int]:
    """Ports of this worker, none twice in a run: a rank must not meet the store of another test."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    size = (_LAST_PORT + 1 - _FIRST_PORT) // _WORKERS
    begin = os.getpid() % size
    for i in itertools.count():
        yield _FIRST_PORT + worker * size + (begin + i) % size


_PORTS = _ports()


def free_port() -> int:
    """A port that nothing listens on, and that no other test will be given."""
    for port in _PORTS:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:  # somebody else's
                continue
            return port
    raise AssertionError


def _entry(job: Callable, rank: int, world: int, port: int, results: Any, kwargs: dict) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # Ranks share the cores; and with several threads a sum's order may depend on the machine's load.
    torch.set_num_threads(1)
    try:
        value = pickle.dumps(job(**kwargs))
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def start(job: Callable, *, world: int, **kwargs: Any) -> tuple[list[Any], Any]:
    """Start ``world`` processes; returns them and the queue of their results."""
    port = free_port()
    results = _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(target=_entry, args=(job, rank, world, port, results, kwargs), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes, results


def run(job: Callable, *, world: int, timeout: float = 240, **kwargs: Any) -> list[Any]:
    """The job's result on every rank.

    ``job`` is a module-level function of ``tests.distributed.jobs``; its
    arguments and results are pickled. The first failing rank's traceback is
    raised as an AssertionError.
    """
    processes, results = start(job, world=world, **kwargs)
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(values) < world:
            try:
                rank, value, error = results.get(timeout=1)
            except queues.Empty:
                dead = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in values]
                assert not dead, f"ranks {dead} died without a result"
                assert time.monotonic() < deadline, f"timeout; finished ranks: {sorted(values)}"
                continue
            assert error is None, f"rank {rank} failed:\n{error}"
            values[rank] = pickle.loads(value)
    finally:
        for process in processes:
            process.join(timeout=10 if len(values) == world else 0)
            if process.is_alive():
                process.kill()
    return [values[rank] for rank in range(world)]
