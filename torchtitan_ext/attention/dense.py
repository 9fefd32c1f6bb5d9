"""Dense attention: SDPA with the boolean mask evaluated from a mask_mod.

The reference for every other kernel, and the one that trains on a CPU, where
FlexAttention has no backward.

Shape suffixes: B = batch, L = query length, T = key length, Q = query length of
a mask, K = key length of a mask, N = heads, H = head dimension.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torchtitan.protocols.module import Module

from torchtitan_ext.masks import Mask


class LayerCache(Protocol):
    """What an inner attention needs from a KV cache (``decoding.kv_cache``)."""

    def update(
        self, layer_id: int, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values; return all of the layer's, [B, N, T, H]."""
        ...


@dataclass
class CachedAttention:
    """What travels as ``attention_masks`` while decoding.

    ``mask_BQK``: True where a query may attend to a key; None lets every query
    attend to every key returned by the cache.
    """

    cache: LayerCache
    mask_BQK: torch.Tensor | None


def evaluate_mask(mask: Mask) -> torch.Tensor:
    """The mask as booleans, [B, 1, Q, K]; True = may attend."""
    device = mask.positions_BL.device
    b = torch.arange(mask.batch, device=device)[:, None, None]
    q = torch.arange(mask.q_len, device=device)[None, :, None]
    k = torch.arange(mask.kv_len, device=device)[None, None, :]
    zero = torch.zeros((), dtype=torch.long, device=device)
    allowed_BQK = mask.mod(b, zero, q, k)
    return allowed_BQK.expand(mask.batch, mask.q_len, mask.kv_len)[:, None]


def attend_dense(
    q_BNLH: torch.Tensor,
    k_BNTH: torch.Tensor,
    v_BNTH: torch.Tensor,
    *,
    mask_B1LT: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Masked attention, [B, N, L, H]; keys and values may have fewer heads (GQA)."""
    return F.scaled_dot_product_attention(
        q_BNLH,
        k_BNTH,
        v_BNTH,
        attn_mask=mask_B1LT,
        scale=scale,
        enable_gqa=q_BNLH.shape[1] != k_BNTH.shape[1],
    )


class DenseAttention(Module):
    """Inner attention over a boolean mask, or over a KV cache while decoding.

    The forward's argument names are a contract: torchtitan's sharding rules
    look up ``q_BLNH``, ``k_BLNH`` and ``v_BLNH``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer_id: int = 0
        """Index of the layer, under which a KV cache stores its keys and values."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layer_id = config.layer_id

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
        """Attention output [B, L, N, H]; keys and values come from the cache where there is one."""
        if isinstance(attention_masks, CachedAttention):
            k_BNTH, v_BNTH = attention_masks.cache.update(self.layer_id, k_BLNH, v_BLNH)
            mask = attention_masks.mask_BQK
            mask_B1LT = None if mask is None else mask[:, None]
        elif isinstance(attention_masks, torch.Tensor):
            k_BNTH, v_BNTH = k_BLNH.transpose(1, 2), v_BLNH.transpose(1, 2)
            mask_B1LT = attention_masks
        else:
            raise TypeError(
                "dense attention needs a boolean mask [B, 1, L, L] or a CachedAttention, "
                f"got {type(attention_masks).__name__}"
            )
        out_BNLH = attend_dense(q_BLNH.transpose(1, 2), k_BNTH, v_BNTH, mask_B1LT=mask_B1LT, scale=scale)
        return out_BNLH.transpose(1, 2)
