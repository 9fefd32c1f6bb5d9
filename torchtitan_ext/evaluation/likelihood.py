"""Log-likelihood of continuations under a model of any method.

Methods whose clean tokens attend causally give it in one forward: each token is read where its
predecessor stands, from the deepest pass of a recurrent core. Methods that fill masks (mdlm, tdlm,
and block diffusion whose clean tokens see their whole block) give a Monte Carlo estimate of a lower
bound: of the n tokens of a unit (the continuation; for blocks, its part in each block) l are
hidden, l uniform in 1 to n, and the sum of their log-probabilities is weighted with n / l. Its mean
over the draws is exact for n = 1. TDLM's forwards remember nothing, as the first of a response: only
with the window "current" do its temporal modules change the estimate. Source: LLaDA (Nie et al.,
2025), the form of its bound with a fixed number of masks.

Shape suffixes: B = rows of a forward, L = tokens of a row, E = positions of a row as the model sees
it, D = model dimension, M = tokens that are scored (of all rows), V = vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder as TitanDecoder

from torchtitan_ext import attention, masks, registry
from torchtitan_ext.decoding.autoregressive import context_length, headless, padded
from torchtitan_ext.errors import UserError

HEAD_ROWS = 512
"""Tokens whose logits are held at the same time."""

Kind = Literal["causal", "denoising", "blocks"]
Recurrence = Literal["exact", "trained"]


class Pair(NamedTuple):
    """What is scored."""

    context: Sequence[int]
    """At least one token."""

    continuation: Sequence[int]
    """At least one token."""


class Score(NamedTuple):
    """Of one pair."""

    nats: float
    """Log-probability of the continuation, or the estimate of its bound."""

    greedy: bool
    """Whether greedy decoding says the continuation; always False for an estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """How the Monte Carlo estimate is made."""

    samples: int = 32
    """Forwards for each pair."""

    seed: int = 0
    """The draws of a pair depend on this and its tokens alone, not on the batch it is in."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"the number of Monte Carlo samples must be at least 1, got {self.samples}")


def kind_of(model: nn.Module) -> Kind:
    """How the model gives a likelihood."""
    config: Any = model.config
    if getattr(config, "prediction", None) is not None:
        return "denoising"
    return "blocks" if getattr(config, "clean_attention", "causal") == "block" else "causal"


def longest(model: nn.Module, *, default: int = 2048) -> int:
    """Most tokens of a row, not counting pauses; ``default`` for models without a limit."""
    if not isinstance(model, TitanDecoder):
        return default
    return context_length(model) // (1 + getattr(model.config, "pause_tokens", 0))


def scores(
    model: nn.Module,
    pairs: Sequence[Pair],
    *,
    method: str,
    batch_size: int,
    draws: Draws | None = None,
    recurrence: Recurrence = "exact",
    on_rows: Callable[[int], None] | None = None,
) -> list[Score]:
    """The score of each pair, in their order; ``batch_size`` rows a forward, sorted by length.

    ``recurrence``: whether T2MLR iterates to the exact recurrence, as in decoding, or as deep as in
    training. ``on_rows``: called with the number of rows after each forward.
    Errors: UserError for a pair without a context or a continuation, or longer than the model's context.
    """
    kind = kind_of(model)
    _check(pairs, limit=longest(model) + (kind == "causal"))
    if kind == "causal":
        return _causal(model, pairs, batch_size=batch_size, recurrence=recurrence, on_rows=on_rows)
    estimate = _Estimate(model, method=method, kind=kind, draws=draws or Draws())
    return estimate(pairs, batch_size=batch_size, on_rows=on_rows)


def _check(pairs: Sequence[Pair], *, limit: int) -> None:
    for i, (context, continuation) in enumerate(pairs):
        if not context or not continuation:
            missing = "continuation" if context else "context"
            raise UserError(f"pair {i} has no {missing}, so there is nothing to score")
        if len(context) + len(continuation) > limit:
            raise UserError(
                f"pair {i} has {len(context)} + {len(continuation)} tokens, the model scores at most {limit}"
            )


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices, the longest first, so that what does not fit into memory is met at once."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return (order[i : i + size] for i in range(0, len(order), size))


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


# --- one causal forward ----------------------------------------------------------------


@torch.inference_mode()
def _causal(
    model: nn.Module,
    pairs: Sequence[Pair],
    *,
    batch_size: int,
    recurrence: Recurrence,
    on_rows: Callable[[int], None] | None,
) -> list[Score]:
    found: list[Score | None] = [None] * len(pairs)
    for batch in _batches([len(c) + len(t) for c, t in pairs], batch_size):
        rows = [[*pairs[i].context, *pairs[i].continuation][:-1] for i in batch]
        targets = [list(pairs[i].continuation) for i in batch]
        hidden_BLD = _hidden(model, padded(rows, device=_device_of(model)), recurrence=recurrence)
        hidden_MD = torch.cat(
            [
                hidden_BLD[b, len(row) - len(target) : len(row)]
                for b, (row, target) in enumerate(zip(rows, targets, strict=True))
            ]
        )
        logprob_M, best_M = _read(model, hidden_MD, [token for target in targets for token in target])
        counts = [len(target) for target in targets]
        parts = zip(batch, logprob_M.split(counts), best_M.split(counts), strict=True)
        for i, logprobs, best in parts:
            found[i] = Score(float(logprobs.sum()), bool(best.all()))
        if on_rows is not None:
            on_rows(len(batch))
    return [score for score in found if score is not None]


def _hidden(model: Any, tokens_BL: torch.Tensor, *, recurrence: Recurrence) -> torch.Tensor:
    """What the head reads behind each token, [B, L, D]; rows are padded on the right, which none sees."""
    pauses = getattr(model.config, "pause_tokens", 0)
    tokens_BE = tokens_BL
    if pauses:
        pause_BL = torch.full_like(tokens_BL, model.config.pause_token_id)
        tokens_BE = torch.stack([tokens_BL, *([pause_BL] * pauses)], dim=-1).flatten(1)
    positions_BE = torch.arange(tokens_BE.shape[1], device=tokens_BE.device).expand_as(tokens_BE).contiguous()
    mask = None
    if isinstance(model, TitanDecoder):
        mask = attention.build_mask(masks.causal_document(positions_BE), "dense")
    deep = getattr(model, "exact", None) if recurrence == "exact" else None
    with headless(model), deep(tokens_BE.shape[1]) if deep is not None else contextlib.nullcontext():
        return model(tokens_BE, positions=positions_BE, attention_masks=mask)[:, pauses :: 1 + pauses]


def _read(model: Any, hidden_MD: torch.Tensor, targets: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target in fp32, and whether it is the most probable token, both [M]."""
    target_M = torch.tensor(targets, device=hidden_MD.device)
    pause = getattr(model.config, "pause_token_id", None)
    logprobs, best = [], []
    for part_MD, part_M in zip(hidden_MD.split(HEAD_ROWS), target_M.split(HEAD_ROWS), strict=True):
        # [1, M, D], as the head sees it in training.
        logits_MV = model.lm_head(part_MD[None])[0].float()
        if pause is not None:
            logits_MV[:, pause] = float("-inf")  # never a text's next token
        logprobs.append(logits_MV.log_softmax(dim=-1).gather(-1, part_M[:, None])[:, 0])
        best.append(logits_MV.argmax(dim=-1) == part_M)
    return torch.cat(logprobs), torch.cat(best)


# --- an estimate from masked forwards --------------------------------------------------


class _Row(NamedTuple):
    """One draw of one pair."""

    pair: int
    hidden: list[int]
    """Places of the row that are hidden."""

    weights: list[float]
    """n / l of each."""


def generator_for(tokens: Iterable[int], *, seed: int) -> torch.Generator:
    """A generator whose numbers depend on a seed and on tokens, nothing else."""
    digest = hashlib.sha256(f"{seed}:{','.join(map(str, tokens))}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def hide(
    units: Sequence[Sequence[int]], *, samples: int, generator: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    """Which places each sample hides, and their weights n / l.

    Each l is uniform in 1 to n; the samples of a unit are spread evenly over that range from one
    random start, which leaves the mean as it is and lowers the variance.
    """
    drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in range(samples)]
    for unit in units:
        count = len(unit)
        start = int(torch.randint(count, (), generator=generator))
        for j, (places, weights) in enumerate(drawn):
            chosen = 1 + (start + j * count // samples) % count
            order = torch.randperm(count, generator=generator)[:chosen].tolist()
            places += [unit[place] for place in sorted(order)]
            weights += [count / chosen] * chosen
    return drawn


class _Estimate:
    """Log-likelihood bounds of a model that fills masks."""

    def __init__(self, model: Any, *, method: str, kind: Kind, draws: Draws) -> None:
        self.model, self.kind, self.draws = model, kind, draws
        self.mask_id: int = model.config.mask_token_id
        self.back = 1 if getattr(model.config, "prediction", "own") == "shifted" else 0
        package = registry.method(method).__name__
        self.memory_of = None
        if getattr(model.config, "temporal", None) is not None:
            self.memory_of = importlib.import_module(f"{package}.decode").memory_of

    @torch.inference_mode()
    def __call__(
        self, pairs: Sequence[Pair], *, batch_size: int, on_rows: Callable[[int], None] | None
    ) -> list[Score]:
        texts = [[*context, *continuation] for context, continuation in pairs]
        rows = [
            _Row(i, places, weights)
            for i, pair in enumerate(pairs)
            for places, weights in hide(
                self._units(pair),
                samples=self.draws.samples,
                generator=generator_for(texts[i], seed=self.draws.seed),
            )
        ]
        sums = [0.0] * len(pairs)
        for batch in _batches([len(texts[row.pair]) for row in rows], batch_size):
            chosen = [rows[i] for i in batch]
            for row, value in zip(chosen, self._forward(chosen, texts), strict=True):
                sums[row.pair] += value
            if on_rows is not None:
                on_rows(len(batch))
        return [Score(value / self.draws.samples, False) for value in sums]

    def _units(self, pair: Pair) -> list[list[int]]:
        """Places of the continuation: all together, or block by block."""
        places = range(len(pair.context), len(pair.context) + len(pair.continuation))
        if self.kind == "denoising":
            return [list(places)]
        units: dict[int, list[int]] = {}
        for place in places:
            units.setdefault(place // self.model.config.block_size, []).append(place)
        return list(units.values())

    def _forward(self, rows: Sequence[_Row], texts: Sequence[Sequence[int]]) -> list[float]:
        """Weighted log-probability of what each row hides."""
        device = _device_of(self.model)
        clean_BL = padded([texts[row.pair] for row in rows], device=device)
        hidden_BL = torch.zeros_like(clean_BL, dtype=torch.bool)
        for b, row in enumerate(rows):
            hidden_BL[b, row.hidden] = True
        lengths_B1 = torch.tensor([[len(texts[row.pair])] for row in rows], device=device)
        index_L = torch.arange(clean_BL.shape[1], device=device)
        # The padding of a row is a document of its own.
        positions_BL = torch.where(index_L < lengths_B1, index_L, index_L - lengths_B1)
        masked_BL = clean_BL.masked_fill(hidden_BL, self.mask_id)
        states_BLD = self._states(clean_BL, masked_BL, positions_BL, hidden_BL)
        where_M = (hidden_BL.flatten().nonzero()[:, 0] - self.back).to(device)
        logprob_M, _ = _read(self.model, states_BLD.flatten(0, 1)[where_M], clean_BL[hidden_BL].tolist())
        weight_M = torch.tensor([w for row in rows for w in row.weights], device=device)
        counts = [len(row.hidden) for row in rows]
        return [float(part.sum()) for part in (logprob_M * weight_M).split(counts)]

    def _states(
        self,
        clean_BL: torch.Tensor,
        masked_BL: torch.Tensor,
        positions_BL: torch.Tensor,
        hidden_BL: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states of the masked sequence, [B, L, D]."""
        model, extra = self.model, {}
        tokens, positions = masked_BL, positions_BL
        if self.kind == "blocks":
            tokens, positions = torch.cat([clean_BL, masked_BL], dim=1), positions_BL.repeat(1, 2)
        if self.memory_of is not None and (memory := self.memory_of(model)) is not None:
            # The first forward of a response: nothing is remembered yet.
            memory.begin(hidden_BL)
            extra["temporal"] = memory
        with headless(model):
            states = model(
                tokens, positions=positions, attention_masks=model.get_attention_masks(positions), **extra
            )
        return states[:, -clean_BL.shape[1] :]
