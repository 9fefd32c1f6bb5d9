"""A decoder over a grid of its options, on one task: accuracy against what decoding costs.

All settings decode the same samples. They take turns, batch by batch, so that a machine's load
meets all alike.

What a decoder alone can report goes into the table too, by this convention: of ``Generation.extra``
every number under a name that ends in ``_per_token`` is a mean over the new tokens of the batch, and
every other number a mean over the steps of its rows: the lengths of ``passes``, where the decoder has
that list, else the forwards. Other lists and the rest are not looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError
from torch import nn

from torchtitan_ext import progress
from torchtitan_ext.checkpoint.convert import hf_choice, read_choice
from torchtitan_ext.config.toml_writer import describe, from_text
from torchtitan_ext.data.tasks import TextTask
from torchtitan_ext.decoding import Generation
from torchtitan_ext.errors import UserError, unknown
from torchtitan_ext.evaluation import plots, tasks
from torchtitan_ext.evaluation.decode_options import available
from torchtitan_ext.evaluation.decoding import aligned

OPTION = "--sweep"

Cost = Literal["nfe", "gflop", "passes", "seconds"]

COSTS: dict[Cost, str] = {
    "nfe": "forwards per sample (NFE)",
    "gflop": "GFLOP per token",
    "passes": "passes per sample",
    "seconds": "seconds",
}
"""What accuracy is weighed against, in words."""

Grid = dict[str, list[Any]]


# --- the grid --------------------------------------------------------------------------


def parse_grid(text: str, decode: Callable[..., Any]) -> Grid:
    """``tau=0.1,0.4;q=0.3``: the values of each option, with the types of the decoder's signature.

    Errors: UserError for a part that is not key=value,value, a key that the decoder does not take,
    a key or a value that comes twice, and a value of another type.
    """
    hints, grid = available(decode), {}
    for part in text.split(";"):
        key, equals, rest = (piece.strip() for piece in part.partition("="))
        words = [word.strip() for word in rest.split(",")]
        if not (key and equals and all(words)):
            raise UserError(f"{OPTION} {text!r}: got {part.strip()!r}, expected key=value,value;key=value")
        if key not in hints:
            raise unknown(f"key in {OPTION}", key, hints)
        if key in grid:
            raise UserError(f"{OPTION} {text!r}: {key} comes twice")
        grid[key] = [_value(key, word, hints[key]) for word in words]
        twice = next((v for i, v in enumerate(grid[key]) if v in grid[key][:i]), None)
        if twice is not None:
            raise UserError(f"{OPTION} {text!r}: {key} = {twice} comes twice")
    return grid


def _value(key: str, word: str, hint: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_python(from_text(hint, word), strict=True)
    except ValidationError as error:
        raise UserError(f"{OPTION}: {key} is {word!r}, expected {describe(hint)}") from error


def settings_of(grid: Grid) -> list[dict[str, Any]]:
    """Every combination; the last key varies fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def method_of(folder: Path) -> str:
    """The method of a checkpoint or a Hugging Face folder, without loading its weights."""
    if (folder / "config.toml").is_file() or not (folder / "config.json").is_file():
        return read_choice(folder).name
    return hf_choice(folder).name


# --- running ---------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Trial:
    """What one setting made of the samples, as it comes."""

    setting: dict[str, Any]
    options: Mapping[str, Any]
    """The setting, and the options that all have in common."""

    samples: int = 0
    right: int = 0
    new_tokens: int = 0
    forwards: int = 0
    steps: int = 0
    """Forwards that the decoder's own numbers are means over."""

    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    """Of what the decoder reports, each number times what it is a mean over."""

    def add(self, generation: Generation, *, right: int) -> None:
        """A batch, and how many of its final answers are right."""
        forwards = sum(row.forwards for row in generation)
        passes = generation.extra.get("passes")
        steps = forwards if passes is None else sum(len(row) for row in passes)
        for name, value in reported(generation).items():
            weight = generation.new_tokens if name.endswith("_per_token") else steps
            self.sums[name] = self.sums.get(name, 0.0) + value * weight
        self.samples += len(generation)
        self.right += right
        self.new_tokens += generation.new_tokens
        self.forwards += forwards
        self.steps += steps
        self.seconds += generation.seconds


def reported(generation: Generation) -> dict[str, float]:
    """The numbers of a generation's ``extra`` that are not among its own."""
    return {
        name: float(value)
        for name, value in generation.extra.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "tokens_per_forward"
    }


def evaluate(
    model: nn.Module,
    task: TextTask,
    lengths: Sequence[int],
    settings: Sequence[Mapping[str, Any]],
    *,
    text: tasks.TextSetup,
    samples: int = 256,
    batch_size: int = 64,
    seed: int = 0,
    cost: Cost | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[SettingResult]:
    """Every setting on ``samples`` samples of every length, in the order of the settings.

    ``text``: its options hold for all settings. ``cost``: what the Pareto frontier weighs accuracy
    against; None is the first known of GFLOP and forwards.
    ``on_batch``: called with the number of batches done and of all.
    Errors: UserError, before anything is measured, for options that are out of range or given twice,
    lengths that do not fit, and a cost that the decoder does not report.
    """
    trials = [Trial(setting=dict(s), options=tasks.with_options(text, s).options) for s in settings]
    _warm_up(model, task, lengths, trials, text=text, seed=seed, cost=cost)
    batches = tasks.held_out(task, lengths, samples=samples, batch_size=batch_size, seed=seed)
    total = samples * len(lengths) * len(trials)
    with progress.bar(f"{len(trials)} settings", total=total, unit="samples") as bar:
        for number, (one, batch) in enumerate(batches):
            # Every second turn the other way round, so that none always follows the same neighbour.
            for trial in trials[:: -1 if number % 2 else 1]:
                bar.advance(len(batch), tokens=_run(model, one, batch, trial, text=text))
            if on_batch is not None:
                on_batch(number + 1, len(batches))
    results = [SettingResult.of(trial) for trial in trials]
    return mark_frontier(results, cost=cost or default_cost(results))


def _warm_up(
    model: nn.Module,
    task: TextTask,
    lengths: Sequence[int],
    trials: Sequence[Trial],
    *,
    text: tasks.TextSetup,
    seed: int,
    cost: Cost | None,
) -> None:
    """One sample of every length by every setting, unmeasured: also finds what will not work."""
    with progress.bar("trying the settings", total=len(trials), unit="settings") as bar:
        for trial in trials:
            _try_out(model, task, lengths, trial, text=text, seed=seed, cost=cost)
            bar.advance()


def _try_out(
    model: nn.Module,
    task: TextTask,
    lengths: Sequence[int],
    trial: Trial,
    *,
    text: tasks.TextSetup,
    seed: int,
    cost: Cost | None,
) -> None:
    found: list[Generation] = []

    def decode(*args: Any, **kwargs: Any) -> Generation:
        found.append(text.decode(*args, **kwargs))
        return found[-1]

    setup = replace(text, decode=decode, options=trial.options)
    tasks.evaluate_lengths(model, task, lengths, samples=1, batch_size=1, seed=seed, text=setup)
    known = known_costs(reported(found[0]))
    if cost is not None and cost not in known:
        raise UserError(
            f"--cost {cost} is not reported by the decoder of this method (allowed: {', '.join(known)})"
        )


def _run(
    model: nn.Module, task: TextTask, batch: Sequence[Any], trial: Trial, *, text: tasks.TextSetup
) -> int:
    """Decode a batch and count the right final answers, as ``tasks.evaluate_lengths`` does; new tokens."""
    generation, _ = tasks.decode_samples(model, batch, text=replace(text, options=trial.options))
    said = [text.tokenizer.decode(row.new_tokens) for row in generation]
    right = sum(
        task.final_answer(answer) == task.final_answer(sample["answer"])
        for answer, sample in zip(said, batch, strict=True)
    )
    trial.add(generation, right=right)
    return generation.new_tokens


# --- results ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingResult:
    """What one setting came to."""

    setting: dict[str, Any]
    """The swept options and their values."""

    samples: int
    accuracy: float
    """Share of samples whose final answer is right."""

    standard_error: float
    """Of the accuracy over samples."""

    tokens_per_forward: float
    """New tokens for each row's forwards, the prompt's included."""

    forwards_per_sample: float
    """NFE, the prompt's forward included."""

    steps_per_sample: float
    """Of what the decoder's own numbers are means over."""

    seconds: float
    """Of all samples, in batches."""

    reported: dict[str, float]
    """What the decoder reports besides; see the convention above."""

    frontier: bool = False
    """Whether no other setting is as accurate at less cost, or more accurate at no more."""

    @classmethod
    def of(cls, trial: Trial) -> SettingResult:
        """The means."""
        accuracy = trial.right / trial.samples
        per = {name: trial.new_tokens if name.endswith("_per_token") else trial.steps for name in trial.sums}
        return cls(
            setting=trial.setting,
            samples=trial.samples,
            accuracy=accuracy,
            standard_error=math.sqrt(accuracy * (1 - accuracy) / trial.samples),
            tokens_per_forward=trial.new_tokens / trial.forwards,
            forwards_per_sample=trial.forwards / trial.samples,
            steps_per_sample=trial.steps / trial.samples,
            seconds=trial.seconds,
            reported={name: total / per[name] for name, total in trial.sums.items()},
        )

    def cost(self, cost: Cost) -> float:
        """What it costs, in the unit of :data:`COSTS`."""
        match cost:
            case "nfe":
                return self.forwards_per_sample
            case "gflop":
                return self.reported["gflop_per_token"]
            case "passes":
                return self.reported["mean_passes"] * self.steps_per_sample
            case "seconds":
                return self.seconds

    def record(self) -> dict[str, Any]:
        """Flat plain data: the options, then the numbers."""
        shown = {
            name: getattr(self, name)
            for name in ("samples", "accuracy", "standard_error", "tokens_per_forward", "forwards_per_sample")
        }
        if "passes" in known_costs(self.reported):
            shown["passes_per_sample"] = self.cost("passes")
        return {**self.setting, **shown, **self.reported, "seconds": self.seconds, "frontier": self.frontier}


def known_costs(reported: Mapping[str, float]) -> list[Cost]:
    """The costs that a decoder with these numbers has."""
    needs = {"gflop": "gflop_per_token", "passes": "mean_passes"}
    return [cost for cost in get_args(Cost) if cost not in needs or needs[cost] in reported]


def default_cost(results: Sequence[SettingResult]) -> Cost:
    """GFLOP where every setting has them, else forwards."""
    return "gflop" if all("gflop" in known_costs(result.reported) for result in results) else "nfe"


def mark_frontier(results: Sequence[SettingResult], *, cost: Cost) -> list[SettingResult]:
    """The results, with those marked that no other one dominates."""
    points = [(result.cost(cost), -result.accuracy) for result in results]
    return [
        replace(result, frontier=not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points))
        for result, (x, y) in zip(results, points, strict=True)
    ]


# --- what comes out --------------------------------------------------------------------

HEADS = {
    "accuracy": ("accuracy", ".2%"),
    "standard_error": ("+-", ".2%"),
    "tokens_per_forward": ("tokens/forward", ".3f"),
    "forwards_per_sample": ("forwards/sample", ".2f"),
    "tokens_per_step": ("tokens/step", ".3f"),
    "passes_per_sample": ("passes/sample", ".2f"),
    "mean_passes": ("passes/step", ".3f"),
    "path_layers": ("layers/step", ".2f"),
    "layer_evaluations_per_token": ("layers/token", ".2f"),
    "gflop_per_token": ("GFLOP/token", ".4g"),
    "prefill_gflop_per_token": ("of it prompt", ".4g"),
    "seconds": ("seconds", ".2f"),
}
"""Head and format of a column; what is not here is shown under its own name."""


def table(results: Sequence[SettingResult]) -> str:
    """Aligned lines: a head, and one for each setting; ``*`` marks the Pareto frontier."""
    records = [result.record() for result in results]
    keys = list(results[0].setting)
    names = [name for name in records[0] if name not in (*keys, "samples", "frontier")]
    lines = [[*keys, *(HEADS.get(name, (name, ""))[0] for name in names), "frontier"]]
    for record in records:
        cells = [format(record[name], HEADS.get(name, ("", ".4g"))[1]) for name in names]
        lines.append([*(shown(record[key]) for key in keys), *cells, "*" if record["frontier"] else ""])
    return aligned(lines)


def shown(value: Any) -> str:
    """An option's value as a user writes it."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def show_progress(done: int, count: int) -> None:
    """One line on stderr, where no bar can say it."""
    progress.plain_line(f"{done} of {count} batches")


def draw(path: Path, results: Sequence[SettingResult], *, cost: Cost, title: str) -> None:
    """Accuracy against the cost: a curve for each value of the first option, the others at its points.

    Values of a single option form one curve, joined where they are numbers and so have an order.
    """
    first, *others = results[0].setting
    single = not others
    curves: dict[str, list[plots.FrontierPoint]] = {}
    for result in results:
        name = first if single else f"{first} = {shown(result.setting[first])}"
        label = ", ".join(shown(result.setting[key]) for key in others or [first])
        point = plots.FrontierPoint(result.cost(cost), result.accuracy, label, result.frontier)
        curves.setdefault(name, []).append(point)
    varied = first if single else others[0]
    plots.draw_frontier(
        path,
        curves,
        joined=any(type(result.setting[varied]) in (int, float) for result in results),
        labels_are="" if single else ", ".join(others),
        cost_is=COSTS[cost],
        title=title,
    )
