"""Decoding of ALoDLM: WeDLM's window, with up to K passes of the recurrent core in a step.

Keys and values of a committed token. It is committed in a step that began with it known, at the
front of the window. There it is an observed token, as every token of the clean half is in training: pass 1
takes prelude(embedding), every later pass the carry of the one before. At depth d <= S, the
passes of that step, it has the entry of pass d, in which it has seen every earlier token at depth d
if that one has got so far, else at its deepest; deeper than S it gives its entry at S. The coda's
entry is that of pass S, which has seen the coda's entries of the tokens before; the prelude's does
not depend on passes. The prompt has all K passes. So the committed entries are a function of
the text and of each token's S alone, whatever the window held.

Shape suffixes: R = rows, Q = slots of a step, M = masked slots that are read, F = slots whose
tokens are fed back, D = model dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchtitan_ext.decoding.depth_cache import LayerCounts, Passes
from torchtitan_ext.decoding.interface import Generation
from torchtitan_ext.decoding.streaming import Feedback, Rules, generate


class LoopedPasses(Passes):
    """Prelude once, then core and coda in every pass."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config = model.config
        self.count = config.passes
        self.core = range(config.start, config.end)
        self.layers = LayerCounts(config.start, len(self.core), len(config.layers) - config.end)

    def begin(self, tokens_RQ: torch.Tensor, positions_RQ: torch.Tensor, masks: Any) -> torch.Tensor:
        """h of pass 1: the prelude, [R, Q, D]."""
        return self.model.prelude(tokens_RQ, positions_RQ, masks)

    def run(self, state: torch.Tensor, positions_RQ: torch.Tensor, masks: Any) -> torch.Tensor:
        """core_s of h, [R, Q, D]."""
        return self.model.core.run(state, masks, positions_RQ)

    def readout(self, core_RQD: torch.Tensor, positions_RQ: torch.Tensor, masks: Any) -> torch.Tensor:
        """r_s = norm(coda(core_s)), [R, Q, D]."""
        return self.model.coda(core_RQD, positions_RQ, masks)

    def hazard(self, readout_MD: torch.Tensor, depth: int) -> torch.Tensor:
        """lambda_s, [M] (ALoDLM Eq. 2)."""
        return self.model.hazard(readout_MD, depth)

    def feed(self, core_RQD: torch.Tensor, index_2F: torch.Tensor, tokens_F: torch.Tensor) -> torch.Tensor:
        """h of the next pass: the carry, and embeddings of filled slots (ALoDLM Eq. 3), [R, Q, D]."""
        carry_RQD = self.model.carry(core_RQD)
        return carry_RQD.index_put((index_2F[0], index_2F[1]), self.model.tok_embeddings(tokens_F))


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    window: int | None = None,
    tau: float | None = None,
    position_penalty: float | None = None,
    q: float | None = None,
    left1: bool | None = None,
    feedback: Feedback | None = None,
    **kwargs: Any,
) -> Generation:
    """Continue every prompt; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    What is not given comes from the section [alodlm] of the model's config.
    ``window``, ``tau``, ``position_penalty``: as for WeDLM, applied after every pass.
    ``q``: a step ends when the mean cumulative halt probability of its masked slots reaches it.
    ``left1``: every pass fills the leftmost masked slot, tau unused. ``feedback``: a slot filled
    in a step gives its embedding to all later passes of it, or to the next alone ("one_shot").
    """
    config: Any = model.config
    rules = Rules(
        window=config.window if window is None else window,
        tau=config.tau if tau is None else tau,
        position_penalty=config.position_penalty if position_penalty is None else position_penalty,
        q=config.q if q is None else q,
        left1=config.left1 if left1 is None else left1,
        feedback=config.core.feedback if feedback is None else feedback,
    )
    return generate(model, prompts, mask_id=config.mask_token_id, rules=rules, passes=LoopedPasses, **kwargs)
