"""How much of a mask a block-sparse kernel computes.

FlexAttention cuts queries x keys into blocks: an empty one is skipped, a full one
is computed without the mask, a partial one is computed whole and then masked. The
work is therefore the blocks that are not empty, not the pairs that are allowed.

The mask is evaluated in strips of one block of queries, so that a long sequence
never needs the whole matrix.

Shape suffixes: R = queries of a strip, K = keys, I = query blocks, J = key blocks,
P = parts of the sequence (2 for a doubled one).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torchtitan.tools.utils import round_up

from torchtitan_ext.attention.flex import BLOCK
from torchtitan_ext.errors import UserError
from torchtitan_ext.masks import Mask

EMPTY, PARTIAL, FULL = range(3)
"""Kinds of block in :attr:`BlockGrid.kind_IJ`."""


class BlockCounts(NamedTuple):
    """Blocks by kind, in one row of a batch."""

    total: int
    full: int
    partial: int
    empty: int
    block: int = BLOCK
    """Side of a block in tokens."""

    @property
    def computed(self) -> int:
        """Blocks that a kernel computes."""
        return self.full + self.partial

    @property
    def fraction_computed(self) -> float:
        """Share of the blocks that a kernel computes."""
        return self.computed / self.total

    @property
    def pairs_computed(self) -> int:
        """Query-key pairs inside the computed blocks, forbidden ones and padding included."""
        return self.computed * self.block**2


@dataclass(frozen=True, kw_only=True)
class BlockGrid:
    """One row's mask, block by block."""

    block: int
    """Side of a block in tokens."""

    q_len: int
    """Queries, without padding."""

    kv_len: int
    """Keys, without padding."""

    pairs_IJ: torch.Tensor
    """Allowed pairs inside each block; padding has none."""

    pairs_PP: torch.Tensor
    """Allowed pairs from each part of the queries (rows) to each part of the keys (columns)."""

    @property
    def kind_IJ(self) -> torch.Tensor:
        """EMPTY, PARTIAL or FULL for each block of the padded lengths, as the kernel sees it."""
        kind_IJ = (self.pairs_IJ > 0).to(torch.int8) + (self.pairs_IJ == self.block**2).to(torch.int8)
        if self.q_len % self.block:
            # Padded queries attend to key 0, so its block is computed whatever the mask says.
            kind_IJ[-1, 0] = PARTIAL
        return kind_IJ

    @property
    def pairs_allowed(self) -> int:
        """Query-key pairs that the mask allows; padding never counts."""
        return int(self.pairs_PP.sum())

    @property
    def allowed_fraction(self) -> float:
        """Share of the query-key pairs that the mask allows."""
        return self.pairs_allowed / (self.q_len * self.kv_len)

    @property
    def counts(self) -> BlockCounts:
        """Blocks of the whole mask by kind."""
        return _counts(self.kind_IJ, block=self.block)

    def part_counts(self, query: int, key: int) -> BlockCounts | None:
        """Blocks from one part of the queries to one part of the keys; None where blocks straddle parts."""
        parts = self.pairs_PP.shape[0]
        if self.q_len % (parts * self.block) or self.kv_len % (parts * self.block):
            return None
        rows = self.kind_IJ.chunk(parts, dim=0)[query]
        return _counts(rows.chunk(parts, dim=1)[key], block=self.block)


def block_grid(mask: Mask, *, block: int = BLOCK, row: int = 0, parts: int = 1) -> BlockGrid:
    """Evaluate one row of a mask, block by block.

    Lengths are padded to multiples of ``block`` as ``attention.flex.build_block_mask``
    pads them: a padded query attends to key 0 alone. ``parts``: equal parts of the
    sequence that ``pairs_PP`` tells apart.

    Errors: UserError when ``block`` is below 1 or the batch has no such row.
    """
    if block < 1:
        raise UserError(f"a block has at least 1 token, got {block}")
    if not 0 <= row < mask.batch:
        raise UserError(f"row {row} of the mask: the batch has {mask.batch}")
    assert mask.q_len % parts == 0 and mask.kv_len % parts == 0, (mask.q_len, mask.kv_len, parts)
    kv_pad = round_up(mask.kv_len, block)
    pairs_IJ = torch.zeros(-(-mask.q_len // block), kv_pad // block, dtype=torch.long)
    pairs_PP = torch.zeros(parts, parts, dtype=torch.long)
    for start, allowed_RK in strips(mask, row=row, rows=block):
        per_query_RP = allowed_RK.unflatten(1, (parts, -1)).sum(-1).cpu()
        query_part_R = torch.arange(start, start + len(allowed_RK)) // (mask.q_len // parts)
        pairs_PP.index_add_(0, query_part_R, per_query_RP)
        padded_RK = F.pad(allowed_RK, (0, kv_pad - mask.kv_len))
        pairs_IJ[start // block] = padded_RK.unflatten(1, (-1, block)).sum((0, 2))
    return BlockGrid(
        block=block,
        q_len=mask.q_len,
        kv_len=mask.kv_len,
        pairs_IJ=pairs_IJ,
        pairs_PP=pairs_PP,
    )


def strips(mask: Mask, *, row: int = 0, rows: int = BLOCK) -> Iterator[tuple[int, torch.Tensor]]:
    """First query and booleans [R, K] of each strip of at most ``rows`` queries; True = may attend."""
    device = mask.positions_BL.device
    b, h = torch.tensor(row, device=device), torch.tensor(0, device=device)
    k_1K = torch.arange(mask.kv_len, device=device)[None]
    for start in range(0, mask.q_len, rows):
        q_R1 = torch.arange(start, min(start + rows, mask.q_len), device=device)[:, None]
        yield start, mask.mod(b, h, q_R1, k_1K).expand(len(q_R1), mask.kv_len)


def block_counts(mask: Mask, *, block: int = BLOCK, row: int = 0) -> BlockCounts:
    """Blocks of one row by kind, as FlexAttention counts them."""
    return block_grid(mask, block=block, row=row).counts


def allowed_fraction(mask: Mask, *, row: int = 0) -> float:
    """Share of one row's query-key pairs that the mask allows."""
    return block_grid(mask, row=row).allowed_fraction


def causal_counts(length: int, *, block: int = BLOCK) -> BlockCounts:
    """Blocks of a plain causal mask over one document, without evaluating it."""
    side = -(-length // block)
    computed = side * (side + 1) // 2
    # The diagonal is partial (a block of one token is full); padding makes the last row partial too.
    partial = 0 if block == 1 else side if length % block == 0 else 2 * side - 1
    return BlockCounts(
        total=side**2, full=computed - partial, partial=partial, empty=side**2 - computed, block=block
    )


def relative_to_causal(counts: BlockCounts, *, length: int) -> float:
    """Pairs computed, as a multiple of what a plain causal mask of ``length`` tokens computes."""
    return counts.pairs_computed / causal_counts(length, block=counts.block).pairs_computed


def _counts(kind_IJ: torch.Tensor, *, block: int) -> BlockCounts:
    empty, partial, full = (int((kind_IJ == kind).sum()) for kind in (EMPTY, PARTIAL, FULL))
    return BlockCounts(total=kind_IJ.numel(), full=full, partial=partial, empty=empty, block=block)
