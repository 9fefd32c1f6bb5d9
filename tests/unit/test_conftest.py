"""Tests do not depend on what ran before them in their process."""

from __future__ import annotations

import logging
import os
import signal

import pytest

NAME = "TORCHTITAN_EXT_OF_ANOTHER_TEST"


def state() -> tuple[object, ...]:
    root = logging.getLogger()
    return root.level, root.manager.disable, os.environ.get(NAME), signal.getsignal(signal.SIGUSR1)


BEFORE = state()


def spoil() -> None:
    logging.basicConfig(level=logging.CRITICAL, force=True)
    logging.disable(logging.ERROR)
    os.environ[NAME] = "1"
    signal.signal(signal.SIGUSR1, lambda *args: None)


@pytest.fixture(scope="module")
def tool_has_run() -> bool:
    spoil()
    return True


def test_what_a_fixture_of_the_module_sets_up_is_not_felt(tool_has_run, caplog):
    assert tool_has_run and state() == BEFORE
    logging.getLogger().warning("heard")
    assert caplog.messages == ["heard"]


@pytest.mark.parametrize("turn", range(2))
def test_what_a_test_sets_up_is_not_felt_by_the_next(turn):
    assert state() == BEFORE
    spoil()
