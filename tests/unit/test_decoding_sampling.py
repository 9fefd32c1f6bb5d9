"""Sampling against definitions written out and against enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext.decoding import sampling as s
from torchtitan_ext.decoding.sampling import SamplingParams
from torchtitan_ext.errors import UserError


def log(*probs: float) -> torch.Tensor:
    return torch.tensor([probs]).log()


def kept(logits_BV: torch.Tensor) -> list[int]:
    return logits_BV[0].isfinite().nonzero()[:, 0].tolist()


def smallest_set(probs: list[float], p: float) -> float:
    """Size of the smallest set of tokens that reaches p, by trying all sets."""
    for size in range(1, len(probs) + 1):
        if any(sum(chosen) >= p - 1e-7 for chosen in itertools.combinations(probs, size)):
            return size
    return len(probs)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"temperature": -0.1}, "temperature .* -0.1"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k .* -1"),
        ({"top_p": 0.0}, "top_p .* 0"),
        ({"top_p": 1.1}, "top_p .* 1.1"),
        ({"seed": -1}, "seed .* -1"),
    ],
)
def test_wrong_parameters_are_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**wrong)


def test_top_k_edges():
    logits = log(0.1, 0.4, 0.2, 0.3)
    assert kept(s.keep_top_k(logits, 1)) == [1]
    assert kept(s.keep_top_k(logits, 3)) == [1, 2, 3]
    assert kept(s.keep_top_k(logits, 4)) == kept(s.keep_top_k(logits, 99)) == [0, 1, 2, 3]
    assert kept(s.keep_top_k(log(0.3, 0.3, 0.3, 0.1), 2)) == [0, 1, 2]


def test_top_p_edges():
    logits = log(0.1, 0.4, 0.2, 0.3)
    assert kept(s.keep_top_p(logits, 1e-9)) == [1]
    assert kept(s.keep_top_p(logits, 0.39)) == [1]
    assert kept(s.keep_top_p(logits, 0.41)) == [1, 3]
    assert kept(s.keep_top_p(logits, 0.85)) == [1, 2, 3]
    assert kept(s.keep_top_p(logits, 0.95)) == [0, 1, 2, 3]
    # Among equals the lower ids.
    assert kept(s.keep_top_p(log(0.25, 0.25, 0.25, 0.25), 0.5)) == [0, 1]
    # One token with everything.
    assert kept(s.keep_top_p(torch.tensor([[0.0, 1000.0, 0.0]]), 0.999)) == [1]


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=7),
    p=st.floats(0.01, 1.0),
)
def test_top_p_is_the_smallest_set_that_reaches_p(weights, p):
    probs = [w / sum(weights) for w in weights]
    nucleus = kept(s.keep_top_p(log(*probs), p))
    mass = sum(probs[i] for i in nucleus)
    # Away from a boundary, where rounding may count either way.
    partial = list(itertools.accumulate(sorted(probs, reverse=True)))
    if all(abs(total - p) > 1e-5 for total in partial):
        assert mass >= p or len(nucleus) == len(probs)
        assert len(nucleus) == smallest_set(probs, p)
        assert min(probs[i] for i in nucleus) >= max(
            (q for i, q in enumerate(probs) if i not in nucleus), default=0
        )


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.9, 6, 0.7)]
)
def test_probabilities_equal_those_of_transformers(temperature, top_k, top_p):
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(0)) * 3
    want = warpers.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        want = warpers.TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = warpers.TopPLogitsWarper(top_p)(None, want)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(s.probabilities(logits, params), want.softmax(-1))


def test_temperature_zero_is_greedy_and_draws_nothing():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 1.0]], dtype=torch.bfloat16)
    generators = s.row_generators([0, 0])
    before = [g.get_state() for g in generators]
    assert s.sample(logits, SamplingParams(), generators).tolist() == [1, 0]
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, before, strict=True))
    probs = s.probabilities(logits, SamplingParams())
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]] and probs.dtype == torch.float32


def test_a_tiny_temperature_does_not_overflow():
    logits = torch.tensor([[1e30, 2e30, -1e30]])
    assert s.probabilities(logits, SamplingParams(temperature=1e-30)).tolist() == [[0, 1, 0]]


def test_draws_follow_the_distribution():
    logits = log(0.5, 0.25, 0.15, 0.1).repeat(20_000, 1)
    params = SamplingParams(temperature=1.0, top_k=3)
    generators = [torch.Generator().manual_seed(0)] * len(logits)
    counts = torch.bincount(s.sample(logits, params, generators), minlength=4) / len(logits)
    want = torch.tensor([0.5, 0.25, 0.15, 0.0]) / 0.9
    assert counts[3] == 0
    # Four standard deviations.
    assert ((counts - want).abs() <= 4 * (want * (1 - want) / len(logits)).sqrt()).all()


class Fixed:
    """Stands for torch.rand: the numbers that a generator would give."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, *_, **__):
        return torch.tensor(self.value, dtype=torch.float64)


@pytest.mark.parametrize("level, token", [(0.0, 1), (0.4999, 1), (0.5, 3), (0.99, 3), (1 - 2**-53, 3)])
def test_the_draw_never_takes_an_impossible_token(monkeypatch, level, token):
    monkeypatch.setattr(torch, "rand", Fixed(level))
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    assert s.draw(probs, [None]).tolist() == [token]


def test_rows_draw_from_their_own_generators():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0)
    together = s.sample(logits, params, s.row_generators([3, 4, 5, 6]))
    alone = [s.sample(logits[i : i + 1], params, s.row_generators([3 + i]))[0] for i in range(4)]
    assert together.tolist() == [int(t) for t in alone]
