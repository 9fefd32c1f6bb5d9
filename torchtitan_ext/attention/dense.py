"""Dense attention: SDPA with the boolean mask evaluated from a mask_mod.

The reference for every other kernel, and the one that trains on a CPU, where
FlexAttention has no backward.

Shape suffixes: B = batch, L = query length, T = key length, Q = query length of
a mask, K = key length of a mask, N = heads, H = head dimension.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torchtitan.protocols.module import Module

from torchtitan_ext.masks import Mask

TILE = 128
"""Queries of a tile: few enough to skip much, many enough to be worth a call."""

GRAIN = 16
"""Keys that are kept or left out together: the width of a vector."""

WORTH_IT = 0.85
"""Share of all pairs of queries and keys above which skipping the rest costs more than it saves."""

HALVE_BELOW = 0.79
"""Share of the pairs below which twice as many tiles of half the queries are worth their calls."""


class Tile(NamedTuple):
    """Some neighbouring queries and all the keys that any of them may see."""

    queries: slice
    keys: tuple[slice, ...]
    allowed_B1QK: torch.Tensor


class TiledMask(NamedTuple):
    """A boolean mask without its empty parts, so that attention there is not computed."""

    tiles: tuple[Tile, ...]

    whole_B1QK: torch.Tensor
    """The mask with them, for a compiled forward: one compiled for some tiles would serve no other batch."""


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


def build_dense_mask(mask: Mask) -> torch.Tensor | TiledMask:
    """The mask as booleans [B, 1, Q, K], in tiles where that skips enough."""
    allowed_B1QK = evaluate_mask(mask)
    return tiled(allowed_B1QK) or allowed_B1QK


def tiled(allowed_B1QK: torch.Tensor, *, tile: int = TILE, grain: int = GRAIN) -> TiledMask | None:
    """The mask without what is empty in every row; None if too little is.

    ``tile``: queries that share their keys, an even number; halved where that leaves much less to
    compute. ``grain``: keys that are kept or left out together.
    """
    q_len, k_len = allowed_B1QK.shape[-2:]
    if min(q_len, k_len) < 2 * tile:
        return None
    # One wait for the device a batch, as for any structure that depends on the documents.
    halved = _used(allowed_B1QK.amax(dim=(0, 1)), queries=tile // 2, keys=grain).tolist()
    rows = [[any(keys) for keys in zip(*halved[i : i + 2], strict=True)] for i in range(0, len(halved), 2)]
    if _share(rows) > WORTH_IT:
        return None
    if _share(halved) < HALVE_BELOW * _share(rows):
        tile, rows = tile // 2, halved
    tiles = []
    for i, row in enumerate(rows):
        queries = slice(i * tile, min((i + 1) * tile, q_len))
        runs = _runs(row, grain=grain, length=k_len)
        allowed = torch.cat([allowed_B1QK[:, :, queries, run] for run in runs], dim=-1)
        tiles.append(Tile(queries, runs, allowed))
    return TiledMask(tuple(tiles), allowed_B1QK)


def _used(allowed_QK: torch.Tensor, *, queries: int, keys: int) -> torch.Tensor:
    """Whether anything is allowed between so many queries and so many keys each, bool."""
    q_len, k_len = allowed_QK.shape
    padded_QK = F.pad(allowed_QK, (0, -k_len % keys, 0, -q_len % queries))
    return padded_QK.unflatten(1, (-1, keys)).unflatten(0, (-1, queries)).amax(dim=(1, 3))


def _share(rows: list[list[bool]]) -> float:
    return sum(map(sum, rows)) / (len(rows) * len(rows[0]))


def _runs(used: list[bool], *, grain: int, length: int) -> tuple[slice, ...]:
    """Neighbouring used keys as slices of tokens."""
    runs: list[list[int]] = []
    for j in (j for j, is_used in enumerate(used) if is_used):
        if runs and runs[-1][1] == j:
            runs[-1][1] = j + 1
        else:
            runs.append([j, j + 1])
    return tuple(slice(a * grain, min(b * grain, length)) for a, b in runs)


def attend_dense(
    q_BNLH: torch.Tensor,
    k_BNTH: torch.Tensor,
    v_BNTH: torch.Tensor,
    *,
    mask_B1LT: torch.Tensor | TiledMask | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Masked attention, [B, N, L, H]; keys and values may have fewer heads (GQA)."""
    if isinstance(mask_B1LT, TiledMask) and torch.compiler.is_compiling():
        mask_B1LT = mask_B1LT.whole_B1QK
    if isinstance(mask_B1LT, TiledMask):
        return _attend_tiles(q_BNLH, k_BNTH, v_BNTH, tiles=mask_B1LT.tiles, scale=scale)
    return F.scaled_dot_product_attention(
        q_BNLH,
        k_BNTH,
        v_BNTH,
        attn_mask=mask_B1LT,
        scale=scale,
        enable_gqa=q_BNLH.shape[1] != k_BNTH.shape[1],
    )


def _attend_tiles(
    q_BNLH: torch.Tensor,
    k_BNTH: torch.Tensor,
    v_BNTH: torch.Tensor,
    *,
    tiles: tuple[Tile, ...],
    scale: float | None,
) -> torch.Tensor:
    """Masked attention tile by tile, [B, N, L, H]."""
    queries = _Pieces.apply(q_BNLH, [(tile.queries,) for tile in tiles])
    keys, values = (_Pieces.apply(x_BNTH, [tile.keys for tile in tiles]) for x_BNTH in (k_BNTH, v_BNTH))
    outputs = [
        attend_dense(q, k, v, mask_B1LT=tile.allowed_B1QK, scale=scale).transpose(1, 2)
        for q, k, v, tile in zip(queries, keys, values, tiles, strict=True)
    ]
    # Kept in memory as [B, L, N, H], as each output is and as the caller wants the whole.
    return torch.cat(outputs, dim=1).transpose(1, 2)


@spmd.register_local_autograd_function
class _Pieces(torch.autograd.Function):
    """Pieces of a sequence, each made of some runs of neighbouring tokens.

    Slices give the same, but the gradient of each would be a tensor of the whole length, to be filled and
    added to the others; here all are added into one.
    """

    @staticmethod
    def forward(ctx: Any, x_BNTH: torch.Tensor, pieces: list[tuple[slice, ...]]) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x_BNTH)
        ctx.pieces = pieces
        return tuple(_take(x_BNTH, runs) for runs in pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        (x_BNTH,) = ctx.saved_tensors
        total_BNTH = torch.zeros_like(x_BNTH)
        # From the last to the first, the order in which autograd adds up the gradients of slices.
        for runs, grad in zip(reversed(ctx.pieces), reversed(grads), strict=True):
            parts = grad.split([run.stop - run.start for run in runs], dim=2)
            for run, part in zip(runs, parts, strict=True):
                total_BNTH[:, :, run] += part
        return total_BNTH, None


def _take(x_BNTH: torch.Tensor, runs: tuple[slice, ...]) -> torch.Tensor:
    parts = [x_BNTH[:, :, run] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


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
        elif isinstance(attention_masks, (torch.Tensor, TiledMask)):
            k_BNTH, v_BNTH = k_BLNH.transpose(1, 2), v_BLNH.transpose(1, 2)
            mask_B1LT = attention_masks
        else:
            raise TypeError(
                "dense attention needs a boolean mask [B, 1, L, L], a TiledMask or a CachedAttention, "
                f"got {type(attention_masks).__name__}"
            )
        out_BNLH = attend_dense(q_BLNH.transpose(1, 2), k_BNTH, v_BNTH, mask_B1LT=mask_B1LT, scale=scale)
        return out_BNLH.transpose(1, 2)
