"""One token a forward, with a KV cache.

Rows of a batch are independent: their tokens are those of single runs. A finished row
leaves the batch.

Shape suffixes: B = batch rows, L = new tokens of a forward, D = model dimension,
V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder as TitanDecoder

from torchtitan_ext.attention import DenseAttention
from torchtitan_ext.decoding.interface import (
    Generation,
    OnToken,
    row_seeds,
)
from torchtitan_ext.decoding.kv_cache import KVCache
from torchtitan_ext.decoding.narrow import narrow_products
from torchtitan_ext.decoding.rotary import step_rotary
from torchtitan_ext.decoding.rows import Row
from torchtitan_ext.decoding.sampling import GREEDY, SamplingParams, row_generators, sample
from torchtitan_ext.errors import UserError

PREFILL_CHUNK = 512
"""Tokens of a prompt in one forward: bounds the attention mask to chunk x context."""


@contextmanager
def headless(model: TitanDecoder) -> Generator[None]:
    """Let the model's forward return hidden states [B, L, D], so that the head runs where it is needed."""
    before = model._skip_lm_head
    model._skip_lm_head = True
    try:
        yield
    finally:
        model._skip_lm_head = before


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams = GREEDY,
    stop_ids: Collection[int] = (),
    bos_id: int | None = None,
    on_token: OnToken | None = None,
    max_len: int | None = None,
    seeds: Sequence[int] | None = None,
    session: Callable[[TitanDecoder, int, int], Session] | None = None,
) -> Generation:
    """Continue every prompt token by token; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    ``session``: what a method puts in the place of :class:`Session`, called with the model,
    the number of rows and the longest length.
    """
    decoder = checked_model(model)
    context = context_length(decoder)
    starts = checked_prompts(
        prompts,
        vocab_size=decoder.config.vocab_size,
        context=context if max_len is None else min(context, max_len),
        max_new_tokens=max_new_tokens,
        bos_id=bos_id,
    )
    seeds = row_seeds(seeds, rows=len(starts), sampling=sampling)
    rows = [
        _Row(index=i, prompt=prompt, generator=generator)
        for i, (prompt, generator) in enumerate(zip(starts, row_generators(seeds), strict=True))
    ]
    run = _Run(decoder, sampling, max_new_tokens, frozenset(stop_ids), on_token, session or Session)
    begin = time.perf_counter()
    with torch.inference_mode(), headless(decoder), step_rotary(decoder), narrow_products(decoder):
        forwards = run(rows) if rows else 0
    seconds = time.perf_counter() - begin
    return Generation(
        results=[row.result(forwards=row.forwards) for row in rows], forwards=forwards, seconds=seconds
    )


class Session:
    """The state of a batch of rows that are being decoded, and the two ways to move it on.

    A method whose decoding carries more than keys and values subclasses it.
    """

    def __init__(self, model: TitanDecoder, batch: int, capacity: int) -> None:
        self.model = model
        self.cache = KVCache(batch, capacity=capacity, device=next(model.parameters()).device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Take in prompts of any lengths; logits after each one's last token, [B, V]."""
        return prefill(self.model, self.cache, prompts)

    def step(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Append one token to every row; logits after it, [B, V]."""
        return step(self.model, self.cache, tokens_B)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.cache.select(rows)


@dataclass(kw_only=True, slots=True)
class _Row(Row):
    """A row while it is being generated."""

    generator: torch.Generator
    forwards: int = 0


@dataclass(slots=True)
class _Run:
    """One call of :func:`generate`."""

    model: TitanDecoder
    sampling: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    on_token: OnToken | None
    session: Callable[[TitanDecoder, int, int], Session]

    def __call__(self, rows: list[_Row]) -> int:
        """Generate all rows; the number of forwards, the prompts being one."""
        longest = max(len(row.prompt) for row in rows)
        session = self.session(self.model, len(rows), longest + self.max_new_tokens)
        logits_BV = session.prefill([row.prompt for row in rows])
        forwards = 1
        while True:
            tokens_B = sample(logits_BV, self.sampling, [row.generator for row in rows])
            for row, token in zip(rows, tokens_B.tolist(), strict=True):
                self._take(row, token)
            kept = [i for i, row in enumerate(rows) if row.finish is None]
            if not kept:
                return forwards
            if len(kept) < len(rows):
                session.select(kept)
                rows = [rows[i] for i in kept]
                tokens_B = tokens_B[kept]
            logits_BV = session.step(tokens_B)
            forwards += 1

    def _take(self, row: _Row, token: int) -> None:
        row.forwards += 1
        row.give([token], on_token=self.on_token, stop_ids=self.stop_ids, limit=self.max_new_tokens)


def padded(prompts: Sequence[Sequence[int]], *, device: torch.device) -> torch.Tensor:
    """Prompts as one tensor, padded on the right with token 0, [B, L]."""
    longest = max(len(prompt) for prompt in prompts)
    return torch.tensor([[*prompt, *([0] * (longest - len(prompt)))] for prompt in prompts], device=device)


def prefill(model: TitanDecoder, cache: KVCache, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Fill an empty cache with prompts of any lengths; logits after each one's last token, [B, V].

    Call it inside :func:`headless`.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    tokens_BL = padded(prompts, device=cache.device)
    last_D: dict[int, torch.Tensor] = {}
    for begin in range(0, longest, PREFILL_CHUNK):
        chunk_BL = tokens_BL[:, begin : begin + PREFILL_CHUNK]
        hidden_BLD = forward(model, cache, chunk_BL)
        cache.advance(chunk_BL.shape[1])
        for row, length in enumerate(lengths):
            if begin < length <= begin + chunk_BL.shape[1]:
                last_D[row] = hidden_BLD[row, length - 1 - begin]
    cache.truncate(lengths)
    return model.lm_head(torch.stack([last_D[row] for row in range(len(prompts))]))


def step(model: TitanDecoder, cache: KVCache, tokens_B: torch.Tensor) -> torch.Tensor:
    """Append one token to every row; logits after it, [B, V]. Call it inside :func:`headless`."""
    hidden_B1D = forward(model, cache, tokens_B[:, None])
    cache.advance(1)
    return model.lm_head(hidden_B1D[:, 0])


def forward(model: TitanDecoder, cache: KVCache, tokens_BL: torch.Tensor) -> torch.Tensor:
    """A causal forward over new tokens, written behind each row but not yet advanced over.

    Hidden states inside :func:`headless`, else logits.
    """
    length = tokens_BL.shape[1]
    return model(tokens_BL, positions=cache.positions(length), attention_masks=cache.attend(length))


def checked_model(model: nn.Module) -> TitanDecoder:
    """The model, refused if it cannot be decoded with a causal cache."""
    if not isinstance(model, TitanDecoder):
        raise UserError(f"{type(model).__name__} is not a decoder")
    size = getattr(model.config, "size", None)
    if size is not None and size.attention != "causal":
        raise UserError(
            f"backbone {size.family!r} attends in both directions; it cannot be decoded autoregressively"
        )
    if not any(isinstance(module, DenseAttention) for module in model.modules()):
        raise UserError("decoding with a KV cache needs a model built with attention = 'dense'")
    return model


def context_length(model: TitanDecoder) -> int:
    """Longest sequence the model has rotary positions for, in tokens."""
    assert isinstance(model.config, TitanDecoder.Config)
    return model.config.max_seq_len


def checked_prompts(
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    context: int,
    max_new_tokens: int,
    bos_id: int | None,
) -> list[list[int]]:
    """The prompts as lists, an empty one replaced by BOS; anything that does not fit is refused."""
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    checked = []
    for i, prompt in enumerate(prompts):
        tokens = list(prompt)
        if not tokens:
            if bos_id is None:
                raise UserError(f"prompt {i} is empty, and the tokenizer has no BOS token to start from")
            tokens = [bos_id]
        wrong = next((t for t in tokens if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"prompt {i} holds token {wrong}, but the model's vocabulary has {vocab_size} tokens; "
                "is this the model's tokenizer?"
            )
        if len(tokens) + max_new_tokens > context:
            raise UserError(
                f"prompt {i} has {len(tokens)} tokens; with max_new_tokens = {max_new_tokens} that is "
                f"{len(tokens) + max_new_tokens}, longer than the {context} tokens allowed"
            )
        checked.append(tokens)
    return checked
