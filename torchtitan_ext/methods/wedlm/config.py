"""The TOML section [wedlm]."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_ext.data.mask_token import resolve_mask_id

MASK_KEY = "[wedlm] mask_token_id"

Weighting = Literal["global", "local"]


@dataclass(kw_only=True, slots=True)
class Section:
    """Dual-stream training: a clean sequence, and a copy whose masked tokens stand last in each block."""

    block_size: int = 32
    """Tokens of a block, counted from each document's start."""

    w_ar: float = 1.0
    """Weight of the next-token loss: (diffusion + w_ar AR) / (1 + w_ar)."""

    loss_weighting: Weighting = "global"
    """The weights 1/g of the masked tokens sum to 1 over the step's batch on all ranks, or, as in the
    public code, over each rank's own microbatch (microbatches then count alike)."""

    mask_token_id: int | None = None
    """Id of the mask token. None: the tokenizer's, or else the first id that it does not use."""

    window: int = 16
    """Decoding: masks that are filled at the same time; training shows at most block_size of them."""

    tau: float = 0.4
    """Decoding: a mask is filled when its adjusted entropy, in nats, is below this."""

    position_penalty: float = 0.02
    """Decoding: added to a slot's entropy for each position behind the first mask."""

    def __post_init__(self) -> None:
        check_training("wedlm", block_size=self.block_size, w_ar=self.w_ar, weighting=self.loss_weighting)
        check_decoding("wedlm", window=self.window, tau=self.tau, penalty=self.position_penalty)


def check_training(section: str, *, block_size: int, w_ar: float, weighting: str) -> None:
    """Errors: ValueError for a knob out of its range."""
    if block_size < 1:
        raise ValueError(f"{section}.block_size must be at least 1, got {block_size}")
    if not (math.isfinite(w_ar) and w_ar >= 0):
        raise ValueError(f"{section}.w_ar must be a finite number of at least 0, got {w_ar}")
    if weighting not in ("global", "local"):
        raise ValueError(f"{section}.loss_weighting must be 'global' or 'local', got {weighting!r}")


def check_decoding(section: str, *, window: int, tau: float, penalty: float) -> None:
    """Errors: ValueError for a knob out of its range."""
    if window < 1:
        raise ValueError(f"{section}.window must be at least 1, got {window}")
    if not (math.isfinite(tau) and tau >= 0):
        raise ValueError(f"{section}.tau must be a finite number of at least 0, got {tau}")
    if not (math.isfinite(penalty) and penalty >= 0):
        raise ValueError(f"{section}.position_penalty must be a finite number of at least 0, got {penalty}")


def complete(config: Any) -> None:
    """Settle the mask id, so that the saved config names it."""
    config.wedlm.mask_token_id = resolve_mask_id(config, given=config.wedlm.mask_token_id, where=MASK_KEY)
