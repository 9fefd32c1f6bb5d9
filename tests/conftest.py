"""What every test may rely on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A tool's ``main`` sets up the root logger; the next test must not feel it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
