"""Decoding strategies side by side on the same prompts (TiDAR, table 4).

Strategies take turns, batch by batch, so that a machine's load meets all alike.

Shape suffixes: L = prompt and new tokens, N = new tokens, D = model dimension, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import csv
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.decoder import Decoder as TitanDecoder

from torchtitan_ext import attention, masks, progress
from torchtitan_ext.checkpoint.load import LoadedModel
from torchtitan_ext.decoding import Decoder, SamplingParams
from torchtitan_ext.decoding.autoregressive import context_length, headless
from torchtitan_ext.decoding.choice import chosen_decoder
from torchtitan_ext.decoding.strategies import Strategy, parse
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.prompts import Prompt
from torchtitan_ext.evaluation.tasks import whole_file

GRAM = 4
"""Tokens of the pieces whose repetition is counted."""

WARM_UP = 4
"""New tokens of each strategy's first decoding, which is not measured."""


# --- measures --------------------------------------------------------------------------


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of the runs of four tokens that occur earlier in the same text: 1 - different / all.

    0: no run comes twice. None for a text of fewer than four tokens.
    Source: seq-rep-4 of Welleck et al., 2020.
    """
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens before the first difference, or before the shorter ends."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def matches(new: Sequence[int], truth: Sequence[int]) -> tuple[int, int]:
    """(equal tokens at the same place, places that both have)."""
    pairs = list(zip(new, truth, strict=False))
    return sum(a == b for a, b in pairs), len(pairs)


def has_causal_pass(model: nn.Module) -> bool:
    """Whether one causal forward over a text predicts each next token.

    Not for backbones that attend in both directions, for clean tokens that see their whole block
    (none predicts what it sees), and for models that put pauses between tokens.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(model, TitanDecoder) or getattr(config, "pause_tokens", 0):
        return False
    size = getattr(config, "size", None)
    causal = size is None or size.attention == "causal"
    return causal and getattr(config, "clean_attention", "causal") == "causal"


@torch.inference_mode()
def text_nats(model: nn.Module, prompt: Sequence[int], new: Sequence[int]) -> float:
    """Negative log-likelihood of ``new`` behind ``prompt`` under the model's causal pass, in nats.

    The same judge for every strategy of a model: its autoregressive logits at temperature 1.
    """
    assert isinstance(model, TitanDecoder)
    device = next(model.parameters()).device
    tokens_1L = torch.tensor([[*prompt, *new]], device=device)
    positions_1L = torch.arange(tokens_1L.shape[1], device=device)[None]
    mask = attention.build_mask(masks.causal_document(positions_1L), "dense")
    # A model that approximates a recurrence in training is exact in decoding.
    exactly: Callable[..., Any] = getattr(model, "exact", contextlib.nullcontext)  # pyrefly: ignore
    with headless(model), exactly(tokens_1L.shape[1]):
        hidden_1LD = model(tokens_1L, positions=positions_1L, attention_masks=mask)
    logits_NV = model.lm_head(hidden_1LD[:, len(prompt) - 1 : -1])[0].float()
    return float(torch.nn.functional.cross_entropy(logits_NV, tokens_1L[0, len(prompt) :], reduction="sum"))


# --- running ---------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Trial:
    """What one strategy made of all prompts, as it comes."""

    strategy: Strategy
    decode: Decoder
    new: list[list[int]] = field(default_factory=list)
    """New tokens of each prompt."""

    forwards: list[int] = field(default_factory=list)
    """Forwards of each prompt, the one over the prompt included."""

    accepted: list[list[int]] = field(default_factory=list)
    """Drafts accepted by each forward of each prompt; empty for strategies without drafts."""

    layer_evaluations: list[int] = field(default_factory=list)
    """Tokens x layers of each prompt's answer; empty for decoders that do not count them."""

    seconds: list[float] = field(default_factory=list)
    """Of each batch."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second of each batch."""

    def run(self, model: nn.Module, prompts: Sequence[Prompt], **options: Any) -> int:
        """Decode a batch; the number of new tokens."""
        generation = self.decode(model, [prompt.tokens for prompt in prompts], **options)
        self.new += [list(row.new_tokens) for row in generation]
        self.forwards += [row.forwards for row in generation]
        self.accepted += generation.extra.get("accepted", [])
        self.layer_evaluations += generation.extra.get("layer_evaluations", [])
        self.seconds.append(generation.seconds)
        self.rates.append(generation.tokens_per_second)
        return generation.new_tokens


def parse_strategies(text: str) -> list[Strategy]:
    """Strategies separated by commas.

    Errors: UserError for a name that :func:`strategies.parse` refuses, or one that comes twice.
    """
    found: list[Strategy] = []
    for part in text.split(","):
        strategy = parse(part)
        if strategy in found:
            raise UserError(f"--decode {text!r}: {strategy.name} comes twice")
        found.append(strategy)
    return found


def evaluate(
    loaded: LoadedModel,
    strategies: Sequence[Strategy],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    sampling: SamplingParams,
    on_batch: Callable[[int], None] | None = None,
) -> list[StrategyResult]:
    """Every strategy on every prompt, in the order of the strategies.

    ``on_batch``: called with the number of prompts that are done.
    Errors: UserError, before anything is measured, for strategies that the model cannot follow and
    prompts that do not fit.
    """
    model = loaded.model
    trials = [
        Trial(strategy=strategy, decode=chosen_decoder(strategy, model, method=loaded.method))
        for strategy in strategies
    ]
    check_fits(model, prompts, max_new_tokens=max_new_tokens)
    ending = {"stop_ids": loaded.stop_ids, "bos_id": loaded.tokenizer.bos_id}
    for trial in trials:
        start = [prompts[0].tokens]
        trial.decode(model, start, max_new_tokens=min(WARM_UP, max_new_tokens), sampling=sampling, **ending)
    told = {"max_new_tokens": max_new_tokens, "sampling": sampling, **ending}
    with progress.bar("decoding", total=len(prompts) * len(trials), unit="prompts") as bar:
        for number, begin in enumerate(range(0, len(prompts), batch_size)):
            batch = prompts[begin : begin + batch_size]
            seeds = [sampling.seed + begin + i for i in range(len(batch))]
            # Every second turn the other way round, so that none always follows the same neighbour.
            for trial in trials[:: -1 if number % 2 else 1]:
                bar.advance(len(batch), tokens=trial.run(model, batch, seeds=seeds, **told))
            if on_batch is not None:
                on_batch(begin + len(batch))
    plain = next((trial for trial in trials if trial.strategy.kind == "ar"), None)
    judge = model if has_causal_pass(model) else None
    return [
        StrategyResult.of(trial, prompts, plain=plain, judge=judge, is_greedy=sampling.is_greedy)
        for trial in trials
    ]


def check_fits(model: nn.Module, prompts: Sequence[Prompt], *, max_new_tokens: int) -> None:
    """Errors: UserError when a prompt and its new tokens are longer than the model's context."""
    if not isinstance(model, TitanDecoder):
        return
    longest, context = max(len(prompt.tokens) for prompt in prompts), context_length(model)
    if longest + max_new_tokens > context:
        raise UserError(
            f"{longest} tokens of a prompt and --max-new-tokens {max_new_tokens} are "
            f"{longest + max_new_tokens}, the model's context has {context}"
        )


def reference(model: nn.Module, prompts: Sequence[Prompt]) -> dict[str, float | None] | None:
    """Repetition and nats per token of the true continuations; None where none is known."""
    known = [prompt for prompt in prompts if prompt.continuation]
    if not known:
        return None
    return {
        "repetition": _mean([repetition(prompt.continuation) for prompt in known]),
        "nats_per_token": _nats_per_token(model, known, [prompt.continuation for prompt in known])
        if has_causal_pass(model)
        else None,
    }


# --- results ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyResult:
    """One row of the table."""

    strategy: str
    """The name that :func:`strategies.parse` reads."""

    label: str
    """The name in words."""

    prompts: int
    """How many were decoded."""

    tokens_per_forward: float
    """T/NFE: new tokens of all prompts for all their forwards, those over the prompts included."""

    new_tokens: int
    """Of all prompts."""

    forwards: int
    """Of all prompts; a forward of a batch counts once for each row in it."""

    layer_evaluations_per_token: float | None
    """Tokens x layers behind the prompts for each new token; None where it is not counted."""

    seconds: float
    """Of all batches, the prompts included."""

    tokens_per_second: float
    """New tokens in these seconds."""

    speed_vs_ar: float | None
    """Tokens per second against those of ``ar`` on the same batch, the median over batches."""

    same_as_ar: float | None
    """Share of prompts whose tokens are those of greedy ``ar``, all of them; None when sampling."""

    common_prefix: float | None
    """Tokens before the first that differs from greedy ``ar``'s, mean over prompts."""

    repetition: float | None
    """Of the new tokens (see :func:`repetition`), mean over prompts."""

    low_repetition: float | None
    """The same over the half of the prompts whose texts repeat themselves least."""

    high_repetition: float | None
    """The same over the other half."""

    tokens_per_forward_low: float | None
    """T/NFE of the former half: repetitive text is easy to draft."""

    tokens_per_forward_high: float | None
    """T/NFE of the latter."""

    nats_per_token: float | None
    """Of the new tokens under the model's own causal pass; None for models that have none."""

    accuracy: float | None
    """Share of new tokens that are the document's at the same place; None where it is not known."""

    mean_accepted: float | None
    """Drafts accepted in a forward behind the prompt's, for strategies with drafts."""

    accepted_histogram: dict[int, int] | None
    """How many forwards accepted 1, 2, ... drafts."""

    @classmethod
    def of(
        cls,
        trial: Trial,
        prompts: Sequence[Prompt],
        *,
        plain: Trial | None,
        judge: nn.Module | None,
        is_greedy: bool,
    ) -> StrategyResult:
        """Add up. ``plain``: the trial of ``ar``; ``judge``: the model, if it has a causal pass."""
        pairs = None if plain is None or not is_greedy else list(zip(trial.new, plain.new, strict=True))
        right, places = _sums(matches(new, p.continuation) for new, p in zip(trial.new, prompts, strict=True))
        counts = Counter(count for row in trial.accepted for count in row)
        low, high = split_by_repetition(trial.new)
        new_tokens, seconds = sum(len(new) for new in trial.new), sum(trial.seconds)
        ratios = [] if plain is None else [
            mine / theirs for mine, theirs in zip(trial.rates, plain.rates, strict=True) if theirs > 0
        ]  # fmt: skip
        repetitions = [repetition(new) for new in trial.new]
        return cls(
            strategy=trial.strategy.name,
            label=trial.strategy.label,
            prompts=len(prompts),
            tokens_per_forward=new_tokens / sum(trial.forwards),
            new_tokens=new_tokens,
            forwards=sum(trial.forwards),
            layer_evaluations_per_token=sum(trial.layer_evaluations) / new_tokens
            if trial.layer_evaluations and new_tokens
            else None,
            seconds=seconds,
            tokens_per_second=new_tokens / seconds if seconds > 0 else 0.0,
            speed_vs_ar=statistics.median(ratios) if ratios else None,
            same_as_ar=None if pairs is None else _mean([float(a == b) for a, b in pairs]),
            common_prefix=None if pairs is None else _mean([float(common_prefix(a, b)) for a, b in pairs]),
            repetition=_mean(repetitions),
            low_repetition=_mean([repetitions[i] for i in low]),
            high_repetition=_mean([repetitions[i] for i in high]),
            tokens_per_forward_low=_rate(trial, low),
            tokens_per_forward_high=_rate(trial, high),
            nats_per_token=None if judge is None else _nats_per_token(judge, prompts, trial.new),
            accuracy=right / places if places else None,
            mean_accepted=sum(n * times for n, times in counts.items()) / counts.total() if counts else None,
            accepted_histogram=dict(sorted(counts.items())) if counts else None,
        )


def split_by_repetition(texts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Indices of the half that repeats itself least (one more of an odd number), and of the rest.

    Texts too short to tell are in neither; among equals the earlier ones count as less repetitive.
    """
    known = [(value, i) for i, text in enumerate(texts) if (value := repetition(text)) is not None]
    order = [i for _, i in sorted(known)]
    half = (len(order) + 1) // 2
    return order[:half], order[half:]


def _rate(trial: Trial, rows: Sequence[int]) -> float | None:
    forwards = sum(trial.forwards[i] for i in rows)
    return sum(len(trial.new[i]) for i in rows) / forwards if forwards else None


def _nats_per_token(
    model: nn.Module, prompts: Sequence[Prompt], texts: Sequence[Sequence[int]]
) -> float | None:
    nats = [text_nats(model, p.tokens, new) for p, new in zip(prompts, texts, strict=True) if new]
    return sum(nats) / sum(len(new) for new in texts) if nats else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sums(pairs: Any) -> tuple[int, int]:
    first, second = zip(*pairs, strict=True)
    return sum(first), sum(second)


# --- what comes out --------------------------------------------------------------------

_COLUMNS = (
    ("strategy", "strategy", ""),
    ("T/NFE", "tokens_per_forward", ".2f"),
    ("tokens", "new_tokens", "d"),
    ("forwards", "forwards", "d"),
    ("layers/token", "layer_evaluations_per_token", ".2f"),
    ("seconds", "seconds", ".2f"),
    ("tokens/s", "tokens_per_second", ".1f"),
    ("x ar", "speed_vs_ar", ".2f"),
    ("as ar", "same_as_ar", ".0%"),
    ("prefix", "common_prefix", ".1f"),
    ("repeated", "repetition", ".1%"),
    ("T/NFE low", "tokens_per_forward_low", ".2f"),
    ("T/NFE high", "tokens_per_forward_high", ".2f"),
    ("nats/token", "nats_per_token", ".3f"),
    ("accuracy", "accuracy", ".1%"),
    ("accepted", "mean_accepted", ".2f"),
)
"""Head, field and format; a column without a value in any row is left out."""


def table(results: Sequence[StrategyResult]) -> str:
    """Aligned lines: a head, and one for each strategy."""
    columns = []
    for head, name, form in _COLUMNS:
        values = [getattr(result, name) for result in results]
        if any(value is not None for value in values):
            columns.append([head, *("-" if value is None else format(value, form) for value in values)])
    return aligned(list(zip(*columns, strict=True)))


def describe_reference(truth: Mapping[str, float | None]) -> str:
    """What :func:`reference` found, in one line."""
    shown = [(truth["repetition"], "repeated {:.1%}"), (truth["nats_per_token"], "{:.3f} nats/token")]
    parts = [form.format(value) for value, form in shown if value is not None]
    return f"the documents' own text: {', '.join(parts) or 'too short to tell'}"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells under each other, the first column on the left, the others on the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def write_csv(path: Path, results: Sequence[StrategyResult]) -> None:
    """One line a strategy, with a header; what is not known is empty, the histogram is JSON."""
    rows: list[dict[str, Any]] = [asdict(result) for result in results]
    for row in rows:
        if row["accepted_histogram"] is not None:
            row["accepted_histogram"] = json.dumps(row["accepted_histogram"])
    write_rows(path, rows, names=[field.name for field in fields(StrategyResult)])


def write_rows(path: Path, rows: Sequence[dict[str, Any]], *, names: Sequence[str]) -> None:
    """A CSV file with a header. Errors: UserError when it cannot be written."""
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
