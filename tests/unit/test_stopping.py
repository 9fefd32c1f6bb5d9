"""A stop signal in one process: what is noted, what is saved, which exit code follows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from torchtitan_ext import stopping
from torchtitan_ext.faults.errors import LostContact, NonFinite
from torchtitan_ext.stopping import STOPPED, STOPPED_UNSAVED, Stopped, Stopper, StopRequest


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Checkpointer:
    """Keeps what is asked of it."""

    def __init__(self, *, enable: bool = True, load_only: bool = False, interval: int = 5) -> None:
        self.enable, self.load_only, self.interval = enable, load_only, interval
        self.calls: list[str] = []

    def _should_save(self, step: int) -> bool:
        return step % self.interval == 0

    def _create_checkpoint_id(self, step: int) -> str:
        return f"out/step-{step}"

    def save(self, step: int) -> None:
        assert self._should_save(step)
        self.calls.append(f"save {step}")

    def maybe_wait_for_staging(self) -> None:
        self.calls.append("staged")

    def maybe_wait_for_saving(self) -> None:
        self.calls.append("saved")


def stopper(number: int = 0) -> Stopper:
    request = StopRequest()
    request.number = number
    return Stopper(request, timeout_s=10)


def stop(checkpointer: Checkpointer, *, steps: list[int]) -> Stopped:
    """The stop after the last of ``steps``; the signal comes during that step."""
    one = stopper()
    for step in steps[:-1]:
        one.stop_if_asked(step=step, checkpointer=checkpointer)
    assert not checkpointer.calls
    one._request.number = signal.SIGTERM
    with pytest.raises(Stopped) as stopped:
        one.stop_if_asked(step=steps[-1], checkpointer=checkpointer)
    return stopped.value


def test_sigusr1_may_come_any_number_of_times_and_a_second_sigterm_acts_by_default():
    request = StopRequest()
    request.install()
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert request.number == signal.SIGUSR1
    os.kill(os.getpid(), signal.SIGTERM)  # the first one
    assert request.number == signal.SIGUSR1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGUSR1)


def test_without_a_signal_nothing_happens():
    checkpointer = Checkpointer()
    one = stopper()
    for step in range(8):
        one.stop_if_asked(step=step, checkpointer=checkpointer)
    assert checkpointer.calls == [] and checkpointer.interval == 5


def test_a_step_that_is_not_due_is_saved_before_the_stop():
    checkpointer = Checkpointer()
    assert stop(checkpointer, steps=[0, 1, 2, 3]).code == STOPPED
    assert checkpointer.calls == ["save 3", "staged", "saved"]


def test_a_step_that_the_loop_saved_is_not_saved_twice():
    checkpointer = Checkpointer()
    assert stop(checkpointer, steps=[0, 5]).code == STOPPED
    assert checkpointer.calls == ["staged", "saved"]


def test_before_the_first_step_of_this_start_there_is_nothing_to_save():
    for step in (0, 7):  # a fresh start and a resumed one
        checkpointer = Checkpointer()
        assert stop(checkpointer, steps=[step]).code == STOPPED
        assert checkpointer.calls == ["saved"]


@pytest.mark.parametrize("kind", ["disabled", "load only"])
def test_without_checkpoints_the_exit_code_and_a_line_say_that_nothing_was_saved(kind, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(stopping.logger, "info", lines.append)
    checkpointer = Checkpointer(enable=kind != "disabled", load_only=kind == "load only")
    assert stop(checkpointer, steps=[0, 1, 2]).code == STOPPED_UNSAVED
    assert checkpointer.calls == []
    assert any("after step 2: nothing was saved, because [checkpoint]" in line for line in lines)


def test_once_stopped_a_late_signal_changes_nothing():
    stop(Checkpointer(), steps=[0, 1])
    for number in stopping.SIGNALS:
        os.kill(os.getpid(), number)


def test_a_failing_save_is_no_stop():
    class Full(Checkpointer):
        def save(self, step: int) -> None:
            raise OSError("no space")

    one = stopper(signal.SIGUSR1)
    one._first_step = 0
    with pytest.raises(OSError, match="no space"):
        one.stop_if_asked(step=3, checkpointer=Full())


def test_exit_codes_are_distinct_and_no_signals():
    codes = [0, 1, stopping.USER_ERROR, NonFinite.exit_code, LostContact.exit_code, *stopping.DELIBERATE]
    assert len(set(codes)) == len(codes) and max(codes) < 128
