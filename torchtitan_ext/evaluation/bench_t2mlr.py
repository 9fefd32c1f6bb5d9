"""When the iterates of a trained T2MLR settle, and what leaving them then saves.

Shape suffixes: B = rows of a batch, L = tokens of a row, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools import utils

from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.data.tasks import TASKS, TaskSource, TokenTask
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import bench, tasks

SAVING = 0.3
"""Share of the core's forward passes that a tolerance should save."""

LOSS_DIFFERENCE = 1e-3
"""Most that the loss may change by it."""

TOLERANCES = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.003, 0.001)

BATCH = 32
"""Samples of a task in one batch. Text has the rows of training: the change is the largest of a batch."""

ROWS = 32
"""Held-out rows of text; with ``quick``: two batches."""

DEPTHS = (1, 2, 3, 4, 6, 8, 12)
"""Iterates for the losses without a tolerance; what the trained depth does not exceed is left out."""


class Batch(NamedTuple):
    """Rows as a training step sees them."""

    tokens_BL: torch.Tensor
    labels_BL: torch.Tensor
    positions_BL: torch.Tensor


class Measured(NamedTuple):
    """One tolerance, or one depth."""

    tolerance: float
    depth: int
    """Iterates at most."""

    loss: float
    passes: float
    """Forward passes of the core for a row, on average."""

    change: float
    """Relative change of the last iterate, the largest of all tokens; 0 for a single iterate."""


def convergence(run: Path, *, quick: bool = False) -> list[bench.Row]:
    """The tolerance that saves most and keeps the loss: passes of the core, and the loss, against none.

    On samples of the run's task, or on rows of its [validation] data. The passes that carry gradient in
    training always run, so the loss is that of a training step.
    Errors: UserError for a run of another method, or of text without [validation].
    """
    loaded = load_model(run, device=utils.device_type)
    model: Any = loaded.model
    if loaded.method != "t2mlr":
        raise UserError(f"--t2mlr-run {run} is a run of {loaded.method!r} (allowed: t2mlr)")
    batches, data = _held_out(loaded, run=run, quick=quick)
    trained = model.core.depth
    full, *others = [
        measure(model, batches, tolerance=tolerance, depth=trained) for tolerance in (0.0, *TOLERANCES)
    ]
    cut = [measure(model, batches, depth=depth) for depth in DEPTHS if depth < trained]
    equal = [m for m in others if abs(m.loss - full.loss) < LOSS_DIFFERENCE]
    kept = min(equal, key=lambda m: m.passes) if equal else others[-1]
    what = f"iterates of {Path(run).name}, {data}: convergence_tol {kept.tolerance:g} / off"
    tried = ", ".join(f"{m.tolerance:g}: {m.passes:.1f} ({m.loss - full.loss:+.5f})" for m in others)
    return [
        bench.row_of_once(
            f"{what}, passes of the core",
            kept.passes,
            full.passes,
            unit="passes",
            goal=1 / (1 - SAVING),
            note=f"the best of those that change the loss by less than {LOSS_DIFFERENCE:g}; "
            f"{100 * (1 - kept.passes / full.passes):.0f}% saved; losses {kept.loss:.5f} and "
            f"{full.loss:.5f}; each tolerance with its passes (and the change of the loss): {tried}",
        ),
        bench.row_of_once(
            f"{what}, difference of the losses / {LOSS_DIFFERENCE:g}",
            1e3 * abs(kept.loss - full.loss),
            1e3 * LOSS_DIFFERENCE,
            unit="x 1e-3",
            goal=1.0,
            least=1e-6,
            note=_settling([*cut, full]),
        ),
    ]


def _settling(depths: Sequence[Measured]) -> str:
    """How the iterates settle, and the loss with fewer of them, in words; the last is the trained depth."""
    full = depths[-1]
    changes = ", ".join(f"{m.depth}: {m.change:.2g}" for m in depths if m.depth > 1)
    losses = ", ".join(f"{m.depth}: {m.loss - full.loss:+.5f}" for m in depths[:-1])
    return (
        f"largest relative change of a token by iterate {changes}; "
        f"change of the loss with fewer iterates than {full.depth} {losses}"
    )


def _held_out(loaded: LoadedModel, *, run: Path, quick: bool) -> tuple[list[Batch], str]:
    """Batches of held-out data, and what they are in words."""
    name = loaded.config.dataloader.dataset
    task, _ = tasks.task_of_run(name, loaded.config) if name in TASKS else (None, None)
    if isinstance(task, TokenTask):
        samples = 2 * BATCH if quick else 16 * BATCH
        return list(_task_batches(task, samples=samples)), f"{samples} samples"
    if not loaded.config.validator.enable:
        raise UserError(
            f"--t2mlr-run {run}: its data is not a task that is read in place, and it has no [validation] "
            "(enable = true) that names held-out text"
        )
    batches = _text_batches(loaded, quick=quick)
    rows = sum(len(batch.tokens_BL) for batch in batches)
    return batches, f"{rows} held-out rows of {loaded.config.training.seq_len}"


def _text_batches(loaded: LoadedModel, *, quick: bool) -> list[Batch]:
    """Packed rows of the run's validation data, as many in a batch as on a rank in training."""
    config = loaded.config
    rows = config.training.local_batch_size
    loader = config.validator.dataloader.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=loaded.tokenizer,
        seq_len=config.training.seq_len,
        local_batch_size=rows,
    )
    wanted = 2 if quick else -(-ROWS // rows)
    return [Batch(inputs["input"], labels, inputs["positions"]) for inputs, labels in islice(loader, wanted)]


def _task_batches(task: TokenTask, *, samples: int) -> Iterator[Batch]:
    """Held-out documents in batches of one length each."""
    source = TaskSource(task, seed=0, split=tasks.SPLIT)  # pyrefly: ignore[bad-argument-type]
    documents = sorted((task.document(source.read(i)) for i in range(samples)), key=lambda d: len(d.tokens))
    for length, group in groupby(documents, key=lambda d: len(d.tokens)):
        while batch := list(islice(group, BATCH)):
            tokens_BL, labels_BL = (
                torch.from_numpy(np.stack(part))
                for part in zip(*((d.tokens, d.labels) for d in batch), strict=True)
            )
            yield Batch(tokens_BL, labels_BL, torch.arange(length).expand_as(tokens_BL))


@torch.no_grad()
def measure(model: Any, batches: Sequence[Batch], *, depth: int, tolerance: float = 0.0) -> Measured:
    """The loss of so many iterates, or of those that a tolerance leaves of them."""
    core = model.core
    before = core.config.convergence_tol, core.depth
    core.config.convergence_tol, core.depth = tolerance, depth
    losses = targets = passes = rows = change = 0.0
    try:
        for batch in batches:
            tokens_BL, labels_BL, positions_BL = (part.to(utils.device_type) for part in batch)
            logits_BLV = model(tokens_BL, positions_BL, model.get_attention_masks(positions_BL))
            losses += F.cross_entropy(
                logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            ).item()
            targets += (labels_BL != IGNORE_INDEX).sum().item()
            # The iterates, and the last pass, which goes on through the coda.
            passes += len(tokens_BL) * (core.statistics["t2mlr/iterates/mean"].item() + 1)
            rows += len(tokens_BL)
            change = max(change, core.statistics["t2mlr/residual/max"].item())
    finally:
        core.config.convergence_tol, core.depth = before
    return Measured(tolerance, depth, losses / targets, passes / rows, change)
