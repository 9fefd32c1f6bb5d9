"""Plain autoregressive decoding of a streaming model: what its own decoder is compared with.

The clean half of the training sequence is causal and predicts next tokens, so the same weights are
an autoregressive model. A recurrent core makes all K passes for every token, nothing being
committed between them, and the next token is read from the last.

Shape suffixes: B = batch rows, Q = tokens of a forward, D = model dimension, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtitan_ext.decoding import autoregressive
from torchtitan_ext.decoding.depth_cache import DepthCache, Passes, RowCost, cost_report
from torchtitan_ext.decoding.interface import Generation, OnToken
from torchtitan_ext.decoding.sampling import GREEDY, SamplingParams


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    passes: type[Passes] = Passes,
    sampling: SamplingParams = GREEDY,
    stop_ids: Collection[int] = (),
    bos_id: int | None = None,
    on_token: OnToken | None = None,
    max_len: int | None = None,
    seeds: Sequence[int] | None = None,
) -> Generation:
    """Continue every prompt token by token; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    ``forwards``: as many as new tokens; the first is the prompt's.
    ``Generation.extra``: :func:`depth_cache.cost_report`, by the same rules as for streaming: the first
    new token, which the prompt's forward gives, takes no evaluation of a layer behind the prompt.
    Errors: as for :func:`autoregressive.generate`.
    """
    decoder: Any = autoregressive.checked_model(model)
    way = passes(decoder)
    generation = autoregressive.generate(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        bos_id=bos_id,
        on_token=on_token,
        max_len=max_len,
        seeds=seeds,
        session=None if way.count == 1 else partial(PassesSession, way=way),
    )
    layers = way.layers.prefill_evaluations(way.count)
    costs = [
        RowCost(
            prompt=len(row.tokens) - len(row.new_tokens),
            new=len(row.new_tokens),
            layer_evaluations=layers * (len(row.new_tokens) - 1),
            head_evaluations=len(row.new_tokens),
        )
        for row in generation
    ]
    return replace(generation, extra=cost_report(decoder.config.size, costs, prompt_layers=layers))


class PassesSession(autoregressive.Session):
    """Rows whose tokens all go through every pass."""

    def __init__(self, model: Any, batch: int, capacity: int, *, way: Passes) -> None:
        self.model, self.way = model, way
        device = next(model.parameters()).device
        self.depths = DepthCache(batch, capacity=capacity, depths=way.count, core=way.core, device=device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Take in prompts of any lengths; logits after each one's last token, [B, V]."""
        tokens_BL = autoregressive.padded(prompts, device=self.depths.device)
        last_D: dict[int, torch.Tensor] = {}
        for begin in range(0, tokens_BL.shape[1], autoregressive.PREFILL_CHUNK):
            chunk_BQ = tokens_BL[:, begin : begin + autoregressive.PREFILL_CHUNK]
            counts = [min(max(len(prompt) - begin, 0), chunk_BQ.shape[1]) for prompt in prompts]
            hidden_BQD = self._forward(chunk_BQ, counts)
            for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
                if count and begin + count == len(prompt):
                    last_D[row] = hidden_BQD[row, count - 1]
        return self.model.lm_head(torch.stack([last_D[row] for row in range(len(prompts))]))

    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Append one token to every row; logits after it, [B, V]."""
        return self.model.lm_head(self._forward(tokens_B[:, None], [1] * len(tokens_B))[:, 0])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.depths.select(rows)

    def _forward(self, tokens_BQ: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Readouts of new tokens, the first ``counts`` of which are kept, [B, Q, D]."""
        cache, queries = self.depths, tokens_BQ.shape[1]
        lengths_B = torch.tensor(cache.lengths, device=cache.device)
        positions_BQ = lengths_B[:, None] + torch.arange(queries, device=cache.device)
        hidden_BQD = self.way.complete(cache, tokens_BQ, positions_BQ, cache.attend(queries))
        cache.advance(counts)
        return hidden_BQD
