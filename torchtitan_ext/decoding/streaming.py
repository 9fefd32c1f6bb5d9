"""Streaming decoding of masked slots: a window that slides over the text, with causal attention.

A window holds up to W slots at fixed positions behind the prefix, each a token or a mask. A step
(a forward) lays the window out as filled slots in ascending order, then masked slots in ascending
order; attention is causal in that physical order, while rotary positions stay logical. So the
filled slots at the front of the window see exactly the text before them, and their keys and values
are committed: they are those of a causal forward over the text. Everything else is dropped and
computed anew in the next step.

A model with a recurrent core makes several passes in a step (``depth_cache.Passes``); slots that a
pass fills stay where they are in the physical order until the step is over.

Shape suffixes: B = batch rows, R = rows that still run in a step, Q = slots of a step, M = masked
slots that are read (of all rows), D = model dimension, V = vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, get_args

import torch

from torchtitan_ext import errors
from torchtitan_ext.attention import CachedAttention
from torchtitan_ext.backbones.sizes import BackboneSize
from torchtitan_ext.decoding import autoregressive
from torchtitan_ext.decoding.depth_cache import DepthCache, Passes, RowCost, cost_report
from torchtitan_ext.decoding.interface import (
    Generation,
    OnStep,
    OnToken,
    check_mask_id,
    row_seeds,
)
from torchtitan_ext.decoding.rotary import step_rotary
from torchtitan_ext.decoding.rows import Row
from torchtitan_ext.decoding.sampling import GREEDY, SamplingParams, draw, probabilities, row_generators
from torchtitan_ext.decoding.trace import Recorder, Trace
from torchtitan_ext.errors import UserError

Feedback = Literal["cumulative", "one_shot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How wide the window is, what a pass fills, and when a step ends."""

    window: int
    """Masked slots that a step begins with, W."""

    tau: float
    """Adjusted entropy, in nats, below which a slot is filled."""

    position_penalty: float
    """Added to the entropy for each slot of distance from the first masked one."""

    q: float = 1.0
    """Mean cumulative halt probability of the masked slots at which a step ends."""

    left1: bool = False
    """Fill the leftmost masked slot in each pass, whatever its entropy."""

    feedback: Feedback = "cumulative"
    """Whether a slot filled in a step gives its embedding to all later passes, or to the next alone."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UserError(f"window must be at least 1, got {self.window}")
        for name, value in (("tau", self.tau), ("position_penalty", self.position_penalty)):
            if not (math.isfinite(value) and value >= 0):
                raise UserError(f"{name} must be a finite number of at least 0, got {value}")
        if not 0 <= self.q <= 1:
            raise UserError(f"q must be between 0 and 1, got {self.q}")
        if self.feedback not in get_args(Feedback):
            raise errors.unknown("feedback", self.feedback, get_args(Feedback))

    def adjusted(self, slots: Sequence[int], entropy: Sequence[float]) -> list[float]:
        """Entropy + penalty x distance from the first of the masked slots, which are in order."""
        penalties = [self.position_penalty * (slot - slots[0]) for slot in slots]
        return [value + penalty for value, penalty in zip(entropy, penalties, strict=True)]

    def select(self, slots: Sequence[int], entropy: Sequence[float]) -> list[int]:
        """Which of the masked slots a pass fills; possibly none."""
        if self.left1:
            return [slots[0]]
        adjusted = self.adjusted(slots, entropy)
        return [slot for slot, value in zip(slots, adjusted, strict=True) if value < self.tau]

    def least(self, slots: Sequence[int], entropy: Sequence[float]) -> int:
        """What a step fills that would fill nothing; among equals the leftmost."""
        return min(zip(self.adjusted(slots, entropy), slots, strict=True))[1]


def physical_order(window: Sequence[int | None]) -> list[int]:
    """Slots in the order in which they are laid out: filled ascending, then masked (None) ascending."""
    return sorted(range(len(window)), key=lambda slot: (window[slot] is None, slot))


def choose(
    logits_MV: torch.Tensor, *, mask_id: int, params: SamplingParams, generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token for each slot, the entropy in nats of the model's distribution there, and its probability.

    All [M]. Everything is fp32, without the mask token, which is never chosen. The distribution is that
    at temperature 1, whatever ``params``. ``generators``: one for each slot; greedy draws nothing.
    """
    logits_MV = logits_MV.to(torch.float32, copy=True)
    logits_MV[:, mask_id] = -math.inf
    probs_MV = logits_MV.softmax(dim=-1)
    entropy_M = torch.special.entr(probs_MV).sum(dim=-1)
    if params.is_greedy:
        tokens_M = logits_MV.argmax(dim=-1)
    else:
        tokens_M = draw(probabilities(logits_MV, params), generators)
    return tokens_M, entropy_M, probs_MV.gather(-1, tokens_M[:, None])[:, 0]


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    mask_id: int,
    rules: Rules,
    passes: type[Passes] = Passes,
    sampling: SamplingParams = GREEDY,
    stop_ids: Collection[int] = (),
    bos_id: int | None = None,
    on_token: OnToken | None = None,
    on_step: OnStep | None = None,
    max_len: int | None = None,
    seeds: Sequence[int] | None = None,
) -> Generation:
    """Continue every prompt; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    ``on_token`` gets tokens in order, once everything left of them is known; ``on_step`` is called
    before, with all that the step has filled.
    ``forwards``: steps, and one over the prompt, which gives no token here.
    ``Generation.extra``: see :func:`_report`.
    Errors: :class:`UserError` before the first forward for options or prompts that do not fit.
    """
    decoder: Any = autoregressive.checked_model(model)
    vocab_size = decoder.config.vocab_size
    check_mask_id(mask_id, vocab_size=vocab_size)
    context = autoregressive.context_length(decoder)
    starts = autoregressive.checked_prompts(
        prompts,
        vocab_size=vocab_size,
        context=context if max_len is None else min(context, max_len),
        max_new_tokens=max_new_tokens,
        bos_id=bos_id,
    )
    seeds = row_seeds(seeds, rows=len(starts), sampling=sampling)
    rows = [
        _Row(
            index=i,
            prompt=prompt,
            generator=generator,
            max_new_tokens=max_new_tokens,
            rules=rules,
            stop_ids=frozenset(stop_ids),
        )
        for i, (prompt, generator) in enumerate(zip(starts, row_generators(seeds), strict=True))
    ]
    way = passes(decoder)
    run = _Run(decoder, way, rules, mask_id, sampling, on_token, on_step)
    begin = time.perf_counter()
    with torch.inference_mode(), step_rotary(decoder):
        forwards = run(rows) if rows else 0
    return Generation(
        results=[row.result(forwards=1 + len(row.passes)) for row in rows],
        forwards=forwards,
        seconds=time.perf_counter() - begin,
        extra=_report(rows, way, decoder.config.size),
    )


@dataclass(kw_only=True, slots=True)
class _Row(Row):
    """A row while it is being generated."""

    generator: torch.Generator
    max_new_tokens: int
    rules: Rules
    stop_ids: frozenset[int]
    window: list[int | None] = field(default_factory=list)
    """Slots behind the prompt and the committed tokens; None is a mask."""

    committed: int = 0
    """New tokens that are in the cache."""

    revealed: list[int] = field(default_factory=list)
    """Slots filled by each step."""

    passes: list[int] = field(default_factory=list)
    """Passes of each step."""

    widths: list[int] = field(default_factory=list)
    """Slots of each step."""

    heads: int = 0
    """Vocabulary readouts."""

    fill_depth: dict[int, int] = field(default_factory=dict)
    """Pass in which each new token was filled, by its place among the new tokens."""

    first_hazard: dict[int, float] = field(default_factory=dict)
    """Halt probability of each masked slot in the first pass of the last step that began with it masked."""

    filled: dict[int, int] = field(default_factory=dict)
    """Slots that the current step has filled, and their tokens."""

    halted: dict[int, float] = field(default_factory=dict)
    """Cumulative halt probability of the slots, in the current step."""

    record: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.record = Recorder(self.max_new_tokens)

    def begin_step(self) -> int:
        """Append masks for the filled slots at the front; how many of those there are."""
        leading = len(self.known())
        budget = self.max_new_tokens - self.committed - len(self.window)
        fresh = leading if self.window else self.rules.window
        self.window += [None] * min(fresh, budget)
        self.filled, self.halted = {}, {}
        self.widths.append(len(self.window))
        return leading

    def masked(self) -> list[int]:
        """Masked slots, in order."""
        return [slot for slot, token in enumerate(self.window) if token is None]

    def known(self) -> list[int]:
        """Tokens of the filled slots at the front of the window."""
        return [t for t in takewhile(lambda token: token is not None, self.window) if t is not None]

    def take(
        self,
        depth: int,
        tokens: Sequence[int],
        entropy: Sequence[float],
        confidence: Sequence[float],
        hazards: Sequence[float] | None,
    ) -> list[int] | None:
        """What a pass has read at the masked slots; the slots it fills, or None if it ends the step.

        ``hazards``: None in the last pass that there may be.
        """
        slots = self.masked()
        self.heads += len(slots)
        if depth == 1 and hazards is not None:
            places = [self.committed + slot for slot in slots]
            self.first_hazard.update(zip(places, hazards, strict=True))
        chosen = dict(zip(slots, tokens, strict=True))
        sure = dict(zip(slots, confidence, strict=True))
        if hazards is not None:
            self._halt(dict(zip(slots, hazards, strict=True)))
        slots = self._before_end(chosen)
        entropy = entropy[: len(slots)]
        picked = self.rules.select(slots, entropy)
        self._fill(depth, {slot: (chosen[slot], sure[slot]) for slot in picked})
        if hazards is not None and self._goes_on(slots):
            return picked
        if not self.filled:
            least = self.rules.least(slots, entropy)
            self._fill(depth, {least: (chosen[least], sure[least])})
        self.passes.append(depth)
        self.revealed.append(len(self.filled))
        return None

    def end_step(self, leading: int) -> list[int]:
        """Commit the slots at the front; the tokens that have become known."""
        known = self.known()[len(self.new) - self.committed :]
        self.window = self.window[leading:]
        self.committed += leading
        return known

    def _before_end(self, chosen: dict[int, int]) -> list[int]:
        """The masked slots up to the first stop token, be it filled or the best guess for a masked slot.

        What stands behind the end of a document was never trained, so that a model may be sure of
        anything there; a token filled there would be seen by the slots before it.
        """
        best = [chosen[slot] if token is None else token for slot, token in enumerate(self.window)]
        end = next((slot for slot, token in enumerate(best) if token in self.stop_ids), len(best))
        return [slot for slot in chosen if slot <= end]

    def _fill(self, depth: int, tokens: dict[int, tuple[int, float]]) -> None:
        for slot, (token, confidence) in tokens.items():
            self.filled[slot] = self.window[slot] = token
            place = self.committed + slot
            self.fill_depth[place] = depth
            self.record.reveal(place, token, step=len(self.passes) + 1, confidence=confidence)

    def trace(self) -> Trace:
        """When each token was filled, by steps; the window slides, so the response is one block."""
        return self.record.trace(
            policy="stream",
            tau=self.rules.tau,
            block_size=self.max_new_tokens,
            prompt_tokens=len(self.prompt),
            forwards=len(self.passes),
        )

    def _halt(self, hazards: dict[int, float]) -> None:
        """a = a + (1 - a) lambda of every masked slot, those behind a likely end too: it may move."""
        for slot, hazard in hazards.items():
            before = self.halted.get(slot, 0.0)
            self.halted[slot] = before + (1 - before) * hazard

    def _goes_on(self, slots: Sequence[int]) -> bool:
        """Whether another pass follows: the mean of a over those of the slots that are still masked < q."""
        masked = [slot for slot in slots if self.window[slot] is None]
        if not masked or self.stop_ids.intersection(self.known()):
            return False
        return sum(self.halted[slot] for slot in masked) / len(masked) < self.rules.q


@dataclass(slots=True)
class _Step:
    """The rows of a step that still run, and their tensors."""

    rows: list[_Row]
    orders: list[list[int]]
    """Physical order of each row's slots."""

    index: list[int]
    """Row of the batch, in the cache."""

    positions_RQ: torch.Tensor
    masks: CachedAttention


@dataclass(slots=True)
class _Run:
    """One call of :func:`generate`."""

    model: Any
    way: Passes
    rules: Rules
    mask_id: int
    sampling: SamplingParams
    on_token: OnToken | None
    on_step: OnStep | None

    def __call__(self, rows: list[_Row]) -> int:
        """Generate all rows; the number of forwards, the prompts being one."""
        longest = max(len(row.prompt) for row in rows) + rows[0].max_new_tokens
        # A row at its end still gets the padding of one whose window is full.
        cache = DepthCache(
            len(rows),
            capacity=longest + 2 * self.rules.window,
            depths=self.way.count,
            core=self.way.core,
            device=next(self.model.parameters()).device,
        )
        self._prefill(cache, [row.prompt for row in rows])
        forwards = 1
        while True:
            leading = [row.begin_step() for row in rows]
            self._step(cache, rows)
            forwards += 1
            cache.advance(leading)
            for row, count in zip(rows, leading, strict=True):
                self._give(row, row.end_step(count))
            kept = [i for i, row in enumerate(rows) if row.finish is None]
            if not kept:
                return forwards
            cache.select(kept)
            rows = [rows[i] for i in kept]

    def _prefill(self, cache: DepthCache, prompts: Sequence[Sequence[int]]) -> None:
        """Take the prompts in at every depth; the coda, which nothing reads, in the last alone."""
        tokens_BL = autoregressive.padded(prompts, device=cache.device)
        for begin in range(0, tokens_BL.shape[1], autoregressive.PREFILL_CHUNK):
            chunk_BQ = tokens_BL[:, begin : begin + autoregressive.PREFILL_CHUNK]
            queries = chunk_BQ.shape[1]
            positions_BQ = self._positions(cache, [list(range(queries))] * cache.batch)
            masks = cache.attend(queries)
            self.way.complete(cache, chunk_BQ, positions_BQ, masks)
            cache.advance([min(max(len(prompt) - begin, 0), queries) for prompt in prompts])

    def _positions(self, cache: DepthCache, slots: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logical positions of slots behind each row's length, padded, [B, Q]."""
        offsets_BQ = autoregressive.padded(slots, device=cache.device)
        lengths_B = torch.tensor(cache.lengths, device=cache.device)
        # Padding of a short row may reach beyond the context; nothing reads it.
        return (lengths_B[:, None] + offsets_BQ).clamp(max=autoregressive.context_length(self.model) - 1)

    def _step(self, cache: DepthCache, rows: Sequence[_Row]) -> None:
        """All passes over the windows; a row that has halted leaves the passes that follow."""
        orders = [physical_order(row.window) for row in rows]
        tokens = [
            [self.mask_id if (token := row.window[slot]) is None else token for slot in order]
            for row, order in zip(rows, orders, strict=True)
        ]
        tokens_RQ = autoregressive.padded(tokens, device=cache.device)
        step = _Step(
            rows=list(rows),
            orders=orders,
            index=list(range(len(rows))),
            positions_RQ=self._positions(cache, orders),
            masks=cache.attend(tokens_RQ.shape[1]),
        )
        state = self.way.begin(tokens_RQ, step.positions_RQ, step.masks)
        for depth in range(1, self.way.count + 1):
            cache.depth = depth
            core_RQD = self.way.run(state, step.positions_RQ, step.masks)
            picked = self._read(step, self.way.readout(core_RQD, step.positions_RQ, step.masks), depth)
            kept = [r for r, slots in enumerate(picked) if slots is not None]
            if not kept:
                break
            if len(kept) < len(picked):
                core_RQD = core_RQD[kept]
                self._narrow(cache, step, kept)
            state = self._feed(step, core_RQD, [slots for slots in picked if slots is not None])

    def _read(self, step: _Step, readout_RQD: torch.Tensor, depth: int) -> list[list[int] | None]:
        """Fill slots from a pass's readout; for each row what :meth:`_Row.take` says."""
        places = enumerate(zip(step.rows, step.orders, strict=True))
        where = [(r, order.index(slot)) for r, (row, order) in places for slot in row.masked()]
        index_2M = torch.tensor(where, device=readout_RQD.device).T
        readout_MD = readout_RQD[index_2M[0], index_2M[1]]
        tokens_M, entropy_M, confidence_M = choose(
            self.model.lm_head(readout_MD),
            mask_id=self.mask_id,
            params=self.sampling,
            generators=[step.rows[r].generator for r, _ in where],
        )
        last = depth == self.way.count
        values = [tokens_M.tolist(), entropy_M.tolist(), confidence_M.tolist()]
        if not last:
            values.append(self.way.hazard(readout_MD, depth).float().tolist())
        picked, begin = [], 0
        for row in step.rows:
            end = begin + len(row.masked())
            tokens, entropy, confidence, *hazards = [value[begin:end] for value in values]
            picked.append(row.take(depth, tokens, entropy, confidence, None if last else hazards[0]))
            begin = end
        return picked

    def _narrow(self, cache: DepthCache, step: _Step, kept: Sequence[int]) -> None:
        """Keep these of the rows."""
        step.rows = [step.rows[r] for r in kept]
        step.orders = [step.orders[r] for r in kept]
        step.index = [step.index[r] for r in kept]
        step.masks = cache.attend(step.positions_RQ.shape[1], rows=step.index)
        step.positions_RQ = step.positions_RQ[list(kept)]

    def _feed(self, step: _Step, core_RQD: torch.Tensor, picked: Sequence[Sequence[int]]) -> torch.Tensor:
        """What the next pass takes in: the carry, and the embeddings of slots filled in this step."""
        where, tokens = [], []
        for r, (row, order, now) in enumerate(zip(step.rows, step.orders, picked, strict=True)):
            for slot in row.filled if self.rules.feedback == "cumulative" else now:
                where.append((r, order.index(slot)))
                tokens.append(row.filled[slot])
        device = core_RQD.device
        index_2F = torch.tensor(where, dtype=torch.long, device=device).reshape(-1, 2).T
        return self.way.feed(core_RQD, index_2F, torch.tensor(tokens, dtype=torch.long, device=device))

    def _give(self, row: _Row, tokens: Sequence[int]) -> None:
        """Give out the tokens that have become known, and end the row where it ends."""
        if self.on_step is not None:
            self.on_step(row.index, row.revealed[-1])
        row.give(tokens, on_token=self.on_token, stop_ids=row.stop_ids, limit=row.max_new_tokens)


def _report(rows: Sequence[_Row], way: Passes, size: BackboneSize) -> dict[str, Any]:
    """What the rows cost.

    Lists of one entry a row: ``revealed``: slots filled by each step (behind a stop token there may be
    more than new tokens); ``traces``: a :class:`~torchtitan_ext.decoding.trace.Trace`, whose forwards are
    steps; ``passes``: passes of each step; ``depths``: pass in which each new token
    was filled; ``first_hazards`` (several passes only): halt probability of each new token in the
    first pass of the step that filled it.
    Numbers: ``tokens_per_step``, ``mean_passes`` (of a step) and ``path_layers`` (layers a slot goes
    through in a step, prelude + S (core + coda), mean over steps). The prompts' forward is no step.
    The rest is :func:`depth_cache.cost_report`'s: evaluations of layers are dense, filled slots too, and
    those of the head are the masked slots read.
    """
    layers, new = way.layers, sum(len(row.new) for row in rows)
    costs = [
        RowCost(
            prompt=len(row.prompt),
            new=len(row.new),
            layer_evaluations=sum(
                width * layers.evaluations(passes)
                for width, passes in zip(row.widths, row.passes, strict=True)
            ),
            head_evaluations=row.heads,
        )
        for row in rows
    ]
    steps = [passes for row in rows for passes in row.passes]
    report: dict[str, Any] = {
        "revealed": [row.revealed for row in rows],
        "traces": [row.trace() for row in rows],
        "passes": [row.passes for row in rows],
        "depths": [[row.fill_depth[i] for i in range(len(row.new))] for row in rows],
        "tokens_per_step": new / max(len(steps), 1),
        "mean_passes": sum(steps) / max(len(steps), 1),
        "path_layers": sum(layers.evaluations(passes) for passes in steps) / max(len(steps), 1),
        **cost_report(size, costs, prompt_layers=layers.prefill_evaluations(way.count)),
    }
    if way.count > 1:
        report["first_hazards"] = [[row.first_hazard[i] for i in range(len(row.new))] for row in rows]
    return report
