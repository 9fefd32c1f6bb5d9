"""Block diffusion's loss on a doubled sequence.

Shape suffixes: B = batch, S = data length.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_ext import doubled
from torchtitan_ext.data.mask_token import check_mask_id
from torchtitan_ext.methods.block_diffusion.config import MASK_KEY
from torchtitan_ext.objective import IGNORE_INDEX, Generators


class BlockDiffusionObjective(doubled.DoubledObjective):
    """Own tokens on the masked half, given earlier blocks and what is left of this one."""

    name = "block_diffusion"

    def __init__(self, *, mask_id: int, block_size: int, alpha: float, weighting: str, multiple: int = 1):
        factors = (alpha / (1 + alpha), 1 / (1 + alpha))
        super().__init__(mask_id=mask_id, block_size=block_size, factors=factors, multiple=multiple)
        self.weighting = weighting

    def corrupt(
        self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, *, generator: Generators
    ) -> doubled.Corrupted:
        """A random part of each block hidden."""
        return doubled.hide_randomly(
            tokens_BS, positions_BS, mask_id=self.mask_id, block_size=self.block_size, generator=generator
        )

    def weights(self, corrupted: doubled.Corrupted) -> torch.Tensor:
        """1/t of the bound on the likelihood (Arriola et al., 2025, linear schedule), or 1; [B, S]."""
        if self.weighting == "elbo":
            return 1 / corrupted.noise_BS
        return super().weights(corrupted)

    def diffusion_count(self, own_BS: torch.Tensor, corrupted: doubled.Corrupted) -> float:
        """The bound is an average over all supervised tokens, hidden or not."""
        if self.weighting == "elbo":
            return float((own_BS != IGNORE_INDEX).sum())
        return super().diffusion_count(own_BS, corrupted)


def build_objective(config: Any) -> BlockDiffusionObjective:
    """The objective for a resolved config.

    Errors: UserError for a mask id that stands for an ordinary token.
    """
    section = config.block_diffusion
    check_mask_id(config, mask_id=section.mask_token_id, where=MASK_KEY)
    return BlockDiffusionObjective(
        mask_id=section.mask_token_id,
        block_size=section.block_size,
        alpha=section.alpha,
        weighting=section.loss_weighting,
        multiple=config.loss.num_chunks,
    )
