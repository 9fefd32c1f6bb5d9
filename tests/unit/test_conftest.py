"""Tests do not depend on what ran before them in their process."""

from __future__ import annotations

import logging

import pytest

BEFORE = logging.getLogger().level


@pytest.fixture(scope="module")
def tool_has_run() -> bool:
    logging.basicConfig(level=logging.CRITICAL, force=True)
    return True


def test_a_fixture_that_sets_up_the_root_logger_is_not_felt(tool_has_run, caplog):
    assert tool_has_run and logging.getLogger().level == BEFORE
    logging.getLogger().warning("heard")
    assert caplog.messages == ["heard"]


@pytest.mark.parametrize("level", [logging.CRITICAL, logging.DEBUG])
def test_a_test_that_sets_it_up_is_not_felt_by_the_next(level):
    assert logging.getLogger().level == BEFORE
    logging.basicConfig(level=level, force=True)
