"""Decoding by denoising: a response of masks behind the prompt is revealed block by block.

Every forward sees the whole sequence, in both directions, so there is no KV cache. Each row
of a batch is one document and its padding another, so a row never sees padding and does not
depend on the other rows; it moves from block to block by itself, and leaves when it is done.

Shape suffixes: B = batch rows, L = tokens of a row, M = masked positions that are read (of
all rows), V = vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import nn

from torchtitan_ext import errors
from torchtitan_ext.backbones import Backbone
from torchtitan_ext.decoding import autoregressive
from torchtitan_ext.decoding.block_diffusion import choose, select_confident
from torchtitan_ext.decoding.interface import (
    Generation,
    OnStep,
    OnToken,
    check_mask_id,
    row_seeds,
)
from torchtitan_ext.decoding.rotary import step_rotary
from torchtitan_ext.decoding.rows import Row
from torchtitan_ext.decoding.sampling import GREEDY, SamplingParams, row_generators
from torchtitan_ext.decoding.trace import Recorder, Trace
from torchtitan_ext.errors import UserError

Policy = Literal["one_token", "threshold", "entropy"]
Prediction = Literal["own", "shifted"]
Comparison = Literal["strict", "inclusive"]
AfterStop = Literal["drop", "reveal"]

DEFAULT_TAU: dict[Policy, float] = {"one_token": 0.0, "threshold": 0.9, "entropy": 0.5}
"""TDLM section 3.1: confidence as Fast-dLLM, entropy (nats) as d3LLM; ``one_token`` has none."""


class TemporalMemory(Protocol):
    """What the model remembers of earlier forwards of a batch.

    It goes to the model as ``temporal``, which reads and extends it in every forward. The
    loop tells it what it cannot see there: which positions are masked, and which rows are left.
    Rows and positions are those of the batch as it is at that time.
    """

    def begin(self, masked_BL: torch.Tensor) -> None:
        """A new batch, nothing remembered; True at the masks of the responses."""
        ...

    def revealed(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Position ``positions[n]`` of row ``rows[n]`` is no longer masked: drop its history.

        Told before the next forward; the number of a row's revealed tokens grows by its events.
        """
        ...

    def select(self, rows: Sequence[int], length: int) -> None:
        """Keep these rows, in this order, and their first ``length`` positions."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a forward reveals."""

    policy: Policy
    """See :func:`generate`."""

    block_size: int
    """Positions of a block, counted from the start of the response."""

    tau: float
    """Confidence above which ``threshold`` reveals a token, or entropy below which ``entropy`` does."""

    comparison: Comparison = "strict"
    """``strict``: a value equal to tau does not count; ``inclusive``: it does."""

    after_stop: AfterStop = "drop"
    """``reveal``: a row goes on behind its stop token until no mask is left."""

    def __post_init__(self) -> None:
        for name, choices in (("policy", Policy), ("comparison", Comparison), ("after_stop", AfterStop)):
            if getattr(self, name) not in get_args(choices):
                raise errors.unknown(name, getattr(self, name), get_args(choices))
        if self.block_size < 1:
            raise UserError(f"block_size must be at least 1, got {self.block_size}")
        if self.policy == "entropy":
            if not (math.isfinite(self.tau) and self.tau >= 0):
                raise UserError(f"tau of the policy 'entropy' must be 0 or more, got {self.tau}")
        elif not 0 <= self.tau <= 1:
            raise UserError(f"tau must be between 0 and 1, got {self.tau}")

    def select(self, confidence: Sequence[float], entropy: Sequence[float]) -> list[int]:
        """Which of the active block's masked positions are revealed; never none (TDLM Eq. 6)."""
        best = [-value for value in entropy] if self.policy == "entropy" else confidence
        tau = -self.tau if self.policy == "entropy" else self.tau
        passed = []
        if self.policy != "one_token":
            inclusive = self.comparison == "inclusive"
            passed = [i for i, value in enumerate(best) if value > tau or (inclusive and value == tau)]
        return passed or select_confident(best, 1)


def entropies(logits_MV: torch.Tensor, *, mask_id: int) -> torch.Tensor:
    """Entropy of each prediction without the mask token, in nats, fp32 [M]."""
    logprobs_MV = logits_MV.to(torch.float32, copy=True)
    logprobs_MV[:, mask_id] = -math.inf
    logprobs_MV = logprobs_MV.log_softmax(dim=-1)
    return -(logprobs_MV.exp() * logprobs_MV.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    mask_id: int,
    block_size: int,
    prediction: Prediction = "own",
    policy: Policy = "one_token",
    tau: float | None = None,
    comparison: Comparison = "strict",
    after_stop: AfterStop = "drop",
    memory: TemporalMemory | None = None,
    sampling: SamplingParams = GREEDY,
    stop_ids: Collection[int] = (),
    bos_id: int | None = None,
    on_token: OnToken | None = None,
    on_step: OnStep | None = None,
    max_len: int | None = None,
    seeds: Sequence[int] | None = None,
) -> Generation:
    """Denoise ``max_new_tokens`` masks; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    ``policy``: each forward reveals of the active block the most confident masked position
    (``one_token``), all with a confidence above ``tau`` (``threshold``, Fast-dLLM), or all whose
    entropy is below ``tau`` (``entropy``, d3LLM); where there is none, the best one. Confidence
    is the probability of the chosen token, in fp32 and without the mask token.
    ``comparison``: ``strict`` is TDLM Eq. 6, ``inclusive`` also counts a value equal to ``tau``.
    ``prediction``: a position's token is read from its own hidden state, or (``shifted``, Dream)
    from the one before it.
    ``after_stop``: what stands behind the first stop token is never new; ``drop`` ends the row as
    soon as everything up to there is known, ``reveal`` goes on to the last mask.
    ``memory``: goes to every forward as ``temporal``; none: the model is called without it.
    ``Generation.extra["traces"]``: a :class:`Trace` for each row.
    Errors: :class:`UserError` before the first forward for options or prompts that do not fit.
    """
    if policy not in get_args(Policy):
        raise errors.unknown("policy", policy, get_args(Policy))
    rules = Rules(
        policy=policy,
        block_size=block_size,
        tau=DEFAULT_TAU[policy] if tau is None else tau,
        comparison=comparison,
        after_stop=after_stop,
    )
    if prediction not in get_args(Prediction):
        raise errors.unknown("prediction", prediction, get_args(Prediction))
    backbone = _checked_model(model, mask_id)
    context = autoregressive.context_length(backbone)
    starts = autoregressive.checked_prompts(
        prompts,
        vocab_size=backbone.config.vocab_size,
        context=context if max_len is None else min(context, max_len),
        max_new_tokens=max_new_tokens,
        bos_id=bos_id,
    )
    _refuse_masks(starts, mask_id)
    seeds = row_seeds(seeds, rows=len(starts), sampling=sampling)
    rows = [
        _Row(index=i, prompt=prompt, generator=generator, rules=rules, response=[None] * max_new_tokens)
        for i, (prompt, generator) in enumerate(zip(starts, row_generators(seeds), strict=True))
    ]
    run = _Run(backbone, rules, mask_id, prediction, memory, sampling, frozenset(stop_ids), on_token, on_step)
    begin = time.perf_counter()
    with torch.inference_mode(), step_rotary(backbone):
        forwards = run(rows) if rows else 0
    return Generation(
        results=[row.result(forwards=row.forwards) for row in rows],
        forwards=forwards,
        seconds=time.perf_counter() - begin,
        extra={"traces": [row.trace() for row in rows]},
    )


@dataclass(kw_only=True, slots=True)
class _Row(Row):
    """A row while it is being denoised."""

    generator: torch.Generator
    rules: Rules
    response: list[int | None]
    """None is a mask."""

    record: Recorder = field(init=False)
    forwards: int = 0

    def __post_init__(self) -> None:
        self.record = Recorder(len(self.response))

    @property
    def length(self) -> int:
        """Prompt and response."""
        return len(self.prompt) + len(self.response)

    @property
    def done(self) -> bool:
        """Whether the row leaves the batch."""
        return self.finish is not None and (self.rules.after_stop == "drop" or None not in self.response)

    def active(self) -> list[int]:
        """Masked places of the response in the first block that has one."""
        size = self.rules.block_size
        begin = self.response.index(None) // size * size
        block = self.response[begin : begin + size]
        return [begin + place for place, token in enumerate(block) if token is None]

    def reveal(self, places: Sequence[int], tokens: Sequence[int], confidence: Sequence[float]) -> list[int]:
        """Put tokens into places; those that can now be given out, in order."""
        self.forwards += 1
        for place, token, value in zip(places, tokens, confidence, strict=True):
            self.response[place] = token
            self.record.reveal(place, token, step=self.forwards, confidence=value)
        if self.finish is not None:
            return []
        ready = self.response[len(self.new) :]
        first_mask = ready.index(None) if None in ready else len(ready)
        return [token for token in ready[:first_mask] if token is not None]

    def trace(self) -> Trace:
        return self.record.trace(
            policy=self.rules.policy,
            tau=self.rules.tau,
            block_size=self.rules.block_size,
            prompt_tokens=len(self.prompt),
            forwards=self.forwards,
        )


@dataclass(slots=True)
class _Batch:
    """The tensors of the rows that are left."""

    tokens_BL: torch.Tensor
    positions_BL: torch.Tensor
    masks: Any

    @classmethod
    def of(cls, rows: Sequence[_Row], model: Backbone, *, mask_id: int) -> _Batch:
        """Rows side by side, padded on the right; the padding of a row is a document of its own."""
        device = next(model.parameters()).device
        texts = [
            [*row.prompt, *(mask_id if token is None else token for token in row.response)] for row in rows
        ]
        tokens_BL = autoregressive.padded(texts, device=device)
        lengths_B1 = torch.tensor([[row.length] for row in rows], device=device)
        index_L = torch.arange(tokens_BL.shape[1], device=device)
        positions_BL = torch.where(index_L < lengths_B1, index_L, index_L - lengths_B1)
        return cls(tokens_BL, positions_BL, model.get_attention_masks(positions=positions_BL))


@dataclass(slots=True)
class _Run:
    """One call of :func:`generate`."""

    model: Backbone
    rules: Rules
    mask_id: int
    prediction: Prediction
    memory: TemporalMemory | None
    sampling: SamplingParams
    stop_ids: frozenset[int]
    on_token: OnToken | None
    on_step: OnStep | None

    def __call__(self, rows: list[_Row]) -> int:
        """Denoise all rows; the number of forwards."""
        batch = _Batch.of(rows, self.model, mask_id=self.mask_id)
        if self.memory is not None:
            # Prompts hold no mask, and padding is token 0, which may be one.
            lengths_B1 = torch.tensor([[row.length] for row in rows], device=batch.tokens_BL.device)
            index_L = torch.arange(batch.tokens_BL.shape[1], device=batch.tokens_BL.device)
            self.memory.begin((batch.tokens_BL == self.mask_id) & (index_L < lengths_B1))
        forwards = 0
        while True:
            self._step(batch, rows)
            forwards += 1
            kept = [i for i, row in enumerate(rows) if not row.done]
            if not kept:
                return forwards
            if len(kept) < len(rows):
                rows = [rows[i] for i in kept]
                batch = _Batch.of(rows, self.model, mask_id=self.mask_id)
                if self.memory is not None:
                    self.memory.select(kept, batch.tokens_BL.shape[1])

    def _step(self, batch: _Batch, rows: Sequence[_Row]) -> None:
        """One forward, and what it reveals."""
        reads = [row.active() for row in rows]
        where = [(b, len(rows[b].prompt) + place) for b, places in enumerate(reads) for place in places]
        logits_MV = self._logits(batch, where)
        tokens_M, confidence_M = choose(
            logits_MV,
            mask_id=self.mask_id,
            params=self.sampling,
            generators=[rows[b].generator for b, _ in where],
        )
        by_entropy = self.rules.policy == "entropy"
        entropy_M = entropies(logits_MV, mask_id=self.mask_id) if by_entropy else torch.zeros(len(where))
        columns = zip(tokens_M.tolist(), confidence_M.tolist(), entropy_M.tolist(), strict=True)
        events: list[tuple[int, int, int]] = []
        for b, (row, places) in enumerate(zip(rows, reads, strict=True)):
            tokens, confidence, entropy = zip(*(next(columns) for _ in places), strict=True)
            picked = self.rules.select(confidence, entropy)
            self._take(
                row,
                [places[i] for i in picked],
                [tokens[i] for i in picked],
                [confidence[i] for i in picked],
            )
            events += [(b, len(row.prompt) + places[i], tokens[i]) for i in picked]
        self._write(batch, events)

    def _logits(self, batch: _Batch, where: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Logits [M, V] with which the model predicts the given (row, position)."""
        length = batch.tokens_BL.shape[1]
        # The prompt is never empty, so there is a position before each of the response.
        back = 1 if self.prediction == "shifted" else 0
        readout_M = torch.tensor([b * length + p - back for b, p in where], device=batch.tokens_BL.device)
        temporal = {} if self.memory is None else {"temporal": self.memory}
        return self.model(
            batch.tokens_BL,
            positions=batch.positions_BL,
            attention_masks=batch.masks,
            readout_M=readout_M,
            **temporal,
        )[0]

    def _write(self, batch: _Batch, events: Sequence[tuple[int, int, int]]) -> None:
        """Tell the batch and the memory what is revealed: (row, position, token)."""
        rows, positions, tokens = zip(*events, strict=True)
        device = batch.tokens_BL.device
        index = torch.tensor([rows, positions], device=device)
        batch.tokens_BL[index[0], index[1]] = torch.tensor(tokens, device=device)
        if self.memory is not None:
            self.memory.revealed(rows, positions)

    def _take(
        self, row: _Row, places: Sequence[int], tokens: Sequence[int], confidence: Sequence[float]
    ) -> None:
        ready = row.reveal(places, tokens, confidence)
        if self.on_step is not None:
            self.on_step(row.index, len(places))
        row.give(ready, on_token=self.on_token, stop_ids=self.stop_ids, limit=len(row.response))


def _checked_model(model: nn.Module, mask_id: int) -> Backbone:
    """The model, refused if it does not attend in both directions or has no such mask token."""
    if not isinstance(model, Backbone):
        raise UserError(f"{type(model).__name__} is not a backbone; it cannot be decoded by denoising")
    assert isinstance(model.config, Backbone.Config)
    size = model.config.size
    if size.attention != "bidirectional":
        raise UserError(f"backbone {size.family!r} is {size.attention}; denoising needs a bidirectional one")
    check_mask_id(mask_id, vocab_size=model.config.vocab_size)
    return model


def _refuse_masks(prompts: Sequence[Sequence[int]], mask_id: int) -> None:
    for i, prompt in enumerate(prompts):
        if mask_id in prompt:
            raise UserError(f"prompt {i} holds the mask token {mask_id}; only the response is denoised")
