"""Decoding of looped and pause-token models: the plain decoder, with what each adds to a step.

A looped model needs nothing here: each pass of its core files keys and values under layers
of its own (``model.LoopedCore``).

Shape suffixes: B = batch rows, E = a token and its pauses, D = model dimension, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchtitan_ext.decoding.autoregressive import Session, context_length, forward, generate, prefill
from torchtitan_ext.decoding.interface import Generation
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.looped.lstm import LSTMModel
from torchtitan_ext.methods.looped.model import PauseBackbone
from torchtitan_ext.methods.looped.pause import expand_prompt, expand_tokens


class PauseSession(Session):
    """A token and its pauses in one forward; the logits are those of the last pause."""

    def __init__(self, model: Any, batch: int, capacity: int) -> None:
        self.pauses, self.pause_id = model.config.pause_tokens, model.config.pause_token_id
        super().__init__(model, batch, capacity * (1 + self.pauses))

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Take in the prompts, expanded; logits after each one's last pause, [B, V]."""
        expanded = [expand_prompt(prompt, pauses=self.pauses, pause_id=self.pause_id) for prompt in prompts]
        return self._spoken(prefill(self.model, self.cache, expanded))

    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Append a token and its pauses to every row; logits after the last pause, [B, V]."""
        tokens_BE = expand_tokens(tokens_B[:, None], pauses=self.pauses, pause_id=self.pause_id)
        hidden_BED = forward(self.model, self.cache, tokens_BE)
        self.cache.advance(tokens_BE.shape[1])
        return self._spoken(self.model.lm_head(hidden_BED[:, -1]))

    def _spoken(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """The logits without that of the pause, which is never a text's next token."""
        logits_BV[:, self.pause_id] = float("-inf")
        return logits_BV


def decode(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_len: int | None = None, **kwargs: Any
) -> Generation:
    """Continue every prompt; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    Lengths count tokens without their pauses: with p pauses the context holds 1 / (1 + p)
    of its positions as tokens.
    """
    if isinstance(model, LSTMModel):
        raise UserError(
            "[looped] kind = 'lstm' has no decoder: it is evaluated on the synthetic tasks in one forward "
            "(allowed: middle, full, pause)"
        )
    if not isinstance(model, PauseBackbone):
        return generate(model, prompts, max_len=max_len, **kwargs)
    config: Any = model.config
    room = context_length(model) // (1 + config.pause_tokens)
    limit = room if max_len is None else min(room, max_len)
    return generate(model, prompts, max_len=limit, session=PauseSession, **kwargs)
