"""A picture of a mask: cells where the sequence is short, a kernel's blocks where it is long.

Shape suffixes: Q = queries, K = keys, I = query blocks, J = key blocks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchtitan_ext.attention.flex import BLOCK
from torchtitan_ext.evaluation.plots import check_can_draw
from torchtitan_ext.evaluation.tasks import whole_file
from torchtitan_ext.masks import Mask
from torchtitan_ext.planning.mask_blocks import EMPTY, FULL, block_grid, strips

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CELLS = 256
"""Longest sequence, in queries or keys, that is drawn token by token."""

MOST_LINES = 96
"""More lines than this in one direction would hide what is between them."""

DPI = 150

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""One for each pair of parts that has an allowed cell; told apart without red and green."""

FORBIDDEN = "#ffffff"

ACROSS, PADDING = -1, -2
"""Instead of a pair of parts: a rectangle over several of them, or one with nothing but padding."""

OTHERS = {ACROSS: ("across parts", "#666666"), PADDING: ("padding alone", "#a6761d")}


class Layer(NamedTuple):
    """What the picture fills: an index into ``colours`` for every rectangle."""

    index: torch.Tensor
    """0 = forbidden or skipped, [Q, K] or [I, J]."""

    colours: list[str]
    names: list[str]
    """For the legend; the first is index 1."""

    side: int
    """Tokens along a rectangle's side."""


def draw_mask(
    path: Path,
    mask: Mask,
    *,
    row: int = 0,
    block: int | None = None,
    title: str = "",
    labels: Sequence[str] = (),
    tile: int = BLOCK,
) -> None:
    """Write one row's mask as a PNG; the arguments are those of :func:`mask_figure`.

    Errors: UserError when matplotlib is missing or the file cannot be written.
    """
    figure = mask_figure(mask, row=row, block=block, title=title, labels=labels, tile=tile)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=DPI)


def mask_figure(
    mask: Mask,
    *,
    row: int = 0,
    block: int | None = None,
    title: str = "",
    labels: Sequence[str] = (),
    tile: int = BLOCK,
) -> Figure:
    """One row's mask, queries downwards and keys to the right, in tokens.

    Up to :data:`MOST_CELLS` tokens every allowed pair is a coloured cell, otherwise every
    block of ``tile`` tokens is full, partial or empty. ``block``: tokens of the method's own
    blocks, counted from each document's start, whose borders are drawn. ``labels``: names of
    the sequence's equal parts, such as clean and mask; each pair of parts has a colour.

    Errors: UserError when matplotlib is missing.
    """
    check_can_draw()
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    cells = max(mask.q_len, mask.kv_len) <= MOST_CELLS
    layer = _cells(mask, row, labels) if cells else _tiles(mask, row, labels, tile)
    figure = Figure(dpi=DPI)
    axes = figure.add_subplot()
    height, width = (side * layer.side for side in layer.index.shape)
    axes.imshow(
        layer.index.numpy(),
        cmap=ListedColormap(layer.colours),
        vmin=-0.5,
        vmax=len(layer.colours) - 0.5,
        interpolation="nearest",
        extent=(0, width, height, 0),
        aspect="equal",
    )
    handles = _lines(axes, mask, row, block, layer, parts=max(1, len(labels)))
    _name_axes(axes, mask, labels)
    _arrange(figure, axes, [*_patches(layer), *handles], title)
    return figure


def _arrange(figure: Figure, axes: Axes, handles: Sequence[Any], title: str) -> None:
    """Places in inches: a layout engine lets a legend run into axes of equal aspect."""
    side, left, right = 6.0, 0.85, 0.45
    lines = textwrap.wrap(title, 84)
    below, above = 0.85 + 0.22 * -(-len(handles) // 2), 0.45 + 0.19 * len(lines)
    width, height = left + side + right, below + side + above
    figure.set_size_inches(width, height)
    axes.set_position((left / width, below / height, side / width, side / height))
    middle = (left + side / 2) / width
    figure.legend(handles=handles, loc="lower center", bbox_to_anchor=(middle, 0.005), ncols=2)
    if lines:
        figure.text(middle, 1 - 0.1 / height, "\n".join(lines), ha="center", va="top", fontsize=11)


def _parts(length: int, side: int, parts: int) -> torch.Tensor:
    """Part of the sequence each stretch of ``side`` tokens lies in, or ACROSS."""
    first = torch.arange(0, length, side)
    last = (first + side - 1).clamp(max=length - 1)
    one = length // parts
    return torch.where(first // one == last // one, first // one, ACROSS)


def _regions(mask: Mask, side: int, parts: int) -> torch.Tensor:
    """Index of the pair of parts of every rectangle, parts * query + key, or ACROSS."""
    query_Q1 = _parts(mask.q_len, side, parts)[:, None]
    key_1K = _parts(mask.kv_len, side, parts)[None]
    return torch.where((query_Q1 < 0) | (key_1K < 0), ACROSS, parts * query_Q1 + key_1K)


def _cells(mask: Mask, row: int, labels: Sequence[str]) -> Layer:
    """Every pair of tokens."""
    parts = max(1, len(labels))
    allowed_QK = torch.cat([strip for _, strip in strips(mask, row=row)]).cpu()
    regions_QK = _regions(mask, 1, parts)
    index_QK = torch.zeros_like(regions_QK)
    colours, names = [FORBIDDEN], []
    for region in regions_QK[allowed_QK].unique().tolist():
        index_QK[allowed_QK & (regions_QK == region)] = len(colours)
        colours.append(_colour(region, parts))
        names.append(_name(region, labels) or "allowed")
    return Layer(index_QK, colours, names, 1)


def _tiles(mask: Mask, row: int, labels: Sequence[str], tile: int) -> Layer:
    """Every block of the kernel."""
    parts = max(1, len(labels))
    grid = block_grid(mask, block=tile, row=row)
    kind_IJ = grid.kind_IJ
    regions_IJ = _regions(mask, tile, parts).masked_fill((kind_IJ != EMPTY) & (grid.pairs_IJ == 0), PADDING)
    index_IJ = torch.zeros_like(regions_IJ)
    colours, names = [FORBIDDEN], []
    found = regions_IJ[kind_IJ != EMPTY].unique().tolist()
    for region in sorted(found, key=lambda region: (region < 0, abs(region))):
        for kind in kind_IJ[(regions_IJ == region) & (kind_IJ != EMPTY)].unique().flip(0).tolist():
            chosen = (regions_IJ == region) & (kind_IJ == kind)
            index_IJ[chosen] = len(colours)
            colour = _colour(region, parts)
            colours.append(colour if kind == FULL else _lighter(colour))
            what = f"{'full' if kind == FULL else 'partial'} ({int(chosen.sum()):,})"
            names.append(": ".join(filter(None, (_name(region, labels), what))))
    return Layer(index_IJ, colours, names, tile)


def _colour(region: int, parts: int) -> str:
    if region in OTHERS:
        return OTHERS[region][1]
    # Of a doubled sequence's four pairs the one from clean to mask comes last: it is rarely allowed.
    order = (0, 3, 1, 2) if parts == 2 else range(parts * parts)
    return COLOURS[order[region] % len(COLOURS)]


def _name(region: int, labels: Sequence[str]) -> str:
    if region in OTHERS:
        return OTHERS[region][0]
    if not labels:
        return ""
    query, key = divmod(region, len(labels))
    return f"{labels[query]} \N{RIGHTWARDS ARROW} {labels[key]}"


def _lighter(colour: str) -> str:
    """Halfway to white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(channel + 255) // 2:02x}" for channel in channels)


def _patches(layer: Layer) -> list[Any]:
    from matplotlib.patches import Patch

    empty = "forbidden" if layer.side == 1 else f"empty ({int((layer.index == 0).sum()):,})"
    pairs = [*zip(layer.colours[1:], layer.names, strict=True), (FORBIDDEN, empty)]
    return [Patch(facecolor=colour, edgecolor="#888888", linewidth=0.5, label=name) for colour, name in pairs]


def _lines(axes: Axes, mask: Mask, row: int, block: int | None, layer: Layer, *, parts: int) -> list[Any]:
    """Borders of rectangles, blocks, documents and parts; returns what the legend shows of them."""
    starts = {part * (mask.q_len // parts) for part in range(1, parts)}
    documents: set[int] = set()
    blocks: set[int] = set()
    if mask.q_len == mask.kv_len == mask.positions_BL.shape[1]:  # else positions say nothing of one axis
        positions = mask.positions_BL[row].tolist()
        documents = {i for i, position in enumerate(positions) if position == 0 and i} - starts
        if block and (layer.side == 1 or block >= layer.side):  # else they are finer than the picture
            blocks = {i for i, position in enumerate(positions) if position % block == 0 and i}
    grid = set(range(layer.side, max(mask.q_len, mask.kv_len), layer.side))
    drawn = [
        (grid, "#d9d9d9", 0.4, "-", None),
        (blocks - documents - starts, "#555555", 0.6, "-", f"blocks of {block}"),
        (documents, "#000000", 1.2 if len(documents) <= 16 else 0.5, "--", "documents"),
        (starts, "#000000", 2.0, "-", None),
    ]
    handles = []
    for at, colour, width, style, name in drawn:
        if not at or len(at) > MOST_LINES:
            continue
        line = None
        for place in sorted(at):
            for draw in (axes.axhline, axes.axvline):
                line = draw(place, color=colour, linewidth=width, linestyle=style, label=name)
        if name is not None:
            handles.append(line)
    return handles


def _name_axes(axes: Axes, mask: Mask, labels: Sequence[str]) -> None:
    """Query and key, their parts, and ticks at whole tokens."""
    from matplotlib.ticker import MultipleLocator

    axes.set_xlabel("key (token)")
    axes.set_ylabel("query (token)")
    # Powers of two: lengths and blocks usually are.
    step = 1 << max(0, (max(mask.q_len, mask.kv_len) // 9).bit_length())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(step))
    for part, label in enumerate(labels):
        middle = (part + 0.5) / len(labels)
        axes.text(
            middle * mask.kv_len, 1.01, label, transform=axes.get_xaxis_transform(), ha="center", va="bottom"
        )
        axes.text(
            1.01,
            middle * mask.q_len,
            label,
            transform=axes.get_yaxis_transform(),
            ha="left",
            va="center",
            rotation=-90,
        )
