"""TiDAR's loss on a doubled sequence.

Shape suffixes: B = batch, S = data length.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_ext import doubled
from torchtitan_ext.data.mask_token import check_mask_id
from torchtitan_ext.methods.tidar.config import MASK_KEY
from torchtitan_ext.objective import Generators


def factors(alpha: float) -> tuple[float, float]:
    """Factors of the next-token and the diffusion term: (alpha AR + diffusion) / (1 + alpha).

    Source: TiDAR section 3.1, the displayed loss.
    """
    return alpha / (1 + alpha), 1 / (1 + alpha)


class TiDARObjective(doubled.DoubledObjective):
    """Next tokens on the clean half, own tokens on the masked half; each a mean over its tokens."""

    name = "tidar"

    def __init__(self, *, mask_id: int, block_size: int, alpha: float, corruption: str, multiple: int = 1):
        super().__init__(mask_id=mask_id, block_size=block_size, factors=factors(alpha), multiple=multiple)
        self.corruption = corruption

    def corrupt(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, *, generator: Generators
    ) -> doubled.Corrupted:
        """Everything hidden (section 3.1), or a random part of each block (the ablation of table 5)."""
        if self.corruption == "full":
            return doubled.hide_all(tokens_BS, mask_id=self.mask_id)
        return doubled.hide_randomly(
            tokens_BS, positions_BS, mask_id=self.mask_id, block_size=self.block_size, generator=generator
        )


def build_objective(config: Any) -> TiDARObjective:
    """The objective for a resolved config.

    Errors: UserError for a mask id that stands for an ordinary token.
    """
    section = config.tidar
    check_mask_id(config, mask_id=section.mask_token_id, where=MASK_KEY)
    return TiDARObjective(
        mask_id=section.mask_token_id,
        block_size=section.block_size,
        alpha=section.alpha,
        corruption=section.corruption,
        multiple=config.loss.num_chunks,
    )
