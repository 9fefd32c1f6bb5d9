"""In which pass of a step a looped decoder commits each kind of token (ALoDLM).

What is counted are the new tokens up to the first stop token, right or wrong, each with the pass that
filled its slot and with the halt probability that its slot had after the first pass of that step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from torchtitan_ext import progress
from torchtitan_ext.data.tasks import TextTask
from torchtitan_ext.decoding import Generation
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import plots, sweep, tasks
from torchtitan_ext.evaluation.decoding import aligned

OPTION = "--depths"

Kind = Literal["digit", "first digit", "inner digit", "last digit", "only digit", "sign", "space", "other",
               "end of text", "all"]  # fmt: skip
"""Rows of the table. The digits by their place in the number are digits once more."""

ORDER: tuple[Kind, ...] = (
    "digit", "only digit", "first digit", "inner digit", "last digit", "sign", "space", "other",
    "end of text", "all",
)  # fmt: skip

PLACES = frozenset({"only digit", "first digit", "inner digit", "last digit"})

SIGNS = frozenset("+-\u2212")


# --- kinds -----------------------------------------------------------------------------


def kind_of(text: str | None) -> Kind:
    """Kind of one token by its text; None is the end of text. Blanks around a word do not count."""
    if text is None:
        return "end of text"
    word = text.strip()
    if not word:
        return "space" if text else "other"
    if word.isdecimal():
        return "digit"
    return "sign" if word in SIGNS else "other"


def places_of(texts: Sequence[str | None]) -> list[Kind | None]:
    """Where in its number each token of digits stands, None for the others.

    A number is a run of tokens of digits without a blank between them; "only" one is a number by itself.
    """
    digits = [kind_of(text) == "digit" for text in texts]

    def joined(left: int) -> bool:
        """Whether this token and the next belong to one number."""
        if left < 0 or left + 1 >= len(texts) or not (digits[left] and digits[left + 1]):
            return False
        a, b = texts[left], texts[left + 1]
        return a is not None and b is not None and a == a.rstrip() and b == b.lstrip()

    names: dict[tuple[bool, bool], Kind] = {
        (False, False): "only digit",
        (False, True): "first digit",
        (True, True): "inner digit",
        (True, False): "last digit",
    }
    return [names[joined(i - 1), joined(i)] if here else None for i, here in enumerate(digits)]


# --- counting --------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Passes and halt probabilities of the tokens of each kind, as they come."""

    depths: dict[Kind, list[int]] = field(default_factory=dict)
    hazards: dict[Kind, list[float]] = field(default_factory=dict)

    def add(self, texts: Sequence[str | None], depths: Sequence[int], hazards: Sequence[float]) -> None:
        """The new tokens of one row."""
        rows = zip(texts, places_of(texts), depths, hazards, strict=True)
        for text, place, depth, hazard in rows:
            for kind in (kind_of(text), "all", *([place] if place is not None else [])):
                self.depths.setdefault(kind, []).append(depth)
                self.hazards.setdefault(kind, []).append(hazard)

    def add_generation(self, generation: Generation, *, tokenizer: Any, stop_ids: Collection[int]) -> None:
        """All rows of a batch."""
        extra = generation.extra
        for row, depths, hazards in zip(generation, extra["depths"], extra["first_hazards"], strict=True):
            texts = [
                None if token in stop_ids else tokenizer.decode([token], skip_special_tokens=False)
                for token in row.new_tokens
            ]
            self.add(texts, depths, hazards)

    def results(self, *, passes: int, setting: Mapping[str, Any]) -> list[KindResult]:
        """The kinds that have tokens, in the order of :data:`ORDER`."""
        return [
            KindResult(
                setting=dict(setting),
                kind=kind,
                tokens=len(found),
                mean_pass=sum(found) / len(found),
                shares=[found.count(depth) / len(found) for depth in range(1, passes + 1)],
                first_hazard=sum(self.hazards[kind]) / len(found),
            )
            for kind in ORDER
            if (found := self.depths.get(kind))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class KindResult:
    """The tokens of one kind under one setting of the decoder."""

    setting: dict[str, Any]
    """Options that vary, and their values."""

    kind: Kind
    tokens: int
    """How many were committed."""

    mean_pass: float
    """In which they were, from 1."""

    shares: list[float]
    """Of them in pass 1, 2, ..., K."""

    first_hazard: float
    """Mean halt probability of their slots after the first pass of the step that committed them."""

    def record(self) -> dict[str, Any]:
        """Flat plain data."""
        shares = {f"pass_{depth}": share for depth, share in enumerate(self.shares, start=1)}
        shown = {"kind": self.kind, "tokens": self.tokens, "mean_pass": self.mean_pass}
        return {**self.setting, **shown, **shares, "first_hazard": self.first_hazard}


def passes_of(model: nn.Module, *, method: str) -> int:
    """Passes that a step may have, K. Errors: UserError for a model whose decoder has no passes to choose."""
    config: Any = getattr(model, "config", None)
    passes = getattr(config, "passes", 1)
    if passes < 2 or getattr(config, "position_penalty", None) is None:
        raise UserError(
            f"{OPTION} needs a decoder that commits tokens in several passes of a step (alodlm with "
            f"passes > 1); this checkpoint is {method!r}" + (" with passes = 1" if method == "alodlm" else "")
        )
    return passes


def evaluate(
    model: nn.Module,
    task: TextTask,
    lengths: Sequence[int],
    settings: Sequence[Mapping[str, Any]],
    *,
    method: str,
    text: tasks.TextSetup,
    samples: int = 256,
    batch_size: int = 64,
    seed: int = 0,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[KindResult]:
    """The kinds of all settings, in the order of the settings, over all lengths together.

    ``samples``: of every length, the same for every setting. ``text``: its options hold for all
    settings. ``on_batch``: called with the number of batches done and of all.
    Errors: UserError, before anything is decoded, for a decoder without depths, and before anything
    is counted for lengths that do not fit and options out of range.
    """
    passes = passes_of(model, method=method)
    setups = [tasks.with_options(text, setting) for setting in settings]
    for setup in setups:  # finds what will not work
        tasks.evaluate_lengths(model, task, lengths, samples=1, batch_size=1, seed=seed, text=setup)
    tallies = [Tally() for _ in settings]
    batches = tasks.held_out(task, lengths, samples=samples, batch_size=batch_size, seed=seed)
    total = samples * len(lengths) * len(settings)
    with progress.bar("depths", total=total, unit="samples") as bar:
        for number, (_, batch) in enumerate(batches):
            for setup, tally in zip(setups, tallies, strict=True):
                generation, _ = tasks.decode_samples(model, batch, text=setup)
                tally.add_generation(generation, tokenizer=text.tokenizer, stop_ids=text.stop_ids)
                bar.advance(len(batch), tokens=generation.new_tokens)
            if on_batch is not None:
                on_batch(number + 1, len(batches))
    pairs = zip(tallies, settings, strict=True)
    return [one for tally, setting in pairs for one in tally.results(passes=passes, setting=setting)]


# --- what comes out --------------------------------------------------------------------


def by_setting(results: Sequence[KindResult]) -> dict[str, list[KindResult]]:
    """The results of each setting, under its options in words; "" where none vary."""
    groups: dict[str, list[KindResult]] = {}
    for result in results:
        words = (f"{key} = {sweep.shown(value)}" for key, value in result.setting.items())
        groups.setdefault(", ".join(words), []).append(result)
    return groups


def table(results: Sequence[KindResult]) -> str:
    """Aligned lines for each setting: its options, a head, and one for each kind of token."""
    parts = []
    for name, group in by_setting(results).items():
        passes = range(1, len(group[0].shares) + 1)
        lines = [["kind", "tokens", "mean pass", *(f"pass {depth}" for depth in passes), "hazard 1"]]
        for one in group:
            shown = ("  " if one.kind in PLACES else "") + one.kind
            shares = [f"{share:.1%}" for share in one.shares]
            lines.append([shown, str(one.tokens), f"{one.mean_pass:.3f}", *shares, f"{one.first_hazard:.3f}"])
        parts.append((f"{name}\n" if name else "") + aligned(lines))
    return "\n\n".join(parts)


def draw(path: Path, results: Sequence[KindResult], *, title: str = "") -> None:
    """A panel for each setting: for each kind of token a bar, in parts by pass, as a PNG.

    Errors: UserError when matplotlib is missing or the file cannot be written.
    """
    plots.check_can_draw()
    import matplotlib
    from matplotlib.figure import Figure

    groups = by_setting(results)
    bars = sum(len(group) for group in groups.values())
    figure = Figure(figsize=(7.2, 0.3 * bars + 0.62 * len(groups) + 1.5), layout="constrained")
    heights = [len(group) + 0.6 for group in groups.values()]
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    passes = len(results[0].shares)
    # Neither end of the scale: labels would vanish in one, edges in the other.
    colours = [matplotlib.colormaps["viridis"](0.12 + 0.8 * i / max(passes - 1, 1)) for i in range(passes)]
    for axes, (name, group) in zip(panels, groups.items(), strict=True):
        _draw_bars(axes, group, colours)
        axes.set_title(name, fontsize=9, loc="left")
    panels[-1].set_xlabel("share of the tokens committed in each pass (%)")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=min(passes, 8))
    if title:
        figure.suptitle(title, fontsize=10)
    with tasks.whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _draw_bars(axes: Any, group: Sequence[KindResult], colours: Sequence[Any]) -> None:
    """The bars of one setting; at their right ends the mean pass and the first hazard."""
    places = range(len(group))
    begins = [0.0] * len(group)
    for depth, colour in enumerate(colours, start=1):
        widths = [100 * one.shares[depth - 1] for one in group]
        axes.barh(places, widths, left=begins, height=0.78, color=colour, label=f"pass {depth}")
        for place, begin, width in zip(places, begins, widths, strict=True):
            if width >= 6:  # the number fits
                light = sum(colour[:3]) < 1.35
                axes.text(
                    begin + width / 2,
                    place,
                    f"{width:.0f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if light else "black",
                )
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    for place, one in zip(places, group, strict=True):
        note = f"mean {one.mean_pass:.2f}, hazard {one.first_hazard:.2f}"
        axes.text(101.5, place, note, va="center", fontsize=7, clip_on=False)
    axes.set_yticks(places, [f"{one.kind} ({one.tokens:,})" for one in group], fontsize=8)
    for label, one in zip(axes.get_yticklabels(), group, strict=True):
        label.set_color("dimgrey" if one.kind in PLACES else "black")
    axes.set_ylim(len(group) - 0.5, -0.5)  # the first on top
    axes.set_xlim(0, 100)
    axes.spines[["top", "right"]].set_visible(False)
