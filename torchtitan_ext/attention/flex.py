"""FlexAttention on any length.

FlexAttention wants lengths in multiples of its block and has had wrong
gradients for odd ones, so queries, keys and values are padded here and the
block mask, built on the padded lengths, never lets a real query see padding.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torchtitan.models.common.attention import FlexAttention
from torchtitan.tools.utils import round_up

from torchtitan_ext.masks import Mask

BLOCK = 128
"""Block of the sparse mask, in tokens; lengths are padded to a multiple of it."""


def build_block_mask(mask: Mask) -> BlockMask:
    """The mask as a BlockMask over lengths padded to a multiple of :data:`BLOCK`.

    Padded queries attend to key 0 alone, so that no softmax runs over nothing.
    """
    q_len, kv_len = mask.q_len, mask.kv_len
    q_last, kv_last = q_len - 1, kv_len - 1

    def padded(b, h, q_idx, kv_idx):
        inside = (q_idx < q_len) & (kv_idx < kv_len)
        # Clamped, since the mod indexes per-token tensors of the real length.
        allowed = mask.mod(b, h, q_idx.clamp(max=q_last), kv_idx.clamp(max=kv_last))
        return (inside & allowed) | ((q_idx >= q_len) & (kv_idx == 0))

    return create_block_mask(
        padded,
        mask.batch,
        None,
        round_up(q_len, BLOCK),
        round_up(kv_len, BLOCK),
        device=mask.positions_BL.device,
        BLOCK_SIZE=BLOCK,
    )


def _pad_length(x_BLNH: torch.Tensor, length: int) -> torch.Tensor:
    missing = length - x_BLNH.shape[1]
    return F.pad(x_BLNH, (0, 0, 0, 0, 0, missing)) if missing else x_BLNH


class PaddedFlexAttention(FlexAttention):
    """torchtitan's FlexAttention behind padding to the block mask's lengths."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        layer_id: int = 0
        """Index of the layer (unused by this kernel; the same field as the dense one)."""

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, **kwargs):
        if not isinstance(attention_masks, BlockMask):
            raise TypeError(f"flex attention needs a BlockMask, got {type(attention_masks).__name__}")
        length = q_BLNH.shape[1]
        q_pad, kv_pad = attention_masks.seq_lengths
        out_BLNH = super().forward(
            _pad_length(q_BLNH, q_pad),
            _pad_length(k_BLNH, kv_pad),
            _pad_length(v_BLNH, kv_pad),
            attention_masks=attention_masks,
            **kwargs,
        )
        return out_BLNH[:, :length]
