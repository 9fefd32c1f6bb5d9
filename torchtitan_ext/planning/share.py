"""Which share of all pairs of positions the attention kernel computes under a method's mask."""

from __future__ import annotations

import copy
from typing import Any

from torch.nn import functional as F

from torchtitan_ext import models
from torchtitan_ext.attention.dense import TILE, TiledMask
from torchtitan_ext.objective import row_generators
from torchtitan_ext.planning.step import synthetic_rows

LONGEST = 1536
"""Tokens of data up to which the mask itself is evaluated; beyond, its blocks are extrapolated."""


def computed_share(config: Any, model: Any) -> float:
    """Blocks of 128 x 128 that are not empty, of all, where a row is one document.

    ``model``: on the meta device. The number of blocks is a polynomial of degree 2 of the length,
    so three short lengths give that of a long one.
    """
    length = config.training.seq_len
    if length <= LONGEST:
        used, total = _blocks(config, model, length)
        return used / total
    lengths = [LONGEST // 3, 2 * LONGEST // 3, LONGEST]
    found = [_blocks(config, model, n) for n in lengths]
    used, total = (_extrapolated(lengths, values, at=length) for values in zip(*found, strict=True))
    return min(used / total, 1.0)


def _blocks(config: Any, model: Any, length: int) -> tuple[int, int]:
    """Blocks that are computed, and all."""
    config = copy.copy(config)
    config.training = copy.copy(config.training)
    config.training.local_batch_size, config.training.seq_len = 1, length
    inputs, labels = synthetic_rows(config)
    generator = row_generators(seed=0, step=0, rows=[0])
    positions = (
        models.build_objective(config).prepare(inputs, labels, generator=generator).inputs["positions"]
    )
    if not hasattr(model.config, "attention"):  # one of torchtitan's own, causal
        side = -(-length // TILE)
        return side * (side + 1) // 2, side**2
    mask = model.get_attention_masks(positions=positions)
    if mask is None:
        return 1, 1
    rows, side = positions.shape[0], -(-positions.shape[1] // TILE)
    allowed = mask.whole_B1QK if isinstance(mask, TiledMask) else mask
    missing = side * TILE - positions.shape[1]
    padded = F.pad(allowed[:, 0], (0, missing, 0, missing))
    used = padded.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE)).any(dim=4).any(dim=2)
    return int(used.sum()), rows * side**2


def _extrapolated(lengths: list[int], values: tuple[int, ...], *, at: int) -> float:
    """The parabola through three points (Lagrange)."""
    total = 0.0
    for i, (x, value) in enumerate(zip(lengths, values, strict=True)):
        others = [other for j, other in enumerate(lengths) if j != i]
        total += value * (at - others[0]) * (at - others[1]) / ((x - others[0]) * (x - others[1]))
    return total
