"""Pictures of results. matplotlib is only needed to draw one."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.tasks import LengthResult, whole_file


def check_can_draw() -> None:
    """Errors: UserError when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('a picture needs matplotlib: pip install "torchtitan-ext[eval]"')


def plain(text: str) -> str:
    """Text for matplotlib as it stands, without its middle where it is long.

    Dollars would make formulas, and a name that begins with _ would not come into a legend.
    """
    text = text if len(text) <= 44 else f"{text[:20]}...{text[-21:]}"
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def draw_lengths(
    path: Path,
    curves: Mapping[str, Sequence[LengthResult]],
    *,
    trained_maximum: int | None = None,
    length_is: str = "length",
    title: str = "",
) -> None:
    """Exact match above, token accuracy below, against the length, as a PNG (T2MLR, Figure 4).

    ``curves``: results by name, such as one for each model. A dotted line marks the greatest
    length in training.
    Errors: UserError when matplotlib is missing or the file cannot be written.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 6.0), layout="constrained")
    exact, tokens = figure.subplots(2, 1, sharex=True)
    for axes, key, label in (
        (exact, "exact_match", "exact match"),
        (tokens, "token_accuracy", "token accuracy"),
    ):
        for name, results in curves.items():
            lengths = [result.length for result in results]
            axes.plot(lengths, [100 * getattr(r, key) for r in results], marker=".", label=plain(name))
        if trained_maximum is not None:
            axes.axvline(trained_maximum, color="tab:orange", linestyle=":", label="longest in training")
        axes.set_ylim(-3, 103)
        axes.set_ylabel(f"{label} (%)")
        axes.grid(alpha=0.3)
    tokens.set_xlabel(length_is)
    figure.legend(*exact.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    if title:
        figure.suptitle(title)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


class FrontierPoint(NamedTuple):
    """One setting of a decoder."""

    cost: float
    accuracy: float
    """0 to 1."""

    label: str
    frontier: bool
    """Whether it is on the Pareto frontier."""


def draw_frontier(
    path: Path,
    curves: Mapping[str, Sequence[FrontierPoint]],
    *,
    cost_is: str,
    labels_are: str = "",
    joined: bool = True,
    title: str = "",
) -> None:
    """Accuracy against cost as a PNG; rings and a dashed line mark the Pareto frontier of all curves.

    ``joined``: whether the points of a curve have an order. ``labels_are``: the name of what the labels
    of the points say.
    Errors: UserError when matplotlib is missing or the file cannot be written.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.8, 5.2), layout="constrained")
    axes = figure.subplots()
    colours = {}
    for name, points in curves.items():
        xs, ys = [p.cost for p in points], [100 * p.accuracy for p in points]
        style = "-" if joined else ""
        (line,) = axes.plot(xs, ys, marker="o", markersize=5, linestyle=style, label=name, zorder=3)
        colours[name] = line.get_color()
    best = sorted((p for points in curves.values() for p in points if p.frontier), key=lambda p: p[:2])
    axes.plot(
        [p.cost for p in best],
        [100 * p.accuracy for p in best],
        color="black",
        linestyle="--",
        linewidth=0.9,
        marker="o",
        markersize=11,
        markerfacecolor="none",
        label="Pareto frontier",
        zorder=2,
    )
    axes.margins(0.08, 0.1)
    low, high = axes.get_ylim()
    missing = max(0.0, 2.0 - (high - low))  # so that equal accuracies are not torn apart
    axes.set_ylim(low - missing / 2, high + missing / 2)
    axes.set_xlabel(cost_is)
    axes.set_ylabel("accuracy of the final answer (%)")
    axes.grid(alpha=0.3)
    names = {"title": f"points: {labels_are}"} if labels_are else {}
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, **names)
    if title:
        axes.set_title(title, fontsize=10)
    figure.draw_without_rendering()  # so that the places on the page are known
    for_colour = [(colours[name], points) for name, points in curves.items()]
    _label_points(axes, [(p, colour) for colour, points in for_colour for p in _merged(points)])
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


_AROUND = [(0, 10), (0, -10), (9, 0), (-9, 0), (7, 8), (-7, 8), (7, -8), (-7, -8), (0, 20), (0, -20)]
"""Where a label may stand: offsets from its point, in typographic points, the best first."""


class _Box(NamedTuple):
    """A rectangle on the page, in typographic points."""

    left: float
    bottom: float
    right: float
    top: float

    @classmethod
    def of_label(cls, text: str, dot: Sequence[float], offset: tuple[int, int]) -> _Box:
        """About where a label stands: over, under, or beginning or ending at the side of its point."""
        width, height = 4.6 * len(text) + 2, 9.0
        left = dot[0] + offset[0] - {0: width / 2, -1: width, 1: 0.0}[(offset[0] > 0) - (offset[0] < 0)]
        bottom = dot[1] + offset[1] - height / 2
        return cls(left, bottom, left + width, bottom + height)

    def meets(self, other: _Box) -> bool:
        """Whether two boxes have a point in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top

    def within(self, other: _Box) -> bool:
        """Whether no part is outside the other box."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.bottom <= self.bottom and self.top <= other.top


def _merged(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Points of a curve at the same place become one with all their labels."""
    places: dict[tuple[float, float], FrontierPoint] = {}
    for point in points:
        place = (point.cost, point.accuracy)
        before = places.get(place)
        places[place] = point if before is None else before._replace(label=f"{before.label} / {point.label}")
    return list(places.values())


def _label_points(axes: Any, points: Sequence[tuple[FrontierPoint, Any]]) -> None:
    """Write each label beside its point, where it covers no label before it and fewest points."""
    from matplotlib.patheffects import withStroke

    scale = 72 / axes.figure.dpi
    page = _Box(*(scale * edge for edge in axes.bbox.extents))
    dots = [scale * axes.transData.transform((p.cost, 100 * p.accuracy)) for p, _ in points]
    marks = [_Box(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    taken: list[_Box] = []
    for (point, colour), dot in zip(points, dots, strict=True):
        boxes = {offset: _Box.of_label(point.label, dot, offset) for offset in _AROUND}
        crowded = {
            offset: 2 * sum(map(box.meets, taken)) + sum(map(box.meets, marks)) + 2 * (not box.within(page))
            for offset, box in boxes.items()
        }
        offset = min(crowded, key=crowded.__getitem__)
        taken.append(boxes[offset])
        axes.annotate(
            point.label,
            (point.cost, 100 * point.accuracy),
            xytext=offset,
            textcoords="offset points",
            ha="center" if offset[0] == 0 else "left" if offset[0] > 0 else "right",
            va="center",
            fontsize=8,
            color=colour,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            zorder=4,
        )
