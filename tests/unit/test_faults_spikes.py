"""Warnings about jumps: once for an event, not too often, never for a run's fast start."""

from __future__ import annotations

import itertools

import pytest

from torchtitan_ext.faults.spikes import FIRST, QUIET, WINDOW, SpikeWatch


def feed(watch: SpikeWatch, values: list[float], *, first: int = 1) -> dict[int, str]:
    said = {step: watch.see(step, value) for step, value in enumerate(values, start=first)}
    return {step: message for step, message in said.items() if message}


def test_one_warning_for_an_event():
    said = feed(SpikeWatch("loss", factor=2.0), [3.0] * 20 + [7.0, 8.0, 9.0] + [3.0] * 5)
    assert list(said) == [21]
    assert said[21].startswith("step 21: loss spike: 7 is 2.3 times the median 3 of the 20 steps before")


def test_events_close_together_are_counted_and_told_later():
    spiky = ([3.0] * 9 + [9.0]) * 30
    said = feed(SpikeWatch("loss", factor=2.0), spiky)
    steps = list(said)
    assert steps[0] == 20 and all(b - a >= QUIET for a, b in itertools.pairwise(steps))
    assert "9 more since step 20 were not reported" in said[steps[1]]


def test_the_start_and_slow_changes_are_no_spikes():
    assert not feed(SpikeWatch("loss", factor=2.0), [11.0 - 0.5 * step for step in range(FIRST)])
    assert not feed(SpikeWatch("loss", factor=2.0), [10.0 * 1.01**step for step in range(300)])


def test_a_new_level_is_told_once_and_becomes_the_reference():
    watch = SpikeWatch("gradient norm", factor=2.0)
    assert list(feed(watch, [1.0] * 100 + [5.0] * (3 * QUIET))) == [101]
    assert feed(watch, [11.0], first=1000)


@pytest.mark.parametrize("values", [[-1.0] * 40 + [5.0], [0.0] * 40 + [5.0], [1.0] * 40 + [float("nan")]])
def test_series_without_a_meaningful_multiple(values):
    assert not feed(SpikeWatch("loss", factor=2.0), values)


def test_off():
    assert not feed(SpikeWatch("loss", factor=0.0), [1.0] * WINDOW + [1e9])
