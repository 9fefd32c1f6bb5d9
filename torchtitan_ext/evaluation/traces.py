"""Commit traces of denoising decoders: files, and a picture of when each token was revealed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from torchtitan_ext.decoding.masked_diffusion import Trace
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.plots import check_can_draw
from torchtitan_ext.evaluation.tasks import whole_file

_KEYS = frozenset(Trace.__annotations__)
_LABELLED = 48
"""Positions up to which a picture names each token."""


def write_traces(path: Path, traces: Sequence[Trace]) -> None:
    """Write traces as JSON, one line for each response.

    Errors: UserError when the file cannot be written.
    """
    with whole_file(path) as temporary:
        temporary.write_text("".join(json.dumps(trace) + "\n" for trace in traces), encoding="utf-8")


def read_traces(path: Path) -> list[Trace]:
    """The traces of a file that :func:`write_traces` wrote.

    Errors: UserError for a file that cannot be read or holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    traces = []
    for number, line in enumerate(lines, start=1):
        try:
            trace = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not valid JSON: {error}") from error
        if not isinstance(trace, dict) or set(trace) != _KEYS:
            raise UserError(
                f"{path}, line {number}: not a trace (it has the keys {', '.join(sorted(_KEYS))})"
            )
        traces.append(cast(Trace, trace))
    return traces


def draw_trace(path: Path, trace: Trace, *, texts: Sequence[str] | None = None, title: str = "") -> None:
    """Position against forward as a PNG; a square's colour is the confidence of the token revealed there.

    Grey: what was still masked in that forward. Dotted lines separate the blocks.
    ``texts``: the text of each position's token, shown where there are few of them.
    Errors: UserError when nothing was revealed, for a wrong number of texts, when matplotlib is
    missing or the file cannot be written.
    """
    check_can_draw()
    if not trace["forwards"]:
        raise UserError("a trace without a forward has no picture")
    if texts is not None and len(texts) != len(trace["tokens"]):
        raise UserError(f"got {len(texts)} texts for a response of {len(trace['tokens'])} positions")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    positions, forwards = len(trace["steps"]), trace["forwards"]
    width = min(max(4.8, 0.24 * positions + 1.8), 14.0)
    height = min(max(2.6, 0.24 * forwards + 1.4), 10.0)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        confidence_grid(trace),
        aspect="auto",
        origin="upper",
        cmap="viridis",
        vmin=0.0,
        vmax=1.0,
        extent=(-0.5, positions - 0.5, forwards + 0.5, 0.5),
        interpolation="nearest",
    )
    masked = [[0.6 if here else float("nan") for here in row] for row in masked_grid(trace)]
    axes.imshow(
        masked,
        aspect="auto",
        origin="upper",
        cmap="Greys",
        vmin=0.0,
        vmax=3.0,
        extent=(-0.5, positions - 0.5, forwards + 0.5, 0.5),
        interpolation="nearest",
        zorder=0,
    )
    for edge in range(trace["block_size"], positions, trace["block_size"]):
        axes.axvline(edge - 0.5, color="black", linestyle=":", linewidth=0.8)
    if texts is not None and positions <= _LABELLED:
        axes.set_xticks(range(positions), [_visible(text) for text in texts], fontsize=7, family="monospace")
    axes.set_xlabel("position in the response")
    axes.set_ylabel("forward")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="confidence")
    axes.set_title(title or f"{trace['policy']}: {positions} positions, {forwards} forwards", fontsize=10)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def confidence_grid(trace: Trace) -> list[list[float]]:
    """Forward by position: the confidence where a token was revealed, else NaN."""
    grid = [[float("nan")] * len(trace["steps"]) for _ in range(trace["forwards"])]
    for position, (step, confidence) in enumerate(zip(trace["steps"], trace["confidence"], strict=True)):
        if step is not None and confidence is not None:
            grid[step - 1][position] = confidence
    return grid


def masked_grid(trace: Trace) -> list[list[bool]]:
    """Forward by position: whether it was masked when the forward began and stayed so."""
    forwards = range(1, trace["forwards"] + 1)
    return [[step is None or step > forward for step in trace["steps"]] for forward in forwards]


def _visible(text: str) -> str:
    """Text of one token for a label: blanks and line ends can be seen."""
    return {" ": "\u2423", "\n": "\\n", "\t": "\\t"}.get(text, text)
