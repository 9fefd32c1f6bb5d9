"""Packed attention for plain causal and bidirectional documents (flash kernels, CUDA)."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torchtitan.models.common.attention import (
    VarlenAttention,
    VarlenMetadata,
    create_varlen_metadata_for_document,
)

from torchtitan_ext.errors import UserError
from torchtitan_ext.masks import Mask

# (left, right) reach of a query in tokens, -1 for unlimited: the kernel's own notation.
WINDOWS = {"causal_document": (-1, 0), "bidirectional_document": (-1, -1)}


class VarlenMask(NamedTuple):
    """Document boundaries of a packed batch and the reach of a query."""

    metadata: VarlenMetadata
    window: tuple[int, int]


def build_varlen_mask(mask: Mask) -> VarlenMask:
    """Boundaries of the documents of a packed batch.

    Raises:
        UserError: the mask is not a plain document mask; FlexAttention handles those.
    """
    if mask.kind not in WINDOWS:
        raise UserError(
            f"[model] attention = 'varlen' supports {', '.join(WINDOWS)}, got mask {mask.kind!r}; use 'flex'"
        )
    positions_BL = mask.positions_BL.clone()
    # A row may begin inside a document; for the kernel it begins one.
    positions_BL[:, 0] = 0
    return VarlenMask(create_varlen_metadata_for_document(positions_BL), WINDOWS[mask.kind])


class PackedAttention(VarlenAttention):
    """torchtitan's varlen attention whose window comes with the mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        layer_id: int = 0
        """Index of the layer (unused by this kernel; the same field as the dense one)."""

    def forward(  # pyrefly: ignore[bad-override] - the window travels with the mask
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMask,
        **kwargs,
    ) -> torch.Tensor:
        """Attention output [B, L, N, H] within the documents of the mask."""
        if not isinstance(attention_masks, VarlenMask):
            raise TypeError(f"varlen attention needs a VarlenMask, got {type(attention_masks).__name__}")
        self.window_size = attention_masks.window
        return super().forward(q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks.metadata, **kwargs)
