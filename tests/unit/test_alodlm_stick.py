"""Exit distributions: sums, the decision tree by enumeration, the prior, the credit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchtitan_ext  # noqa: F401
from torchtitan_ext.methods.alodlm import stick

tokens = st.integers(1, 5)
passes = st.integers(1, 6)


def logits_of(m: int, k: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(m, k, generator=torch.Generator().manual_seed(seed))


@given(m=tokens, k=passes, seed=st.integers(0, 99), scale=st.sampled_from([0.1, 3.0, 50.0]))
@settings(deadline=None, max_examples=60)
def test_distributions_sum_to_one(m, k, seed, scale):
    logits = logits_of(m, k, seed, scale)
    assert stick.full_stick(logits).sum(1).tolist() == pytest.approx([1.0] * m, abs=1e-5)
    assert stick.prior(k, decay=0.4).sum().item() == pytest.approx(1)
    for exits in itertools.islice(itertools.product(range(1, k + 1), repeat=m), 50):
        exit_M = torch.tensor(exits)
        omega = stick.stick_weights(logits, exit_M)
        assert omega.sum(1).tolist() == pytest.approx([1.0] * m, abs=1e-5)
        assert not (omega * (torch.arange(1, k + 1) > exit_M[:, None])).any()


@given(k=passes, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_log_probability_is_that_of_the_decisions(k, seed):
    """Written as products of hazards, lambda_K = 1; the probabilities of all exits sum to 1."""
    logits = logits_of(1, k, seed)
    hazards = [stick.hazard(logits[:, s - 1], depth=s, passes=k).item() for s in range(1, k + 1)]
    assert hazards[-1] == 1
    total = 0.0
    for z in range(1, k + 1):
        expected = hazards[z - 1]
        for r in range(1, z):
            expected *= 1 - hazards[r - 1]
        u = stick.exit_log_probability(logits, torch.tensor([z]))
        assert u.exp().item() == pytest.approx(expected, abs=1e-6)
        assert stick.full_stick(logits)[0, z - 1].item() == pytest.approx(expected, abs=1e-6)
        omega = stick.stick_weights(logits, torch.tensor([z]))[0]
        rest = 1 - sum(stick.full_stick(logits)[0, : z - 1].tolist())
        assert omega[z - 1].item() == pytest.approx(rest, abs=1e-5)
        total += expected
    assert total == pytest.approx(1)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[90.0, -90.0, 3.0], [-90.0, 90.0, -3.0]], requires_grad=True)
    for exits in itertools.product((1, 2, 3), repeat=2):
        u = stick.exit_log_probability(logits, torch.tensor(exits))
        (gradient,) = torch.autograd.grad(u.sum(), logits)
        assert u.isfinite().all() and gradient.isfinite().all()
        assert not gradient[:, 2].any()  # the last pass decides nothing


def test_a_fresh_gate_gives_every_depth_the_same_mass():
    for k in (1, 2, 4, 8):
        start = stick.first_logits(k)
        assert stick.full_stick(start[None])[0].tolist() == pytest.approx([1 / k] * k)
    assert torch.sigmoid(stick.first_logits(4))[:3].tolist() == pytest.approx([1 / 4, 1 / 3, 1 / 2])


def test_prior_of_the_paper():
    pi = stick.prior(4, decay=0.4)
    assert pi.tolist() == pytest.approx([0.4131, 0.2769, 0.1856, 0.1244], abs=1e-4)
    assert (pi * torch.arange(1, 5)).sum().item() == pytest.approx(2.02, abs=5e-3)
    assert stick.divergence(pi, pi).item() == pytest.approx(0, abs=1e-6)
    assert stick.divergence(torch.tensor([1.0, 0, 0, 0]), pi).item() == pytest.approx(-pi[0].log().item())


def credit(average_K, **knobs):
    defaults = {
        "exit_loss_M": torch.tensor([2.0, 3.0]),
        "first_loss_M": torch.tensor([2.5, 1.0]),
        "log_probability_M": torch.tensor([-1.0, -0.5]),
        "exit_M": torch.tensor([1, 3]),
        "average_K": average_K,
        "prior_K": stick.prior(3, decay=0.4),
        "a": 0.1,
        "b": 1.0,
    }
    return stick.credit(**{**defaults, **knobs})


def test_credit_by_hand_and_its_cancellation():
    """With a = b = 1 the average drops out token by token: the exact joint KL."""
    average, pi = torch.tensor([0.5, 0.2, 0.3]), stick.prior(3, decay=0.4)
    got = credit(average)
    for i, (loss, u, z) in enumerate([(-0.5, -1.0, 1), (2.0, -0.5, 3)]):
        q, p = average[z - 1].log(), pi[z - 1].log()
        assert got[i].item() == pytest.approx(float(loss + 0.1 * (u - q) + (q - p)), abs=1e-6)
    exact = credit(average, a=1.0)
    other = credit(torch.tensor([0.1, 0.8, 0.1]), a=1.0)
    torch.testing.assert_close(exact, other)
    assert not torch.allclose(got, credit(torch.tensor([0.1, 0.8, 0.1])))
    without = credit(average, first_loss_M=None)
    torch.testing.assert_close(without - got, torch.tensor([2.5, 1.0]))
    assert credit(torch.tensor([0.0, 1.0, 0.0])).isfinite().all()


def test_actor_sums_within_segments():
    c, u = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.3, 0.4, 0.5], requires_grad=True)
    loss = stick.actor(c, u, torch.tensor([0, 0, 1]))
    assert loss.item() == pytest.approx((1 + 2) * (0.3 + 0.4) + 5 * 0.5)
    (gradient,) = torch.autograd.grad(loss, u)
    assert gradient.tolist() == [3.0, 3.0, 5.0]
