"""The TOML section [alodlm]."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_ext.data.mask_token import resolve_mask_id
from torchtitan_ext.methods.wedlm.config import Weighting, check_decoding, check_training

MASK_KEY = "[alodlm] mask_token_id"

Feedback = Literal["cumulative", "one_shot"]


@dataclass(kw_only=True, slots=True)
class Section:
    """An adaptively looped diffusion language model."""

    start: int = 0
    """First layer of the core, zero-based as in the paper."""

    end: int = 0
    """Layer after the last of the core; must be given."""

    passes: int = 4
    """Most passes through the core, K; 1 is WeDLM."""

    block_size: int = 32
    """Tokens of a block, counted from each document's start."""

    feedback: Feedback = "cumulative"
    """A committed token's embedding replaces its state in every later pass (the paper, Eq. 3), or in the
    next one alone (inference of the public code)."""

    carry_norm: bool = False
    """What goes from pass to pass is the model's last norm of the core's output (the public code) and not
    the output itself."""

    a: float = 0.1
    """Weight of the divergence of each token's depths from the batch's average (paper, alpha)."""

    b: float = 1.0
    """Weight of the divergence of the average from the prior (paper, beta); a = b = 1 is the exact KL."""

    prior_decay: float = 0.4
    """Prior over depths, proportional to exp(-prior_decay s)."""

    intermediate_supervision: bool = True
    """The denoiser also learns from the passes before a token's exit; false: from the exit alone."""

    control_variate: bool = True
    """Subtract the first pass's loss from the gate's cost; false: higher variance, the same mean."""

    w_ar: float = 1.0
    """Weight of the next-token loss: (denoise + actor + w_ar AR) / (1 + w_ar)."""

    loss_weighting: Weighting = "global"
    """The weights 1/g sum to 1, and depths are averaged, over all ranks, or, as in the public code, over
    each rank's own microbatch (microbatches then count alike)."""

    checkpoint_core: int = 0
    """Recompute every n-th pass of the core in the backward; 0: none, 1: every one."""

    core_sharding: Literal["unit", "layer"] = "unit"
    """One FSDP unit for core and coda, or one a layer where they are too large to be gathered at once."""

    mask_token_id: int | None = None
    """Id of the mask token. None: the tokenizer's, or else the first id that it does not use."""

    window: int = 16
    """Decoding: masks that are filled at the same time; training shows at most block_size of them."""

    tau: float = 0.4
    """Decoding: a mask is committed when its adjusted entropy, in nats, is below this."""

    q: float = 0.5
    """Decoding: leave the inner loop when the mean cumulative halting probability reaches this."""

    position_penalty: float = 0.02
    """Decoding: added to a slot's entropy for each position behind the first mask."""

    left1: bool = False
    """Decoding: commit the leftmost mask in each pass, whatever its entropy (the paper's quality preset)."""

    def __post_init__(self) -> None:
        check_training("alodlm", block_size=self.block_size, w_ar=self.w_ar, weighting=self.loss_weighting)
        check_decoding("alodlm", window=self.window, tau=self.tau, penalty=self.position_penalty)
        if self.passes < 1:
            raise ValueError(f"alodlm.passes must be at least 1, got {self.passes}")
        if not 0 <= self.q <= 1:
            raise ValueError(f"alodlm.q must be between 0 and 1, got {self.q}")
        if self.feedback not in ("cumulative", "one_shot"):
            raise ValueError(f"alodlm.feedback must be 'cumulative' or 'one_shot', got {self.feedback!r}")
        if self.checkpoint_core < 0:
            raise ValueError(f"alodlm.checkpoint_core must not be negative, got {self.checkpoint_core}")
        for name in ("a", "b", "prior_decay"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"alodlm.{name} must be a finite number of at least 0, got {value}")


def complete(config: Any) -> None:
    """Settle the mask id, so that the saved config names it."""
    config.alodlm.mask_token_id = resolve_mask_id(config, given=config.alodlm.mask_token_id, where=MASK_KEY)
