"""What every test may rely on."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def _process_kept() -> Generator[None]:
    """A tool's ``main`` sets up the root logger, the environment of a rank and signal handlers."""
    root = logging.getLogger()
    level, handlers, disabled = root.level, root.handlers[:], root.manager.disable
    environment, signals = dict(os.environ), [signal.getsignal(number) for number in SIGNALS]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.disable(disabled)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for number, handler in zip(SIGNALS, signals, strict=True):
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """The next test does not feel what a test has called."""
    with _process_kept():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """Nor what a module's fixture has called: it is set up before ``own_process``."""
    if fixturedef.scope == "function":
        return (yield)
    with _process_kept():
        return (yield)
