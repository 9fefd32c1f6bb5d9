"""Every attention mask, once.

A :class:`Mask` holds the rule as a ``mask_mod`` (the signature FlexAttention
takes), so that the dense reference, FlexAttention's block mask and the varlen
kernels are all built from the same definition (``torchtitan_ext.attention``).
Documents are delimited by positions that restart at 0, never by token ids: an
EOS may stand inside a document.

Shape suffixes: B = batch, L = sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Mask:
    """One attention pattern for one batch.

    ``mod(b, h, q_idx, kv_idx)`` is True where query ``q_idx`` of row ``b`` may
    attend to key ``kv_idx``. ``kind`` names the pattern, so that kernels which
    implement it directly (varlen) need not evaluate ``mod``.
    """

    kind: str
    mod: MaskMod
    positions_BL: torch.Tensor
    q_len: int
    kv_len: int

    @property
    def batch(self) -> int:
        return self.positions_BL.shape[0]


def document_ids(positions_BL: torch.Tensor) -> torch.Tensor:
    """Number of the document each token belongs to, [B, L]; a row may start inside one."""
    return torch.cumsum((positions_BL == 0).int(), dim=1)


def causal_document(positions_BL: torch.Tensor) -> Mask:
    """Each token sees itself and the earlier tokens of its own document."""
    ids_BL = document_ids(positions_BL)

    def mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (ids_BL[b, q_idx] == ids_BL[b, kv_idx])

    length = positions_BL.shape[1]
    return Mask("causal_document", mod, positions_BL, length, length)


def bidirectional_document(positions_BL: torch.Tensor) -> Mask:
    """Each token sees every token of its own document."""
    ids_BL = document_ids(positions_BL)

    def mod(b, h, q_idx, kv_idx):
        return ids_BL[b, q_idx] == ids_BL[b, kv_idx]

    length = positions_BL.shape[1]
    return Mask("bidirectional_document", mod, positions_BL, length, length)


MaskLayout = Literal["block", "last_block"]
CleanLayout = Literal["causal", "block"]


def doubled_blocks(
    positions_BL: torch.Tensor,
    *,
    block_size: int,
    layout: MaskLayout = "block",
    clean: CleanLayout = "causal",
) -> Mask:
    """A clean sequence followed by its masked copy, in blocks counted from each document's start.

    ``positions_BL``: [B, 2S], the same S positions twice. Block b of a document holds its
    positions b * block_size to (b + 1) * block_size - 1.

    - clean -> clean: causal within the document; ``clean="block"``: own and earlier blocks;
    - clean -> mask: never;
    - mask -> clean: strictly earlier blocks of the document;
    - mask -> mask: own block, in both directions; ``layout="last_block"``: in both directions
      in the last block of the document alone, causal in the others.

    Source: TiDAR section 3.1 and figures 2 and 3; ``clean="block"``: Block Diffusion
    (Arriola et al., 2025).
    """
    half = positions_BL.shape[1] // 2
    assert positions_BL.shape[1] == 2 * half, "a doubled sequence has an even length"
    ids_BS = document_ids(positions_BL[:, :half])
    blocks_BS = positions_BL[:, :half] // block_size
    last_BS = blocks_BS == _last_of_document(blocks_BS, ids_BS)

    def mod(b, h, q_idx, kv_idx):
        q_masked, k_masked = q_idx >= half, kv_idx >= half
        q, k = q_idx - q_masked * half, kv_idx - k_masked * half
        same = ids_BS[b, q] == ids_BS[b, k]
        q_block, k_block = blocks_BS[b, q], blocks_BS[b, k]
        to_clean = (q >= k) if clean == "causal" else (q_block >= k_block)
        inside = q_block == k_block
        if layout == "last_block":
            inside = inside & ((q >= k) | last_BS[b, q])
        from_mask = torch.where(k_masked, inside, q_block > k_block)
        return same & torch.where(q_masked, from_mask, to_clean & ~k_masked)

    return Mask("doubled_blocks", mod, positions_BL, 2 * half, 2 * half)


def dual_stream(positions_BL: torch.Tensor, *, block_size: int) -> Mask:
    """A clean sequence followed by a copy that is causal within its blocks, whatever their token order.

    ``positions_BL``: [B, 2S]; the first half are the positions of the documents, from which the
    blocks are counted as in :func:`doubled_blocks`. The second half may hold each block's
    positions in another order: only its slots count here.

    - clean -> clean: causal within the document;
    - clean -> copy: never;
    - copy -> copy: own block, slots up to its own;
    - copy -> clean: strictly earlier blocks of the document.

    Source: WeDLM (Liu et al., 2025), dual-stream masking.
    """
    half = positions_BL.shape[1] // 2
    assert positions_BL.shape[1] == 2 * half, "a dual stream has an even length"
    ids_BS = document_ids(positions_BL[:, :half])
    blocks_BS = positions_BL[:, :half] // block_size

    def mod(b, h, q_idx, kv_idx):
        q_copy, k_copy = q_idx >= half, kv_idx >= half
        q, k = q_idx - q_copy * half, kv_idx - k_copy * half
        same = ids_BS[b, q] == ids_BS[b, k]
        q_block, k_block = blocks_BS[b, q], blocks_BS[b, k]
        from_copy = torch.where(k_copy, (q_block == k_block) & (q >= k), q_block > k_block)
        return same & torch.where(q_copy, from_copy, (q >= k) & ~k_copy)

    return Mask("dual_stream", mod, positions_BL, 2 * half, 2 * half)


def _last_of_document(values_BS: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
    """Largest value in each token's document, [B, S]."""
    # Ids run from 0 (a row that starts inside a document) to S (documents of one token).
    best = values_BS.new_zeros(values_BS.shape[0], values_BS.shape[1] + 1)
    return best.scatter_reduce(1, ids_BS, values_BS, "amax").gather(1, ids_BS)


DOCUMENT_MASKS: dict[str, Callable[[torch.Tensor], Mask]] = {
    "causal": causal_document,
    "bidirectional": bidirectional_document,
}
