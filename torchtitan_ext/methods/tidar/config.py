"""The TOML section [tidar]."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_ext.data.mask_token import resolve_mask_id

MASK_KEY = "[tidar] mask_token_id"


@dataclass(kw_only=True, slots=True)
class Section:
    """Doubled-sequence training with a causal half and a masked half."""

    block_size: int = 8
    """Tokens of a block; the draft length in decoding may differ."""

    alpha: float = 1.0
    """Weight of the next-token loss: (alpha AR + diffusion) / (1 + alpha)."""

    mask_layout: Literal["block", "last_block"] = "block"
    """Blocks of the masked half that attend in both directions: all (the paper's figures), or the last
    of each document alone, the others being causal (the text of its section 3.1)."""

    corruption: Literal["full", "random"] = "full"
    """Mask every token of the second half, or each block's tokens with a random probability (table 5)."""

    mask_token_id: int | None = None
    """Id of the mask token. None: the tokenizer's, or else the first id that it does not use."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"tidar.block_size must be at least 1, got {self.block_size}")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"tidar.alpha must be a finite number of at least 0, got {self.alpha}")


def complete(config: Any) -> None:
    """Settle the mask id, so that the saved config names it."""
    config.tidar.mask_token_id = resolve_mask_id(config, given=config.tidar.mask_token_id, where=MASK_KEY)
