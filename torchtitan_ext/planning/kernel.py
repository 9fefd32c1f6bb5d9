"""Stands in for a GPU's attention kernel where there is no GPU.

It allocates and keeps for the backward what FlexAttention and packed flash attention do: queries,
keys and values, the output and the log of each query's normaliser; never a mask of all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torchtitan.models.common.attention import BaseAttention
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import round_up


class PlannedAttention(Module):
    """Inner attention that only a plan runs: its numbers mean nothing, its memory and FLOPs do."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pad_to: int = 1
        """Sequence lengths are padded to a multiple of it, as FlexAttention's are."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.pad_to = config.pad_to

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """[B, L, N, H], by an operation that selective checkpointing keeps as it keeps the real ones'."""
        missing = round_up(q_BLNH.shape[1], self.pad_to) - q_BLNH.shape[1]
        padded = [F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x for x in (q_BLNH, k_BLNH, v_BLNH)]
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in padded)
        out = torch.ops.aten._scaled_dot_product_flash_attention(q_BNLH, k_BNLH, v_BNLH, scale=scale)
        return out[0].transpose(1, 2)[:, : q_BLNH.shape[1]]


def put_in(model_config: Any, *, pad_to: int) -> None:
    """Every attention of a model's config gets the stand-in."""
    for _, config, _, _ in model_config.traverse(BaseAttention.Config):
        config.inner_attention = PlannedAttention.Config(pad_to=pad_to)
