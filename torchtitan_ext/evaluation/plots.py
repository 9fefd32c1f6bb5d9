"""Pictures of results. matplotlib is only needed to draw one."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.tasks import LengthResult, whole_file


def check_can_draw() -> None:
    """Errors: UserError when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('a picture needs matplotlib: pip install "torchtitan-ext[eval]"')


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
            axes.plot(lengths, [100 * getattr(r, key) for r in results], marker=".", label=name)
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
