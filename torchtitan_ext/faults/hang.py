"""A collective that never ends, and a rank that went away, explained in one line."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torchtitan.config import CommConfig
from torchtitan.tools.logging import logger

from torchtitan_ext.faults.errors import LostContact

TIMED_OUT = ("timed out", "timeout", "time out")
WENT_AWAY = ("connection closed", "connection reset", "broken pipe", "connection refused", "remote error")
SPEAKERS = ("gloo", "nccl", "tcpstore", "socket", "processgroup", "collective", "barrier")
"""What an error's text names if it comes from the communication between ranks."""
PEER_GRACE_S = 10.0
"""A rank that meets a closed connection waits so long: the launcher ends it sooner where another rank
failed, and then that rank's own message and exit code are the ones to see."""


class Place(NamedTuple):
    """Where a rank is in its run."""

    step: int
    timeout_s: float
    """The timeout of collectives at this step."""


def traces(comm: CommConfig, dump_folder: str, *, backend: str) -> str:
    """Where the flight recorder's traces are, or why there are none."""
    if "nccl" not in backend:
        return f"the backend {backend} writes no flight recorder traces"
    if comm.trace_buf_size <= 0:
        return "no traces: [comm] trace_buf_size = 0 switched the flight recorder off"
    files = Path(dump_folder) / comm.save_traces_folder / f"{comm.save_traces_file_prefix}*"
    return f"flight recorder traces: {files} (read them with torchfrtrace)"


def explanation(error: BaseException, place: Place, *, rank: int, world: int, where: str) -> str | None:
    """The line for a failed collective, or None where the error is something else."""
    # Collectives report as RuntimeError, which a checkpoint's collective failure wraps by rank.
    failures = getattr(error, "failures", {}).values()
    causes = [error, *(f[0] if isinstance(f, tuple) else f for f in failures)]
    texts = [str(cause).lower() for cause in causes if isinstance(cause, RuntimeError)]
    texts = [text for text in texts if any(word in text for word in SPEAKERS)]
    if any(word in text for word in TIMED_OUT for text in texts):
        return (
            f"step {place.step}, rank {rank} of {world}: a collective timed out after {place.timeout_s:g} s "
            f"([comm] train_timeout_seconds, before the second step init_timeout_seconds): another rank is "
            f"late, stuck or gone; look at the last line of every rank's log for the one that stands behind; "
            f"{where}"
        )
    if any(word in text for word in WENT_AWAY for text in texts):
        return (
            f"step {place.step}, rank {rank} of {world}: another rank went away (its connection is closed); "
            f"look for the first error in the other ranks' logs; {where}"
        )
    return None


def is_peer_gone(line: str) -> bool:
    return "went away" in line


@contextlib.contextmanager
def explained(place: Callable[[], Place], comm: CommConfig, dump_folder: str) -> Generator[None]:
    """Turn a time-out of a collective, or a lost peer, into one line.

    gloo raises in the waiting thread. NCCL's own watchdog ends the process
    without a Python error; there a thread says where the run stood, before.

    Raises:
        LostContact: a collective timed out or another rank went away.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    backend = dist.get_backend()
    where = traces(comm, dump_folder, backend=backend)
    watch = Watch(place, rank=rank, world=world, where=where) if world > 1 and "nccl" in backend else None
    try:
        yield
    except BaseException as error:
        line = explanation(error, place(), rank=rank, world=world, where=where)
        if line is None:
            raise
        if is_peer_gone(line):
            time.sleep(PEER_GRACE_S)
        raise LostContact(line) from error
    finally:
        if watch is not None:
            watch.close()


class Watch:
    """Says once for a step that it takes longer than a collective may.

    NCCL ends the process at about the same time, with messages about sequence
    numbers; this line says which step it was and where the traces are.
    """

    def __init__(
        self, place: Callable[[], Place], *, rank: int, world: int, where: str, interval_s: float = 1.0
    ) -> None:
        self._place, self._rank, self._world, self._where = place, rank, world, where
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seen, since, said = self._place(), time.monotonic(), False
        while not self._closed.wait(self._interval_s):
            now = self._place()
            if now.step != seen.step:
                seen, since, said = now, time.monotonic(), False
            elif not said and time.monotonic() - since > now.timeout_s:
                said = True
                logger.error(
                    f"step {now.step}, rank {self._rank} of {self._world}: not finished after "
                    f"{now.timeout_s:g} s, as long as [comm] lets a collective wait: if one hangs, NCCL ends "
                    f"this process now; another rank is late, stuck or gone; {self._where}"
                )

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        self._thread.join()
