"""Temporal attention and the states of a trajectory, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.tdlm import temporal


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- attention -------------------------------------------------------------------------


@given(states=st.integers(1, 6), remembered=st.integers(0, 6), sink=st.floats(-4, 4), seed=st.integers(0, 50))
@settings(deadline=None, max_examples=40)
def test_attention_is_softmax_times_a_sigmoid_gate(states, remembered, sink, seed):
    """Eq. 8 and 9 in the form softmax-attention * sigmoid(lse - b), head by head and state by state."""
    q, k, v = randn(3, states, 2, 8, seed=seed), *randn(2, 3, remembered, 2, 8, seed=seed + 1)
    allowed = randn(3, states, remembered, seed=seed + 2) > 0
    got = temporal.attend(q, k, v, sink_1=torch.tensor([sink]), allowed_XQT=allowed)
    for x in range(3):
        for i in range(states):
            seen = allowed[x, i].nonzero()[:, 0]
            for m in range(2):
                scores = k[x, seen, m] @ q[x, i, m] / math.sqrt(8)
                want = torch.zeros(8)
                if len(seen):
                    want = scores.softmax(0) @ v[x, seen, m] * torch.sigmoid(scores.logsumexp(0) - sink)
                torch.testing.assert_close(got[x, i, m], want, atol=1e-5, rtol=1e-5)


def test_nothing_to_see_is_zero_and_has_finite_gradients():
    q, k, v = (randn(2, 3, 2, 4, seed=i).requires_grad_() for i in range(3))
    sink = torch.zeros(1, requires_grad=True)
    none = torch.zeros(2, 3, 3, dtype=torch.bool)
    got = temporal.attend(q, k, v, sink_1=sink, allowed_XQT=none)
    assert torch.equal(got, torch.zeros_like(got))
    got.sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v, sink))
    empty = temporal.attend(q, k[:, :0], v[:, :0], sink_1=sink)
    assert torch.equal(empty, torch.zeros_like(empty))


def test_rotation_is_the_papers_and_scores_depend_on_the_difference_alone():
    head_dim = 12
    cos, sin = temporal.rotation(torch.tensor([7]), head_dim)
    for u in range(head_dim // 2):
        angle = 7 * 10000 ** (-2 * u / head_dim)
        assert cos[0, u] == pytest.approx(math.cos(angle), abs=1e-5)
        assert sin[0, u] == pytest.approx(math.sin(angle), abs=1e-5)
    q, k = randn(1, 2, head_dim), randn(1, 2, head_dim, seed=1)

    def score(r_query: int, r_key: int) -> torch.Tensor:
        turned = [
            temporal.rotate(x, *temporal.rotation(torch.tensor([r]), head_dim))
            for x, r in ((q, r_query), (k, r_key))
        ]
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(score(9, 4), score(5, 0), atol=1e-4, rtol=1e-4)
    assert (score(9, 4) - score(9, 3)).abs().max() > 1e-2
    assert torch.equal(temporal.rotate(q, *temporal.rotation(torch.tensor([0]), head_dim)), q)


def test_a_rotation_pairs_a_dimension_with_the_one_half_a_head_on():
    x = torch.zeros(1, 1, 4)
    x[0, 0, 1] = 1
    turned = temporal.rotate(x, torch.tensor([[1.0, 0.6]]), torch.tensor([[0.0, 0.8]]))
    torch.testing.assert_close(turned[0, 0], torch.tensor([0, 0.6, 0, 0.8]))


@pytest.mark.parametrize(
    ("window", "want"),
    [
        ("full", [[], [0], [0, 1], [0, 1, 2]]),
        (1, [[], [0], [1], [2]]),
        (2, [[], [0], [0, 1], [1, 2]]),
        (9, [[], [0], [0, 1], [0, 1, 2]]),
        ("current", [[0], [1], [2], [3]]),
    ],
)
def test_which_states_are_seen(window, want):
    seen = temporal.seen_states(4, window=window)
    assert [row.nonzero()[:, 0].tolist() for row in seen] == want


def test_corrections_may_move_to_the_position_before():
    masked = torch.tensor([[False, True, False, True, True]])
    assert torch.equal(temporal.corrected(masked, shift="literal"), masked)
    moved = temporal.corrected(masked, shift="moved")
    assert moved.tolist() == [[True, False, True, True, False]]


# --- states ----------------------------------------------------------------------------


def test_states_and_targets_of_a_written_example():
    """A prompt of 2, five response tokens revealed in 4 steps, one padding token; s = 0, 2, 3, 4."""
    reveal = torch.tensor([[0, 0, 3, 1, 4, 2, 1, 0]])
    masked = temporal.masked_states(reveal, torch.tensor([[0, 2, 3, 4]]))
    assert masked.int().tolist() == [
        [
            [0, 0, 1, 1, 1, 1, 1, 0],
            [0, 0, 1, 0, 1, 0, 0, 0],
            [0, 0, 0, 0, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ]
    ]
    assert temporal.targets(masked).int().tolist() == [
        [[0] * 8, [0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0]]
    ]
    assert temporal.revealed_counts(reveal, masked[:, :-1]).tolist() == [[0, 3, 4]]


@st.composite
def trajectories(draw):
    """A response's reveal steps (every step reveals something) behind a prompt, and a K that fits."""
    total = draw(st.integers(2, 12))
    extra = draw(st.lists(st.integers(1, total), max_size=8))
    response = draw(st.permutations([*range(1, total + 1), *extra]))
    reveal = [0] * draw(st.integers(1, 4)) + list(response) + [0] * draw(st.integers(0, 3))
    return reveal, total, draw(st.integers(2, total))


@given(trajectories(), st.integers(0, 100))
@settings(deadline=None, max_examples=80)
def test_targets_and_the_first_interval_cover_the_response_once(trajectory, seed):
    reveal, total, states = trajectory
    reveal_BL = torch.tensor([reveal])
    steps = temporal.sample_steps([total], states=states, generator=torch.Generator().manual_seed(seed))
    assert steps.shape == (1, states + 1)
    assert steps[0, 0] == 0 and steps[0, -1] == total and bool((steps.diff() > 0).all())
    masked = temporal.masked_states(reveal_BL, steps)
    assert not masked[:, -1].any()
    targets = temporal.targets(masked)
    assert not targets[:, 0].any()
    seeded = masked[:, 0] & ~masked[:, 1]
    assert torch.equal(targets.sum(1) + seeded.int(), (reveal_BL > 0).int())
    counts = temporal.revealed_counts(reveal_BL, masked[:, :-1])
    assert counts.tolist() == [[sum(0 < a <= s for a in reveal) for s in steps[0, :-1].tolist()]]


def test_steps_are_uniform_over_the_inner_ones():
    generator = torch.Generator().manual_seed(0)
    drawn = temporal.sample_steps([6] * 4000, states=3, generator=generator)[:, 1:-1]
    shares = torch.bincount(drawn.flatten(), minlength=7)[1:6] / 4000
    torch.testing.assert_close(shares, torch.full((5,), 2 / 5), atol=0.03, rtol=0)
    assert set(drawn.flatten().tolist()) == {1, 2, 3, 4, 5}


def test_as_many_states_as_steps_takes_every_step():
    steps = temporal.sample_steps(torch.tensor([4]), states=4, generator=torch.Generator())
    assert steps.tolist() == [[0, 1, 2, 3, 4]]


def test_too_few_steps_for_the_states_are_refused_and_padding_is_not():
    with pytest.raises(UserError, match=r"states = 5 \(K\) is more than the 4 steps of a trajectory"):
        temporal.sample_steps([9, 4], states=5, generator=torch.Generator())
    assert temporal.sample_steps([0], states=2, generator=torch.Generator()).tolist() == [[0, 0, 0]]
