"""Proposition 1 by enumeration: all exit schedules of a tiny model with few masked tokens and K = 3.

The estimator's expectation is the sum over schedules of their probability times the gradient
that the loss gives with that schedule; the exact gradient comes from the objective itself, in
which only the schedules' probabilities carry the gate's gradient.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.reference.alodlm import by_hand
from tests.unit.dual_streams import MASK, build, loss_of, open_gate, prepare, rows
from torchtitan_ext.methods import alodlm
from torchtitan_ext.methods.alodlm import Section
from torchtitan_ext.methods.wedlm.batch import Noise
from torchtitan_ext.objective import IGNORE_INDEX, Prepared

PASSES = 3
KNOBS: dict[str, Any] = {"start": 1, "end": 3, "block_size": 4, "passes": PASSES}
SEGMENTS = {"three_in_one": (4,), "one_and_two": (2, 3)}
"""Lengths of the documents: all but each first token are masked."""


@pytest.fixture(scope="module")
def model():
    made = build(alodlm, flavor="qwen3-untied-debug", scale=4.0, **KNOBS)
    open_gate(made)
    return made


def objective(**knobs):
    made = alodlm.objective.ALoDLMObjective(Section(**KNOBS, w_ar=0.0, **knobs), mask_id=MASK)
    made.noise = lambda tokens, generator: (
        Noise(torch.full(tokens.shape, 0.99), torch.zeros(tokens.shape)),
        torch.zeros(*tokens.shape, PASSES),
    )
    return made


def batch_of(segments) -> Prepared:
    return prepare(objective(), rows(*SEGMENTS[segments], seed=2))


def schedules(prepared: Prepared):
    return list(itertools.product(range(1, PASSES + 1), repeat=len(prepared.inputs["index_M"])))


def forced(prepared: Prepared, schedule) -> Prepared:
    """The batch with noise that leads to the schedule."""
    noise = torch.full((len(schedule), PASSES), 2.0)
    for i, z in enumerate(schedule):
        noise[i, z - 1] = -1.0
    return Prepared({**prepared.inputs, "exit_noise_MK": noise}, prepared.labels, prepared.counts)


def hand_rollout(model, prepared, schedule):
    l_MK, hazards, _, exits = by_hand(model, prepared, lambda i, s, _: schedule[i] == s)
    assert tuple(exits) == tuple(schedule)
    return l_MK, hazards


def log_q(hazards, schedule):
    """Logarithm of a schedule's probability, from its decisions."""
    return sum(
        torch.log1p(-hazards[i, : z - 1]).sum() + (hazards[i, z - 1].log() if z < PASSES else 0.0)
        for i, z in enumerate(schedule)
    )


def parameters_of(model, *, gate: bool):
    return [p for name, p in model.named_parameters() if ("gate" in name) == gate]


def flat_gradient(loss, parameters):
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, got, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in pairs])


@pytest.fixture(scope="module")
def probabilities(model) -> dict[str, torch.Tensor]:
    """Of every schedule, for each way to pack."""
    found = {}
    for segments in SEGMENTS:
        prepared = batch_of(segments)
        with torch.no_grad():
            each = [log_q(hand_rollout(model, prepared, z)[1], z).exp() for z in schedules(prepared)]
        found[segments] = torch.stack(each)
    return found


def estimates(model, prepared, q, *, gate, **knobs):
    """Gradient that the loss gives, schedule by schedule, and their probabilities ``q``."""
    parameters, made = parameters_of(model, gate=gate), objective(**knobs)
    gradients = []
    for schedule in schedules(prepared):
        model.zero_grad()
        loss, metrics = loss_of(model, made, forced(prepared, schedule))
        loss.backward()
        assert metrics["alodlm/depth"].item() == pytest.approx(sum(schedule) / len(schedule))
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
    return torch.stack(gradients), q


def expectation(estimated) -> torch.Tensor:
    gradients, probabilities = estimated
    return (probabilities[:, None] * gradients).sum(0)


def variance(estimated) -> float:
    """Trace of the covariance over schedules."""
    gradients, probabilities = estimated
    return float((probabilities * (gradients - expectation(estimated)).square().sum(1)).sum())


def exact_gate_gradient(model, prepared) -> torch.Tensor:
    """Of J = sum_z q(z) (sum of losses at the exits + log q(z) - log pi(z)) / M."""
    pi = torch.softmax(-0.4 * torch.arange(1.0, PASSES + 1), 0)
    total = torch.zeros(())
    for schedule in schedules(prepared):
        l_MK, hazards = hand_rollout(model, prepared, schedule)
        u = log_q(hazards, schedule)
        cost = sum(l_MK[i, z - 1].detach() - pi[z - 1].log() for i, z in enumerate(schedule)) + u
        total = total + u.exp() * cost / len(schedule)
    return flat_gradient(total, parameters_of(model, gate=True))


@pytest.mark.parametrize("segments", sorted(SEGMENTS))
def test_probabilities_of_the_schedules_sum_to_one(probabilities, segments):
    prepared = batch_of(segments)
    assert (prepared.inputs["labels_M"] != IGNORE_INDEX).all() and len(prepared.inputs["index_M"]) == 3
    assert len(prepared.inputs["segment_M"].unique()) == len(SEGMENTS[segments])
    assert probabilities[segments].sum().item() == pytest.approx(1, abs=1e-5)
    # Not a product of independent depths: an early exit changes the later hazards of the others.
    q = probabilities[segments].view(3, 3, 3)
    product = q.sum((1, 2))[:, None, None] * q.sum((0, 2))[:, None] * q.sum((0, 1))
    assert (q - product).abs().max() > 1e-5


@pytest.mark.parametrize("segments", sorted(SEGMENTS))
def test_the_gates_expected_gradient_is_exact(model, probabilities, segments):
    """(a, b) = (1, 1), with and without the control variate; with the paper's (0.1, 1) it is another."""
    prepared = batch_of(segments)
    exact, q = exact_gate_gradient(model, prepared), probabilities[segments]
    assert exact.norm() > 1e-2
    for control_variate in (True, False):
        estimated = estimates(model, prepared, q, gate=True, a=1.0, b=1.0, control_variate=control_variate)
        torch.testing.assert_close(expectation(estimated), exact, atol=1e-5, rtol=1e-3)
        assert variance(estimated) > 1e-4
    relaxed = expectation(estimates(model, prepared, q, gate=True, a=0.1, b=1.0))
    assert (relaxed - exact).norm() > 1e-2


def test_the_denoisers_expected_gradient_is_exact_without_intermediate_supervision(model, probabilities):
    prepared, q = batch_of("three_in_one"), probabilities["three_in_one"]
    w = prepared.inputs["weights_M"] / prepared.inputs["weights_M"].sum()
    parameters, exact = parameters_of(model, gate=False), 0.0
    for chance, schedule in zip(q, schedules(prepared), strict=True):
        l_MK, _ = hand_rollout(model, prepared, schedule)
        at_exit = sum(w[i] * l_MK[i, z - 1] for i, z in enumerate(schedule))
        exact = exact + chance * flat_gradient(at_exit, parameters)
    sampled = estimates(model, prepared, q, gate=False, intermediate_supervision=False)
    assert exact.norm() > 0.1
    torch.testing.assert_close(expectation(sampled), exact, atol=1e-5, rtol=1e-3)
    # With it the expectation is another by design, and the variance is lower.
    reused = estimates(model, prepared, q, gate=False, intermediate_supervision=True)
    assert (expectation(reused) - exact).norm() > 1e-2 * exact.norm()
    print(
        f"denoiser variance: exit alone {variance(sampled):.3g}, with earlier passes {variance(reused):.3g}"
    )
    assert variance(reused) < 0.9 * variance(sampled)
