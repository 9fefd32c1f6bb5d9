"""Steps that are not finite: decided on the host or on the device, with the same result."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from torchtitan_ext import config as front
from torchtitan_ext.errors import UserError
from torchtitan_ext.faults.errors import NonFinite
from torchtitan_ext.faults.nonfinite import (
    GuardedOptimizers,
    Layout,
    Measured,
    NonFiniteGuard,
    square_of_norm,
    takes_found_inf,
)
from torchtitan_ext.faults.section import FaultsSection
from torchtitan_ext.trainer import default_config


class Run:
    """Two parameters trained by fused AdamW on made-up gradients."""

    def __init__(self, *, on_device: bool, device: str = "cpu", **section: Any) -> None:
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(n, device=device)) for n in (3, 5)]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, fused=True)
        self.skips: list[tuple[int, int]] = []
        self.guard = NonFiniteGuard(
            FaultsSection(**section),
            layout=Layout(),
            device=torch.device(device),
            on_device=on_device,
            last_good=lambda: "step-0",
            on_skip=lambda step, count: self.skips.append((step, count)),
        )
        self.optimizers = GuardedOptimizers(_Container([self.optimizer]), self.guard)

    def step(self, step: int, *, loss: float = 1.0, gradient: float = 1.0, microbatches: int = 1) -> None:
        self.guard.begin(step, microbatches=microbatches)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, gradient) * (step + 1)
        for index in range(microbatches):
            value = torch.tensor(loss if index == 0 else 1.0, device=self.parameters[0].device)
            self.guard.after_backward(value, self.parameters)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizers.step()

    def state(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.detach().cpu().clone() for value in [*self.parameters, *moments]]


class _Container(list[Any]):
    def step(self) -> None:
        for optimizer in self:
            optimizer.step()


BAD = {
    "nan loss": {"loss": math.nan},
    "infinite loss": {"loss": math.inf},
    "nan gradient": {"gradient": math.nan},
    "infinite gradient": {"gradient": math.inf},
    "overflowing norm": {"gradient": 3e19},
}


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("bad", sorted(BAD))
def test_a_skipped_step_leaves_weights_and_moments(bad, on_device):
    got = Run(on_device=on_device, non_finite="skip")
    got.step(1)
    before = got.state()
    got.step(2, **BAD[bad])
    assert all(torch.equal(a, b) for a, b in zip(before, got.state(), strict=True))
    got.step(3)
    got.guard.settle()
    assert got.skips == [(2, 1)] and got.guard.skipped == 1
    # The same as a run that never met the bad batch.
    expected = Run(on_device=False)
    expected.step(1)
    expected.step(3)
    assert all(torch.equal(a, b) for a, b in zip(got.state(), expected.state(), strict=True))


def test_the_device_skips_a_first_step_too():
    run = Run(on_device=True, non_finite="skip")
    weights = [p.detach().clone() for p in run.parameters]
    run.step(1, loss=math.nan)
    assert all(torch.equal(a, b) for a, b in zip(weights, run.parameters, strict=True))
    assert {float(state["step"]) for state in run.optimizer.state.values()} == {0.0}
    assert not hasattr(run.optimizer, "found_inf")


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_stop_changes_nothing_and_names_the_step(on_device):
    run = Run(on_device=on_device)
    run.step(1)
    before = run.state()
    with pytest.raises(
        NonFinite, match=r"step 2: not finite: loss nan on rank 0.*checkpoint: step-0"
    ) as stop:
        run.step(2, loss=math.nan)
        run.step(3)  # the host learns from the device one step later, before anything has changed
    assert stop.value.exit_code == 3
    assert all(torch.equal(a, b) for a, b in zip(before, run.state(), strict=True))


def test_every_microbatch_counts():
    run = Run(on_device=False)
    with pytest.raises(NonFinite):
        run.step(1, loss=math.nan, microbatches=3)


def test_max_skipped_in_a_row():
    run = Run(on_device=False, non_finite="skip", max_skipped=2)
    for step, loss in enumerate([math.nan, math.nan, 1.0, math.inf, math.inf], start=1):
        run.step(step, loss=loss)
    with pytest.raises(NonFinite, match="3 batches in a row"):
        run.step(6, loss=math.nan)
    assert run.skips == [(1, 1), (2, 2), (4, 3), (5, 4)]


def test_weights_that_are_not_finite_are_not_saved():
    run = Run(on_device=False)
    run.step(1)
    run.guard.before_save(run.parameters)
    run.parameters[0].data[0] = math.inf
    with pytest.raises(NonFinite, match="step 1: weights are not finite, and are not saved"):
        run.guard.before_save(run.parameters)


def test_a_step_nobody_measured_is_made():
    run = Run(on_device=False)
    run.parameters[0].grad = torch.ones(3)
    before = run.parameters[0].detach().clone()
    run.optimizers.step()
    assert not torch.equal(before, run.parameters[0]) and len(run.optimizers) == 1


def test_description():
    nan, inf = math.nan, math.inf
    one = Measured(4, [1.0, nan, 1.0], [nan, nan, nan], finite=False)
    assert one.describe() == "loss nan on rank 1, finite on 2; gradient norm nan"
    part = Measured(4, [1.0, 0.5], [4.0, inf], finite=False)
    assert part.describe() == "loss 1.5, finite on every rank; gradient norm inf in the part of rank 1"
    many = Measured(4, [nan] * 12, [nan] * 12, finite=False)
    assert "on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in many.describe()


def test_square_of_norm():
    tensors = [torch.full((4,), 3.0), None, torch.full((2, 2), 2.0)]
    assert square_of_norm(tensors, ranks=1).item() == pytest.approx(4 * 9 + 4 * 4)
    assert square_of_norm(tensors, ranks=4).item() == pytest.approx((4 * 9 + 4 * 4) / 4)
    assert square_of_norm([], ranks=1).item() == 0


def test_only_fused_adam_on_the_device_decides_there():
    parameter = torch.nn.Parameter(torch.zeros(2))
    cuda = torch.device("cuda")
    adam = functools.partial(torch.optim.AdamW, [parameter])
    assert not takes_found_inf([adam(fused=True)], device=torch.device("cpu"))
    assert not takes_found_inf([adam(fused=True)], device=cuda)  # offloaded to the CPU
    assert not takes_found_inf([adam(foreach=True)], device=cuda)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--faults.non_finite", "ignore"], ["faults.non_finite", "ignore", "skip"]),
        (["--faults.max_skipped", "0"], ["faults.max_skipped must be at least 1", "0"]),
        (["--faults.spike_factor", "0.5"], ["faults.spike_factor must be 0 (off) or greater than 1", "0.5"]),
        (["--faults.grad_norm_spike_factor", "-1"], ["faults.grad_norm_spike_factor", "-1"]),
    ],
)
def test_bad_values_are_refused_in_one_line(args, words):
    with pytest.raises(UserError) as refused:
        front.parse(["--model.name", "ar", *args], make_default=default_config)
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


@pytest.mark.gpu
def test_on_a_gpu_the_device_decides():
    run = Run(on_device=True, device="cuda", non_finite="skip")
    assert takes_found_inf([run.optimizer], device=torch.device("cuda"))
    run.step(1)
    before = run.state()
    for name in sorted(BAD):
        run.step(2, **BAD[name])
    assert all(torch.equal(a, b) for a, b in zip(before, run.state(), strict=True))
    run.step(3)
    run.guard.settle()
    assert run.guard.skipped == len(BAD)
