"""The report's own pictures: curves of several runs, each run in one colour throughout."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_ext.evaluation.plots import plain
from torchtitan_ext.evaluation.report import events
from torchtitan_ext.evaluation.report.runs import TOKENS, Run

Axis = Literal["tokens", "steps"]

SIZE, DPI = (5.2, 3.9), 160
"""Inches and dots per inch: letters can be read at the width of a phone."""


FEW = 25
"""An average over so few values would hang behind them: they are drawn as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How curves are drawn."""

    axis: Axis
    smoothing: float
    """Weight of the past, 0 for none."""

    style: Mapping[str, tuple[Any, str]]
    """Colour and line style of each run."""


def look_of(runs: Sequence[Run], *, axis: Axis, smoothing: float) -> Look:
    """Colours for the runs; more than ten also differ in how their lines are dashed."""
    dashes = ("-", "--", ":", "-.")
    style = {run.name: (f"C{i % 10}", dashes[i // 10 % 4]) for i, run in enumerate(runs)}
    return Look(axis=axis, smoothing=smoothing, style=style)


def has_tokens(run: Run) -> bool:
    """Whether the run logged how many tokens it had seen, at two steps or at one after the start."""
    points = [p for p in run.curves.get(TOKENS, []) if math.isfinite(p.value)]
    return any(p.step > 0 for p in points)


def curve(runs: Sequence[Run], tag: str, *, look: Look, title: str) -> bytes | None:
    """A picture of one tag: what was logged pale, its smoothed average strong; None where no run has it."""
    drawn = [(run, run.curves[tag]) for run in runs if run.curves.get(tag)]
    if not any(math.isfinite(p.value) for _, points in drawn for p in points):
        return None
    figure, axes = _figure()
    for run, points in drawn:
        colour, dash = look.style[run.name]
        steps, values = [p.step for p in points], [p.value for p in points]
        xs = events.tokens_at(steps, run.curves[TOKENS]) if look.axis == "tokens" else steps
        mark = "o" if len(points) <= FEW else ""
        if look.smoothing and len(points) > FEW:
            axes.plot(xs, values, dash, color=colour, alpha=0.4, linewidth=0.9)
            values = events.smoothed(values, look.smoothing)
        axes.plot(
            xs, values, dash, color=colour, linewidth=1.6, marker=mark, markersize=3, label=plain(run.name)
        )
    axes.set_xlabel("tokens" if look.axis == "tokens" else "step")
    if len(title) <= 30:  # a longer one would be cut, and stands below the picture anyway
        axes.set_ylabel(plain(title))
    axes.xaxis.set_major_formatter(_short_numbers())
    return _png(figure, axes)


def lengths(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    key: str,
    *,
    colours: Mapping[str, tuple[Any, str]],
    title: str,
    trained: Sequence[int],
) -> bytes:
    """A measure that is a share, in per cent, against the length of a task; dotted: longest in training."""
    figure, axes = _figure()
    for name, rows in curves.items():
        colour, dash = colours[name]
        known = [row for row in rows if isinstance(row.get(key), int | float)]
        xs, ys = [row["length"] for row in known], [100 * row[key] for row in known]
        axes.plot(xs, ys, dash, color=colour, marker=".", label=plain(name))
    for i, length in enumerate(trained):
        axes.axvline(length, color="grey", linestyle=":", label="" if i else "longest in training")
    axes.set_ylim(-3, 103)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("length")
    axes.set_ylabel(plain(f"{title} (%)"))
    return _png(figure, axes)


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any, axes: Any) -> bytes:
    """The picture with a legend below the data, as wide as its names allow."""
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, min(len(names), 4, 54 // (max(map(len, names)) + 6)))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)
    figure.set_figheight(SIZE[1] + 0.2 * (math.ceil(len(names) / columns) - 1))
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def _short_numbers() -> Callable[[float, int], str]:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")
