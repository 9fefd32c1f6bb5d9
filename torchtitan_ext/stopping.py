"""Stopping a run on a signal: the running step ends, its checkpoint is written, nothing is repeated.

SIGTERM or SIGUSR1 sets a flag in the process that gets it. Between two steps
all ranks combine their flags (:meth:`Stopper.asked`), so they stop after the
same step even if one of them alone got the signal, or got it a step earlier.
"""

from __future__ import annotations

import datetime
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools.logging import logger

USER_ERROR = 2
"""Exit code: the input was refused; starting again changes nothing."""

STOPPED = 75
"""Exit code: stopped on request, nothing is lost; start again to go on (EX_TEMPFAIL of sysexits.h)."""

STOPPED_UNSAVED = 76
"""Exit code: stopped on request without a checkpoint to go on from."""

DELIBERATE = (STOPPED, STOPPED_UNSAVED)
"""Exit codes of a stop, after which the launcher restarts nothing."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(SystemExit):
    """Raised on every rank once a stop is complete; carries the process's exit code.

    A SystemExit, which torch's ``@record`` around the training loop lets pass.
    """


class StopRequest:
    """The first stop signal this process got."""

    def __init__(self) -> None:
        self.number = 0

    def install(self) -> None:
        """Take over SIGTERM and SIGUSR1; only the main thread may."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # No logging here: the main thread may be inside the logger.
        self.number = self.number or number
        if number == signal.SIGTERM:
            # A second one ends the process at once, by default action: a handler of Python's would
            # wait for the collective or kernel that the main thread is in. SIGUSR1 may come any
            # number of times, from a scheduler and from the launcher.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def release() -> None:
    """SIGTERM ends this process by default again; for one that is about to fail."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


REQUEST = StopRequest()
"""The process's own; :mod:`torchtitan_ext.train` installs it."""


class Stopper:
    """Asks all ranks between two steps whether to stop, and stops.

    The question is one int32 all-reduced over gloo, on the host: it needs no
    device synchronisation, so the kernels of the last step go on running, and
    no rank can be a step ahead of another when the flag is read.
    """

    def __init__(self, request: StopRequest, *, timeout_s: float) -> None:
        self._request = request
        self._group: dist.ProcessGroup | None = None
        # torchtitan's dry runs have a group of one real process.
        if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake":
            timeout = datetime.timedelta(seconds=timeout_s)
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._first_step: int | None = None

    def asked(self) -> int:
        """The signal number some rank got, or 0; the same on all ranks, which all must call it."""
        flag = torch.tensor(self._request.number, dtype=torch.int32, device="cpu")
        if self._group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return int(flag)

    def stop_if_asked(self, *, step: int, checkpointer: Any) -> None:
        """Between two steps, on every rank; ``step`` is the last one made.

        Raises:
            Stopped: some rank was asked to stop; the checkpoint of ``step`` is whole.
            UserError: the checkpoint cannot be written.
        """
        if self._first_step is None:
            self._first_step = step
        number = self.asked()
        if number == 0:
            return
        logger.info(f"Stop asked by {signal.Signals(number).name}: step {step} is the last one.")
        code, text = self._save(step, checkpointer)
        # From here on there is nothing left to interrupt: a late signal must not change the exit code.
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if self._group is not None:
            dist.barrier(group=self._group)
        logger.info(f"Stopped {text} (exit code {code}).")
        raise Stopped(code)

    def _save(self, step: int, checkpointer: Any) -> tuple[int, str]:
        """Exit code and what to say, with the checkpoint of ``step`` written."""
        if not checkpointer.enable or checkpointer.load_only:
            why = "load_only = true" if checkpointer.enable else "enable = false"
            return STOPPED_UNSAVED, f"after step {step}: nothing was saved, because [checkpoint] {why}"
        if step == self._first_step:
            # An initial checkpoint may still be under way; nothing of this start is.
            checkpointer.maybe_wait_for_saving()
            return STOPPED, f"before the first step (step {step + 1}): there is nothing to save"
        # The loop has saved this step already if it was due. Otherwise every step is due from now
        # on; the manager's "last step" would be the model alone where last_save_model_only is set.
        if not checkpointer._should_save(step):
            checkpointer.interval = 1
            checkpointer.save(step)
        checkpointer.maybe_wait_for_staging()
        checkpointer.maybe_wait_for_saving()
        path = checkpointer._create_checkpoint_id(step)
        return STOPPED, f"after step {step}: {path} is written and the next start goes on from it"
