"""What the processes of the tests of a resume at another scale do."""

from __future__ import annotations

import hashlib
import logging
from typing import Any, NamedTuple

import torch

from tests.distributed import jobs
from torchtitan_ext.trainer import ExtTrainer


class Seen(NamedTuple):
    """What one row of a step was, as digests."""

    data: str
    """Its tokens, as the loader gives them."""

    prepared: str
    """Its tokens as the model sees them, noise included."""


def digest(row: torch.Tensor) -> str:
    return hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()[:16]


def record_rows(trainer: ExtTrainer) -> dict[tuple[int, int], Seen]:
    """Fills with the rows of this rank by (step, place in the step's global batch)."""
    seen: dict[tuple[int, int], Seen] = {}
    prepare = trainer.objective.prepare
    dims = trainer.parallel_dims
    mesh = dims.get_mesh("batch") if dims.dp_enabled else None
    rank, ranks = (mesh.get_local_rank(), mesh.size()) if mesh is not None else (0, 1)

    def recorded(inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Any) -> Any:
        tokens = inputs["input"].clone()
        prepared = prepare(inputs, labels, generator=generator)
        rows = prepared.inputs["input"].reshape(len(tokens), -1)
        start = len(trainer._local_counts) * len(tokens)  # rows of the step's earlier microbatches
        for j in range(len(tokens)):
            seen[trainer.step, (start + j) * ranks + rank] = Seen(digest(tokens[j]), digest(rows[j]))
        return prepared

    trainer.objective.prepare = recorded  # pyrefly: ignore[bad-assignment]
    return seen


def state(trainer: ExtTrainer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, each tensor in full; copies."""
    moments = {
        f"optimizer.{name}": jobs.full(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name, value in trainer.optimizers.state_dict().items()
        if isinstance(value, torch.Tensor | int | float)
    }
    return jobs.weights(trainer) | moments


def part(folder: str, args: list[str]) -> dict[str, Any]:
    """One start of a run: losses, rows seen, the state right after loading and at the end, warnings."""
    trainer = jobs.build(folder, args)
    warnings: list[str] = []
    handler = logging.Handler(level=logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # pyrefly: ignore[bad-assignment]
    logging.getLogger().addHandler(handler)
    result: dict[str, Any] = {"seen": record_rows(trainer), "loaded": None, "warnings": warnings}
    recorder: Any = jobs.Recorder()
    trainer.metrics_processor.logger = recorder
    load = trainer.checkpointer.load

    def loaded(*args: Any, **kwargs: Any) -> bool:
        found = load(*args, **kwargs)
        if found:
            result["loaded"] = state(trainer)
        return found

    trainer.checkpointer.load = loaded  # pyrefly: ignore[bad-assignment]
    trainer.train()
    result["loss"] = recorder.series("loss_metrics/global_avg_loss")
    result["grad_norm"] = recorder.series("grad_norm")
    result["end"] = state(trainer)
    jobs.finish(trainer)
    return result
