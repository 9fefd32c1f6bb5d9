"""Decoding of a T2MLR model: keys and values plus one vector a row, the recurrent cache.

Shape suffixes: B = batch rows, L = prompt length, D = model dimension, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from torchtitan_ext.decoding.autoregressive import Session, generate, padded
from torchtitan_ext.decoding.interface import Generation
from torchtitan_ext.errors import UserError

Prefill = Literal["jacobi", "exact"]


class T2MLRSession(Session):
    """A batch of rows; each carries R of its last token."""

    def __init__(
        self, model: Any, batch: int, capacity: int, *, prefill: Prefill = "jacobi", depth: int | None = None
    ) -> None:
        super().__init__(model, batch, capacity)
        self.core = model.core
        self.how, self.depth = prefill, depth or model.core.config.forward_depth
        self.recurrent_B1D = torch.zeros(
            batch, 1, model.config.dim, device=self.cache.device, dtype=model.norm.weight.dtype
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Take in the prompts; logits after each one's last token, [B, V]."""
        return (self._exact if self.how == "exact" else self._jacobi)(prompts)

    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """One pass for one token a row: Phi once, R_t = Norm(h_t + R_{t-1}) (T2MLR Eq. 2.3, 2.4)."""
        hidden_B1D, self.recurrent_B1D = self._advance(tokens_B[:, None])
        return self.model.lm_head(hidden_B1D[:, 0])

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.recurrent_B1D = self.recurrent_B1D[list(rows)]

    def _advance(self, tokens_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states behind the coda and the new recurrent cache, both [B, 1, D]."""
        model: Any = self.model
        positions, masks = self.cache.positions(1), self.cache.attend(1)
        h_B1D = model.prelude(tokens_B1, positions, masks)
        h_end_B1D = self.core.run(self.core.fusion(h_B1D, self.recurrent_B1D), masks, positions)
        hidden_B1D = model.coda(h_end_B1D, positions, masks)
        self.cache.advance(1)
        return hidden_B1D, self.core.cache(h_end_B1D, self.recurrent_B1D)

    def _exact(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Token by token; a row that has ended keeps its cache while the longer ones go on."""
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=self.cache.device)
        tokens_BL = padded(prompts, device=self.cache.device)
        last_B1D = torch.zeros_like(self.recurrent_B1D)
        for t in range(tokens_BL.shape[1]):
            hidden_B1D, recurrent_B1D = self._advance(tokens_BL[:, t : t + 1])
            going_B11 = (t < lengths_B)[:, None, None]
            self.recurrent_B1D = torch.where(going_B11, recurrent_B1D, self.recurrent_B1D)
            last_B1D = torch.where(going_B11, hidden_B1D, last_B1D)
        self.cache.truncate(lengths_B.tolist())
        return self.model.lm_head(last_B1D[:, 0])

    def _jacobi(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Algorithm 1 over the whole prompt; its last pass fills the caches."""
        model: Any = self.model
        tokens_BL = padded(prompts, device=self.cache.device)
        batch, length = tokens_BL.shape
        positions, cached = self.cache.positions(length), self.cache.attend(length)
        causal_11LL = torch.ones(length, length, dtype=torch.bool, device=self.cache.device).tril()[
            None, None
        ]
        h_BLD = model.prelude(tokens_BL, positions, cached)
        starts_BL = (positions == 0).expand(batch, -1)
        recurrent_BLD = self.core.iterate(
            h_BLD, causal_11LL, positions, starts_BL, forward_depth=min(self.depth, length)
        )
        h_end_BLD = self.core.run(self.core.fusion(h_BLD, recurrent_BLD), cached, positions)
        hidden_BLD = model.coda(h_end_BLD, positions, cached)
        self.cache.advance(length)
        lasts = [len(prompt) - 1 for prompt in prompts]
        rows = range(batch)
        self.recurrent_B1D = self.core.cache(h_end_BLD, recurrent_BLD)[rows, lasts][:, None]
        self.cache.truncate([len(prompt) for prompt in prompts])
        return model.lm_head(hidden_BLD[rows, lasts])


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    prefill: Prefill = "jacobi",
    depth: int | None = None,
    **kwargs: Any,
) -> Generation:
    """Continue every prompt; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    ``prefill``: "exact" takes prompts in token by token, "jacobi" in ``depth`` + 1
    parallel passes (default: the depth the model was trained with); from a depth of
    the prompt's length on, both are the same.
    """
    if prefill not in ("jacobi", "exact"):
        raise UserError(f"prefill must be 'jacobi' or 'exact', got {prefill!r}")
    if depth is not None and depth < 1:
        raise UserError(f"prefill depth must be at least 1, got {depth}")
    return generate(model, prompts, session=partial(T2MLRSession, prefill=prefill, depth=depth), **kwargs)
