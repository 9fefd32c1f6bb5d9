"""What the processes of the WeDLM and ALoDLM tests do.

Corruption and exits are keyed by a row's tokens here, so that they do not rest on the run's own noise.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.distributed import jobs
from torchtitan_ext import registry
from torchtitan_ext.initialization import seed_from

for _name in ("wedlm", "alodlm"):
    registry.METHODS.setdefault(_name, f"torchtitan_ext.methods.{_name}")


def row_keyed(noise: Any, tokens_BS: torch.Tensor, *, generator: torch.Generator) -> Any:
    """An objective's noise, each row from a generator of its own."""
    rows = []
    for row in tokens_BS:
        own = torch.Generator().manual_seed(seed_from(*row.tolist()))
        rows.append(noise(row[None], generator=own))
    return _stacked(rows)


def _stacked(rows: list[Any]) -> Any:
    if isinstance(rows[0], torch.Tensor):
        return torch.cat(rows)
    parts = [_stacked(list(part)) for part in zip(*rows, strict=True)]
    return type(rows[0])(*parts) if hasattr(rows[0], "_fields") else tuple(parts)


def prepared(trainer: Any, *, gate: float = 0.05, unlabelled: tuple[int, ...] = ()) -> None:
    """Row-keyed noise, and hazards that differ between tokens; ``unlabelled``: ranks without labels."""
    objective = trainer.objective
    objective.noise = functools.partial(row_keyed, objective.noise)
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            if name.endswith("gate.weight"):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                signs = torch.ones_like(local)
                signs[..., ::2] = -1
                local.data.copy_(gate * signs)
    if int(os.environ["RANK"]) in unlabelled:
        prepare = objective.prepare

        def without_labels(inputs: Any, labels: torch.Tensor, *, generator: torch.Generator) -> Any:
            return prepare(inputs, torch.full_like(labels, -100), generator=generator)

        objective.prepare = without_labels


def gradients(folder: str, args: list[str]) -> dict[str, torch.Tensor]:
    return jobs.gradients(folder, args, change=prepared)


def training(folder: str, args: list[str]) -> dict[str, Any]:
    """Losses, with the noise of the run itself."""
    return jobs.train(folder, args, with_weights=True)


def row_keyed_training(folder: str, args: list[str]) -> dict[str, Any]:
    return jobs.train(folder, args, change=prepared)


def training_without_masks(folder: str, args: list[str], ranks: tuple[int, ...]) -> dict[str, Any]:
    """Nothing is supervised on these ranks, so nothing is masked."""
    return jobs.train(folder, args, change=functools.partial(prepared, unlabelled=ranks))


def loaded_weights(folder: str, args: list[str]) -> dict[str, torch.Tensor]:
    """What a run starts from."""
    trainer = jobs.build(folder, args)
    trainer.checkpointer.load(step=-1)
    result = jobs.weights(trainer)
    jobs.finish(trainer)
    return result


def count_collectives(folder: str, args: list[str]) -> dict[str, int]:
    return jobs.count_collectives(folder, args)
