"""The learning rate is torchtitan's up to the schedule's end, and stays there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

import torchtitan_ext  # noqa: F401 - before torchtitan
from torchtitan_ext.trainer import hold_last_rate

TOTAL, LR = 8, 0.1


def rates(steps: int, *, hold: bool, **options: Any) -> list[float]:
    """The learning rate of each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    settings: Any = LRSchedulersContainer.Config(total_steps=TOTAL, **options)
    schedulers = settings.build(optimizers=[optimizer], training_steps=steps)
    config: Any = SimpleNamespace(lr_scheduler=settings, training=SimpleNamespace(steps=steps))
    if hold:
        hold_last_rate(schedulers, config)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedulers.step()
    return found


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("options", [{}, {"min_lr_factor": 0.3}, {"decay_ratio": 0.5}, {"decay_ratio": 0.0}])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_the_last_rate_is_kept(decay_type, options, warmup_steps, caplog):
    options = {"decay_type": decay_type, "warmup_steps": warmup_steps, **options}
    held, plain = rates(20, hold=True, **options), rates(TOTAL, hold=False, **options)
    assert held[:TOTAL] == plain and len(set(held[TOTAL:])) == 1
    end = LR if options.get("decay_ratio") == 0 else LR * options.get("min_lr_factor", 0.0)
    assert held[-1] == pytest.approx(end)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "[lr_scheduler] total_steps = 8 is less than [training] steps = 20: from step 9 on the learning rate "
        "stays what the schedule ends with"
    ]


def test_a_schedule_of_the_whole_run_is_torchtitans(caplog):
    assert (
        rates(TOTAL, hold=True, warmup_steps=2) == rates(TOTAL, hold=False, warmup_steps=2)
        and not caplog.records
    )
