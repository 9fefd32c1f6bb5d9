"""Commit traces of denoising decoders: files, and a picture of when each token was revealed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import cast

from torch import nn

from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.decoding.interface import Decoder
from torchtitan_ext.decoding.trace import Trace
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.plots import check_can_draw
from torchtitan_ext.evaluation.tasks import whole_file

_KEYS = frozenset(Trace.__annotations__)
_LABELLED = 100
"""Positions up to which a picture names each token."""

_LABEL_SIZE, _LABEL_LENGTH = 7, 16
"""Points of those names, and characters at which they are cut."""

_LABEL_FONT = "DejaVu Sans Mono"
"""Comes with matplotlib."""


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

    Grey: what was still masked after that forward. Dotted lines separate the blocks.
    ``texts``: the text of each position's token, shown up to 100 of them.
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
    labels = [] if texts is None or positions > _LABELLED else [_visible(text) for text in texts]
    width = min(max(4.8, 0.24 * positions + 1.8), 16.0)
    labelled = 0.6 * _LABEL_SIZE / 72 * max(map(len, labels), default=0)
    height = min(max(2.2, 0.24 * forwards + 1.2), 10.0) + labelled
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
    if labels:
        style = {"fontsize": _LABEL_SIZE, "family": _LABEL_FONT, "rotation": 90, "parse_math": False}
        axes.set_xticks(range(positions), labels, **style)
    axes.set_xlabel("position in the response (grey: masked)")
    axes.set_ylabel("forward")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="confidence", fraction=0.05, aspect=30, pad=0.02)
    axes.set_title(title or _described(trace), fontsize=10, parse_math=False)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def check_traced(
    decode: Decoder, model: nn.Module, prompt: Sequence[int], *, what: str, bos_id: int | None = None
) -> None:
    """Errors: UserError for a decoder that records no trace, found by decoding one token.

    ``what``: the decoder's name for the message. ``bos_id``: what an empty prompt starts from.
    """
    if "traces" not in decode(model, [prompt], max_new_tokens=1, bos_id=bos_id).extra:
        raise UserError(
            f"{what} has no trace to draw: only decoders that fill masks (mdlm, tdlm, block_diffusion, "
            "wedlm, alodlm) record when each token was filled"
        )


def texts_of(trace: Trace, tokenizer: Tokenizer) -> list[str]:
    """The text of each position's token by itself; empty where none was revealed."""
    tokens = trace["tokens"]
    return ["" if t is None else tokenizer.decode([t], skip_special_tokens=False) for t in tokens]


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


def _described(trace: Trace) -> str:
    """How the response was decoded, in a line."""
    tau = "" if trace["policy"] == "one_token" else f", tau {trace['tau']:g}"
    tokens = sum(step is not None for step in trace["steps"])
    return f"{trace['policy']}{tau}: {tokens} tokens in {trace['forwards']} forwards"


def _visible(text: str) -> str:
    """Text of one token for a label: blanks can be seen, what the font cannot show is escaped."""
    glyphs = _glyphs()
    shown = "".join(
        c if c.isprintable() and ord(c) in glyphs else c.encode("unicode_escape").decode()
        for c in text.replace(" ", "\u2423")
    )
    return shown if len(shown) <= _LABEL_LENGTH else f"{shown[: _LABEL_LENGTH - 1]}\u2026"


@cache
def _glyphs() -> frozenset[int]:
    """Characters that the labels' font has."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont(_LABEL_FONT)).get_charmap())
