"""Decoding with masked blocks: a forward reveals some tokens of one block of masks.

What a row's forward holds: the clean tokens that the cache lacks (the prompt, later what the
forward before has completed), then the active block, whose masks predict their own positions.
So completed tokens enter the cache together with the next block's first masks, in one forward.

Slot and position of a token are the same number. The active block is written behind the
clean tokens and never counted as cached, so the next forward overwrites it; the same holds
for the padding of rows that have fewer tokens in a forward than others.

Shape suffixes: B = batch rows, Q = tokens of a forward, K = slots of the cache, M = mask
slots that are read (of all rows), D = model dimension, V = vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, get_args

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder as TitanDecoder

from torchtitan_ext import errors
from torchtitan_ext.attention import DenseAttention
from torchtitan_ext.decoding import autoregressive
from torchtitan_ext.decoding.interface import (
    Generation,
    OnStep,
    OnToken,
    check_mask_id,
    row_seeds,
)
from torchtitan_ext.decoding.kv_cache import KVCache
from torchtitan_ext.decoding.rotary import step_rotary
from torchtitan_ext.decoding.rows import Row
from torchtitan_ext.decoding.sampling import (
    GREEDY,
    SamplingParams,
    draw,
    greedy,
    probabilities,
    row_generators,
)
from torchtitan_ext.decoding.trace import Recorder, Trace
from torchtitan_ext.errors import UserError

Policy = Literal["confidence", "threshold", "left_to_right"]
Clean = Literal["causal", "block"]


def select_confident(confidence: Sequence[float], count: int) -> list[int]:
    """The ``count`` most confident of the masked slots; among equals the leftmost.

    TiDAR table 4, "confidence max".
    """
    order = sorted(range(len(confidence)), key=lambda slot: (-confidence[slot], slot))
    return sorted(order[:count])


def select_above(confidence: Sequence[float], threshold: float) -> list[int]:
    """Every masked slot above the threshold; where there is none, the most confident one.

    TiDAR table 4, "confidence > threshold"; the rule of Fast-dLLM's confidence-aware parallel decoding.
    """
    above = [slot for slot, value in enumerate(confidence) if value > threshold]
    return above or select_confident(confidence, 1)


def select_leftmost(slots: Sequence[int], count: int) -> list[int]:
    """The first ``count`` slots. TiDAR table 4, "left to right (AR)"."""
    return list(slots[:count])


def choose(
    logits_MV: torch.Tensor, *, mask_id: int, params: SamplingParams, generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each slot and its probability (the confidence), both [M], the latter fp32.

    The mask token is never chosen. ``generators``: one for each slot; greedy draws nothing.
    """
    logits_MV = logits_MV.to(torch.float32, copy=True)
    logits_MV[:, mask_id] = -math.inf
    if params.is_greedy:
        probs_MV, tokens_M = logits_MV.softmax(dim=-1), greedy(logits_MV)
    else:
        probs_MV = probabilities(logits_MV, params)
        tokens_M = draw(probs_MV, generators)
    return tokens_M, probs_MV.gather(-1, tokens_M[:, None])[:, 0]


def visible_slots(
    cached_B: torch.Tensor, clean_B: torch.Tensor, active_B: torch.Tensor, *, queries: int, rules: Rules
) -> torch.Tensor:
    """How many of the first slots each token of a forward attends to, [B, Q].

    Row b holds ``clean_B`` clean tokens, which follow the ``cached_B`` ones, then ``active_B`` of
    the active block, then padding. A clean token sees up to itself, or to the end of its block
    (``clean = "block"``; a clean block is always whole); the active block sees all but the padding.
    """
    index_Q = torch.arange(queries, device=cached_B.device)
    positions_BQ = cached_B[:, None] + index_Q
    clean_BQ = positions_BQ + 1
    if rules.clean == "block":
        clean_BQ = (positions_BQ // rules.block_size + 1) * rules.block_size
    total_B1 = (clean_B + active_B)[:, None]
    # Padding must see something, or its attention would be NaN.
    active_BQ = torch.where(index_Q < total_B1, cached_B[:, None] + total_B1, positions_BQ + 1)
    return torch.where(index_Q < clean_B[:, None], clean_BQ, active_BQ)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How blocks are laid out, and what a forward reveals of them."""

    policy: Policy
    """See :func:`generate`."""

    block_size: int
    """Slots of a block."""

    tokens_per_forward: int
    """Tokens a forward reveals, for ``confidence`` and ``left_to_right``."""

    threshold: float
    """Confidence above which ``threshold`` reveals a token."""

    clean: Clean
    """What clean tokens see: ``causal`` everything before them, ``block`` also the rest of their block."""

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise errors.unknown("policy", self.policy, get_args(Policy))
        if self.clean not in get_args(Clean):
            raise errors.unknown("clean attention", self.clean, get_args(Clean))
        if self.block_size < 1:
            raise UserError(f"block_size must be at least 1, got {self.block_size}")
        if not 1 <= self.tokens_per_forward <= self.block_size:
            raise UserError(
                f"tokens_per_forward must be between 1 and the block size {self.block_size}, "
                f"got {self.tokens_per_forward}"
            )
        if not 0 <= self.threshold <= 1:
            raise UserError(f"threshold must be between 0 and 1, got {self.threshold}")

    @property
    def slides(self) -> bool:
        """Whether every revealed token leaves the block at once, and a full block of masks follows it.

        Left to right with causal clean tokens: keys and values of a token depend on nothing behind it.
        """
        return self.policy == "left_to_right" and self.clean == "causal"

    def read(self, block: Sequence[int | None], budget: int) -> list[int]:
        """Slots whose prediction is needed: the masked ones, or those that left to right reveals.

        ``budget``: tokens the row may still get; a sliding block reaches beyond it.
        """
        masked = [slot for slot, token in enumerate(block) if token is None]
        if self.policy == "left_to_right":
            return select_leftmost(masked, min(self.tokens_per_forward, budget))
        return masked

    def select(self, confidence: Sequence[float]) -> list[int]:
        """Which of the slots that were read are revealed."""
        match self.policy:
            case "confidence":
                return select_confident(confidence, self.tokens_per_forward)
            case "threshold":
                return select_above(confidence, self.threshold)
            case "left_to_right":
                return list(range(len(confidence)))

    def block_end(self, start: int, length: int) -> int:
        """First position behind the active block that begins at ``start``.

        Blocks are counted from the start of the document, and the last one is cut at the longest
        ``length`` of the row. A sliding one is not cut, so that its tokens do not depend on that length.
        """
        if self.slides:
            return start + self.block_size
        return min((start // self.block_size + 1) * self.block_size, length)


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    mask_id: int,
    block_size: int,
    policy: Policy,
    tokens_per_forward: int = 1,
    threshold: float = 0.9,
    clean: Clean = "causal",
    sampling: SamplingParams = GREEDY,
    stop_ids: Collection[int] = (),
    bos_id: int | None = None,
    on_token: OnToken | None = None,
    on_step: OnStep | None = None,
    max_len: int | None = None,
    seeds: Sequence[int] | None = None,
) -> Generation:
    """Continue every prompt block by block; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    ``policy``: each forward reveals the ``tokens_per_forward`` most confident masked slots of the
    active block (``confidence``), all above ``threshold`` (``threshold``), or the leftmost
    (``left_to_right``). Confidence is the probability of the chosen token.
    ``clean``: ``causal``: the prompt's unfinished block is prefix and its rest the first active
    block; ``block``: the prompt's tokens of that block are seen inside the active block.
    ``on_token`` gets tokens in order, once everything left of them is known; ``on_step`` is
    called before, with all that the forward has revealed.
    ``Generation.extra["revealed"]``: tokens revealed by each forward, a list for each row; behind
    a stop token there may be more of them than new tokens. ``extra["traces"]``: a
    :class:`~torchtitan_ext.decoding.trace.Trace` for each row.
    Errors: :class:`UserError` before the first forward for options or prompts that do not fit.
    """
    rules = Rules(
        policy=policy,
        block_size=block_size,
        tokens_per_forward=tokens_per_forward,
        threshold=threshold,
        clean=clean,
    )
    decoder = _checked_model(model, mask_id)
    context = autoregressive.context_length(decoder)
    starts = autoregressive.checked_prompts(
        prompts,
        vocab_size=decoder.config.vocab_size,
        context=context if max_len is None else min(context, max_len),
        max_new_tokens=max_new_tokens,
        bos_id=bos_id,
    )
    seeds = row_seeds(seeds, rows=len(starts), sampling=sampling)
    rows = [
        _Row(index=i, prompt=prompt, generator=generator, max_new_tokens=max_new_tokens, rules=rules)
        for i, (prompt, generator) in enumerate(zip(starts, row_generators(seeds), strict=True))
    ]
    run = _Run(decoder, rules, mask_id, sampling, frozenset(stop_ids), on_token, on_step)
    begin = time.perf_counter()
    with torch.inference_mode(), autoregressive.headless(decoder), step_rotary(decoder):
        forwards = run(rows) if rows else 0
    return Generation(
        results=[row.result(forwards=len(row.revealed)) for row in rows],
        forwards=forwards,
        seconds=time.perf_counter() - begin,
        extra={"revealed": [row.revealed for row in rows], "traces": [row.trace() for row in rows]},
    )


@dataclass(kw_only=True, slots=True)
class _Row(Row):
    """A row while it is being generated."""

    generator: torch.Generator
    max_new_tokens: int
    rules: Rules
    pending: list[int] = field(init=False)
    """Clean tokens that the next forward takes into the cache."""

    start: int = field(init=False)
    """Position of the active block's first slot."""

    block: list[int | None] = field(init=False)
    """The active block; None is a mask."""

    revealed: list[int] = field(default_factory=list)
    record: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.record = Recorder(self.max_new_tokens)
        observed = len(self.prompt) % self.rules.block_size if self.rules.clean == "block" else 0
        self.start = len(self.prompt) - observed
        self.pending = self.prompt[: self.start]
        self.block = [*self.prompt[self.start :], *self._masks(len(self.prompt))]

    def _masks(self, start: int) -> list[None]:
        length = len(self.prompt) + self.max_new_tokens
        return [None] * (self.rules.block_end(start, length) - start)

    def read(self) -> list[int]:
        """Slots of the active block whose predictions are needed."""
        return self.rules.read(self.block, self.max_new_tokens - len(self.new))

    def reveal(self, tokens: dict[int, tuple[int, float]]) -> list[int]:
        """Put tokens, each with its confidence, into slots; those that can now be given out, in order."""
        self.revealed.append(len(tokens))
        for slot, (token, confidence) in tokens.items():
            self.block[slot] = token
            place = self.start + slot - len(self.prompt)
            self.record.reveal(place, token, step=len(self.revealed), confidence=confidence)
        given = len(self.prompt) + len(self.new) - self.start
        return self._leading(given)

    def advance(self) -> None:
        """Let a complete block (or what is known of a sliding one) become clean; masks follow it."""
        known = self._leading(0)
        self.pending = known if self.rules.slides or len(known) == len(self.block) else []
        if self.pending:
            self.start += len(self.pending)
            self.block = [*self._masks(self.start)]

    def trace(self) -> Trace:
        """When each token was revealed; ``tau`` is what ``threshold`` compares with."""
        return self.record.trace(
            policy=self.rules.policy,
            tau=self.rules.threshold,
            block_size=self.rules.block_size,
            prompt_tokens=len(self.prompt),
            forwards=len(self.revealed),
        )

    def _leading(self, begin: int) -> list[int]:
        """Known tokens of the active block from slot ``begin`` to the first mask."""
        return [t for t in takewhile(lambda token: token is not None, self.block[begin:]) if t is not None]


@dataclass(slots=True)
class _Run:
    """One call of :func:`generate`."""

    model: TitanDecoder
    rules: Rules
    mask_id: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    on_token: OnToken | None
    on_step: OnStep | None

    def __call__(self, rows: list[_Row]) -> int:
        """Generate all rows; the number of forwards, the prompts being part of the first."""
        longest = max(len(row.prompt) for row in rows) + rows[0].max_new_tokens
        device = next(self.model.parameters()).device
        cache = KVCache(len(rows), capacity=longest + 2 * self.rules.block_size, device=device)
        self._prefill(cache, rows)
        forwards = 0
        while True:
            self._step(cache, rows)
            forwards += 1
            kept = [i for i, row in enumerate(rows) if row.finish is None]
            if not kept:
                return forwards
            if len(kept) < len(rows):
                cache.select(kept)
                rows = [rows[i] for i in kept]
            for row in rows:
                row.advance()

    def _prefill(self, cache: KVCache, rows: Sequence[_Row]) -> None:
        """Take in all but the last chunk of long prompts; the last one comes with the first block."""
        size = self.rules.block_size
        chunk = max(autoregressive.PREFILL_CHUNK // size, 1) * size  # whole blocks, see visible_slots
        while max(len(row.pending) for row in rows) > chunk:
            self._forward(cache, [row.pending[:chunk] for row in rows], [[] for _ in rows])
            for row in rows:
                row.pending = row.pending[chunk:]

    def _step(self, cache: KVCache, rows: Sequence[_Row]) -> None:
        """One forward, and what it reveals."""
        clean = [row.pending for row in rows]
        reads = [row.read() for row in rows]
        hidden_BQD = self._forward(cache, clean, [row.block for row in rows])
        where = [(b, len(clean[b]) + slot) for b, slots in enumerate(reads) for slot in slots]
        index_2M = torch.tensor(where, device=cache.device).T
        tokens_M, confidence_M = choose(
            self.model.lm_head(hidden_BQD[index_2M[0], index_2M[1]]),
            mask_id=self.mask_id,
            params=self.sampling,
            generators=[rows[b].generator for b, _ in where],
        )
        tokens, confidence = iter(tokens_M.tolist()), iter(confidence_M.tolist())
        for row, slots in zip(rows, reads, strict=True):
            chosen = [(next(tokens), next(confidence)) for _ in slots]
            picked = self.rules.select([value for _, value in chosen])
            self._take(row, {slots[i]: chosen[i] for i in picked})

    def _take(self, row: _Row, tokens: dict[int, tuple[int, float]]) -> None:
        ready = row.reveal(tokens)
        if self.on_step is not None:
            self.on_step(row.index, len(tokens))
        row.give(ready, on_token=self.on_token, stop_ids=self.stop_ids, limit=row.max_new_tokens)

    def _forward(
        self, cache: KVCache, clean: Sequence[Sequence[int]], blocks: Sequence[Sequence[int | None]]
    ) -> torch.Tensor:
        """Hidden states [B, Q, D] of each row's clean tokens and block; the clean ones stay in the cache."""
        counts = [len(row) for row in clean]
        tokens = [
            [*row, *(self.mask_id if token is None else token for token in block)]
            for row, block in zip(clean, blocks, strict=True)
        ]
        tokens_BQ = autoregressive.padded(tokens, device=cache.device)
        queries = tokens_BQ.shape[1]
        sizes_3B = torch.tensor([cache.lengths, counts, [len(b) for b in blocks]], device=cache.device)
        limits_BQ = visible_slots(*sizes_3B, queries=queries, rules=self.rules)
        slots_BQ = sizes_3B[0][:, None] + torch.arange(queries, device=cache.device)
        slots_K = torch.arange(max(cache.lengths) + queries, device=cache.device)
        masks = cache.attend_at(slots_BQ, slots_K < limits_BQ[..., None])
        # A sliding block and padding may reach beyond the context; no prediction is read there.
        positions_BQ = slots_BQ.clamp(max=autoregressive.context_length(self.model) - 1)
        hidden_BQD = self.model(tokens_BQ, positions=positions_BQ, attention_masks=masks)
        cache.advance(counts)
        return hidden_BQD


def _checked_model(model: nn.Module, mask_id: int) -> TitanDecoder:
    """The model, refused if it has no dense attention or no such mask token."""
    if not isinstance(model, TitanDecoder):
        raise UserError(f"{type(model).__name__} is not a decoder")
    if not any(isinstance(module, DenseAttention) for module in model.modules()):
        raise UserError("decoding with a KV cache needs a model built with attention = 'dense'")
    check_mask_id(mask_id, vocab_size=model.config.vocab_size)
    return model
