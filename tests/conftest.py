"""What every test may rely on."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A tool's ``main`` sets up the root logger; the next test must not feel it."""
    with _root_logger_kept():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """The same for a fixture of a module that calls one: it is set up before ``own_logging``."""
    if fixturedef.scope == "function":
        return (yield)
    with _root_logger_kept():
        return (yield)
