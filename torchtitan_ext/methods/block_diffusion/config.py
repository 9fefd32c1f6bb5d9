"""The TOML section [block_diffusion]."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_ext.data.mask_token import resolve_mask_id

MASK_KEY = "[block_diffusion] mask_token_id"


@dataclass(kw_only=True, slots=True)
class Section:
    """Masked diffusion inside a block, autoregression from block to block."""

    block_size: int = 8
    """Tokens of a block, in training and in decoding."""

    clean_attention: Literal["block", "causal"] = "block"
    """How finished tokens attend: in both directions inside their block, or causally as in TiDAR."""

    loss_weighting: Literal["elbo", "mean"] = "elbo"
    """Weight of a masked token of a block with noise t: 1/t, averaged over all supervised tokens (the
    bound on the likelihood), or the mean over the masked tokens."""

    alpha: float = 0.0
    """Weight of a next-token loss on the clean half, as TiDAR's; needs clean_attention = "causal"."""

    policy: Literal["confidence", "left_to_right", "threshold"] = "threshold"
    """What decoding reveals in a forward, where the caller does not say."""

    tokens_per_forward: int = 1
    """How many tokens "confidence" and "left_to_right" reveal."""

    threshold: float = 0.9
    """Confidence over which "threshold" reveals a token."""

    mask_token_id: int | None = None
    """Id of the mask token. None: the tokenizer's, or else the first id that it does not use."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_diffusion.block_size must be at least 1, got {self.block_size}")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ValueError(f"block_diffusion.alpha must be a finite number of at least 0, got {self.alpha}")
        if self.alpha > 0 and self.clean_attention == "block":
            raise ValueError(
                f"block_diffusion.alpha = {self.alpha} needs block_diffusion.clean_attention = 'causal': "
                "inside a block that attends in both directions each token sees the one it would predict"
            )
        if not 1 <= self.tokens_per_forward <= self.block_size:
            raise ValueError(
                f"block_diffusion.tokens_per_forward must be between 1 and block_size = {self.block_size}, "
                f"got {self.tokens_per_forward}"
            )
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"block_diffusion.threshold must be between 0 and 1, got {self.threshold}")


def complete(config: Any) -> None:
    """Settle the mask id, so that the saved config names it."""
    section = config.block_diffusion
    section.mask_token_id = resolve_mask_id(config, given=section.mask_token_id, where=MASK_KEY)
