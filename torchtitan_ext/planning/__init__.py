"""What a config costs before it runs."""

from torchtitan_ext.planning.mask_blocks import (
    BlockCounts,
    BlockGrid,
    allowed_fraction,
    block_counts,
    block_grid,
    causal_counts,
    relative_to_causal,
)

__all__ = [
    "BlockCounts",
    "BlockGrid",
    "allowed_fraction",
    "block_counts",
    "block_grid",
    "causal_counts",
    "relative_to_causal",
]
