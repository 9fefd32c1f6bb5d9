"""Rotary embedding for decoding: the rotation of a step is looked up once, not once a block.

At one token a forward the look-up, its bounds check and the many small operations of the
training module cost as much as a tenth of a small model's step.

Shape suffixes: B = batch rows (1 when all are at the same positions), L = tokens,
N = heads, H = head dimension, T = positions of the table.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn
from torchtitan.models.common.rope import CosSinRoPE


class StepRotary(nn.Module):
    """Half-rotation with the table of a :class:`CosSinRoPE`; equal to it bit for bit.

    The rotation is kept as long as the same ``positions`` tensor comes in, so a decoder
    must not change one in place between forwards.
    """

    def __init__(self, cache_T2H: torch.Tensor) -> None:
        super().__init__()
        self._table_T2H = cache_T2H
        self._positions: torch.Tensor | None = None

    def forward(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries and keys in their own dtype; ``positions``: [1 or B, L]."""
        if positions is not self._positions:
            self._look_up(positions)
        heads = q_BLNH.shape[2]
        # One rotation for both: the heads do not know of each other.
        both_BLNH = torch.cat((q_BLNH, k_BLNH), dim=2).float()
        half = both_BLNH.shape[-1] // 2
        turned_BLNH = both_BLNH * self._cos + both_BLNH.roll(half, -1) * self._signed_sin
        turned_BLNH = turned_BLNH.to(q_BLNH.dtype)
        return turned_BLNH[:, :, :heads], turned_BLNH[:, :, heads:]

    def _look_up(self, positions: torch.Tensor) -> None:
        cos_BL1H, sin_BL1H = self._table_T2H[positions][:, :, None].chunk(2, dim=-1)
        # roll moves the halves without the minus sign of the first one.
        first, second = sin_BL1H.chunk(2, dim=-1)
        self._cos, self._signed_sin = cos_BL1H.contiguous(), torch.cat((-first, second), dim=-1)
        self._positions = positions


@contextmanager
def step_rotary(model: nn.Module) -> Generator[None]:
    """Put :class:`StepRotary` in the place of every half-rotation module, for the time of the block."""
    places = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is CosSinRoPE
    ]
    by_config = {str(rope.config): StepRotary(rope.cache) for _, _, rope in places}
    try:
        for module, name, rope in places:
            setattr(module, name, by_config[str(rope.config)])
        yield
    finally:
        for module, name, rope in places:
            setattr(module, name, rope)
