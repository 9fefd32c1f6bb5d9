"""When the iterates of a trained T2MLR settle, and what leaving them then saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools import utils

from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.data.tasks import TASKS, TaskSource, TokenTask
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import bench, tasks

SAVING = 0.3
"""Share of the core's forward passes that a tolerance should save."""

LOSS_DIFFERENCE = 1e-3
"""Most that the loss may change by it."""

TOLERANCES = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.003, 0.001)

BATCH = 32


class Measured(NamedTuple):
    """One tolerance."""

    tolerance: float
    loss: float
    passes: float
    """Forward passes of the core for a batch, on average."""


def convergence(run: Path, *, quick: bool = False) -> list[bench.Row]:
    """The tolerance that saves most and keeps the loss: passes of the core, and the loss, against none.

    The passes that carry gradient in training always run, so the loss is that of a training step.
    Errors: UserError for a run of another method, or on other data than a synthetic task in place.
    """
    loaded = load_model(run, device=utils.device_type)
    if loaded.method != "t2mlr":
        raise UserError(f"--t2mlr-run {run} is a run of {loaded.method!r} (allowed: t2mlr)")
    name = loaded.config.dataloader.dataset
    task, _ = tasks.task_of_run(name, loaded.config) if name in TASKS else (None, None)
    if not isinstance(task, TokenTask):
        raise UserError(f"--t2mlr-run {run} was trained on {name!r}; it must be a task that is read in place")
    samples = 2 * BATCH if quick else 16 * BATCH
    batches = _batches(task, samples=samples)
    full, *others = [measure(loaded.model, batches, tolerance) for tolerance in (0.0, *TOLERANCES)]
    equal = [m for m in others if abs(m.loss - full.loss) < LOSS_DIFFERENCE]
    kept = min(equal, key=lambda m: m.passes) if equal else others[-1]
    what = f"iterates of {Path(run).name}, {samples} samples: convergence_tol {kept.tolerance:g} / off"
    return [
        bench.row_of_once(
            f"{what}, passes of the core",
            kept.passes,
            full.passes,
            unit="passes",
            goal=1 / (1 - SAVING),
            note=f"the best of {', '.join(f'{t:g}' for t in TOLERANCES)} that changes the loss by less "
            f"than {LOSS_DIFFERENCE:g}; {100 * (1 - kept.passes / full.passes):.0f}% saved; losses "
            f"{kept.loss:.5f} and {full.loss:.5f}",
        ),
        bench.row_of_once(
            f"{what}, difference of the losses / {LOSS_DIFFERENCE:g}",
            1e3 * abs(kept.loss - full.loss),
            1e3 * LOSS_DIFFERENCE,
            unit="x 1e-3",
            goal=1.0,
            least=1e-6,
        ),
    ]


def _batches(task: TokenTask, *, samples: int) -> list[list[Any]]:
    """Held-out documents in batches of one length each."""
    source = TaskSource(task, seed=0, split=tasks.SPLIT)  # pyrefly: ignore[bad-argument-type]
    documents = sorted((task.document(source.read(i)) for i in range(samples)), key=lambda d: len(d.tokens))
    batches: list[list[Any]] = []
    for document in documents:
        fits = batches and len(batches[-1]) < BATCH
        if fits and len(batches[-1][0].tokens) == len(document.tokens):
            batches[-1].append(document)
        else:
            batches.append([document])
    return batches


@torch.no_grad()
def measure(model: Any, batches: Sequence[Sequence[Any]], tolerance: float) -> Measured:
    """The loss with a tolerance at the trained depth."""
    before, model.core.config.convergence_tol = model.core.config.convergence_tol, tolerance
    losses = targets = passes = documents = 0.0
    try:
        for batch in batches:
            tokens_BL = torch.from_numpy(np.stack([d.tokens for d in batch])).to(utils.device_type)
            labels_BL = torch.from_numpy(np.stack([d.labels for d in batch])).to(utils.device_type)
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(tokens_BL)
            logits_BLV = model(tokens_BL, positions_BL, model.get_attention_masks(positions_BL))
            losses += torch.nn.functional.cross_entropy(
                logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
            targets += (labels_BL != IGNORE_INDEX).sum().item()
            # The iterates, and the last pass, which goes on through the coda.
            passes += len(batch) * (model.core.statistics["t2mlr/iterates/mean"].item() + 1)
            documents += len(batch)
    finally:
        model.core.config.convergence_tol = before
    return Measured(tolerance, losses / targets, passes / documents)
