"""Plan a run before it runs.

    python tools/plan.py --job.config_file train_configs/ar/qwen3-8B_h100.toml --nodes 8 --gpu h100
    python tools/plan.py --job.config_file X.toml --nodes 1 --gpu h200 --json --training.local_batch_size 2
    python tools/plan.py mask --kind doubled_blocks --documents 11,5,8 --block-size 4 --png mask.png
    python tools/plan.py mask --kind causal_document --documents 4096
    python tools/plan.py mask --config train_configs/ar/debug.toml --seq-len 2048 --json
    python tools/plan.py scaling --job.config_file X.toml --vary ranks=2,8 --vary training.seq_len=1024,2048

Without a subcommand (or as `run`): parameters, memory, FLOPs, communication and time of a config on
--nodes N nodes of [--gpus-per-node 8] --gpu h100|h200|gh200|b200; every other option is the config's,
as in training, and --assume NAME=VALUE changes an assumed efficiency.

`scaling`: collectives, their bytes and the operations of a step as a key of the config, the number of
ranks or that of layers grows (--vary KEY=VALUE,VALUE, repeatable; --ranks 8); other options are the config's.

The table (or with --json one JSON object) goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from torchtitan_ext import masks, models
from torchtitan_ext.attention.flex import BLOCK
from torchtitan_ext.config import load_toml
from torchtitan_ext.errors import UserError, run_cli, unknown
from torchtitan_ext.evaluation.plots import check_can_draw
from torchtitan_ext.planning import (
    BlockCounts,
    BlockGrid,
    block_grid,
    causal_counts,
    command,
    relative_to_causal,
    scaling,
)
from torchtitan_ext.planning.mask_picture import draw_mask
from torchtitan_ext.trainer import default_config


@dataclass(frozen=True, kw_only=True)
class MaskPlan:
    """Which mask, over which documents."""

    kind: str
    documents: list[int]
    block_size: int | None = None
    layout: str = "block"
    clean: str = "causal"

    @property
    def length(self) -> int:
        """Tokens of data, before any doubling."""
        return sum(self.documents)

    @property
    def positions(self) -> torch.Tensor:
        """[1, L], restarting at each document."""
        return torch.cat([torch.arange(length) for length in self.documents])[None]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of mask that can be planned."""

    build: Callable[[MaskPlan], masks.Mask]
    labels: tuple[str, ...] = ()
    """Names of the equal parts its sequence is made of; empty: the data alone."""

    blocks: bool = False
    """Whether it takes --block-size, --layout and --clean."""


def _doubled(plan: MaskPlan) -> masks.Mask:
    assert plan.block_size is not None
    layout: Any = plan.layout
    clean: Any = plan.clean
    twice = torch.cat([plan.positions, plan.positions], dim=1)
    return masks.doubled_blocks(twice, block_size=plan.block_size, layout=layout, clean=clean)


KINDS: dict[str, Kind] = {
    "causal_document": Kind(build=lambda plan: masks.causal_document(plan.positions)),
    "bidirectional_document": Kind(build=lambda plan: masks.bidirectional_document(plan.positions)),
    "doubled_blocks": Kind(build=_doubled, labels=("clean", "mask"), blocks=True),
}
"""Name -> how to build the mask."""


def parser() -> argparse.ArgumentParser:
    """The command line: one subcommand for each thing to plan; `run` is :mod:`planning.command`'s,
    `scaling` :mod:`planning.scaling`'s."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="what a config costs on a cluster", add_help=False)
    commands.add_parser("scaling", help="collectives and operations of a step as it grows", add_help=False)
    _add_mask(commands.add_parser("mask", help="blocks that attention computes, and a picture of the mask"))
    return parser


def _add_mask(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--config", type=Path, metavar="TOML", help="take the method's mask; the flags below override it")
    add("--kind", help=f"of {', '.join(KINDS)}")
    add("--documents", metavar="LENGTHS", help="tokens of each document, such as 11,5,8")
    add("--seq-len", type=int, help="one document of this length (default: that of --config)")
    add("--block-size", type=int, help="tokens of a block of the method")
    add("--layout", help=f"inside the mask part: {', '.join(get_args(masks.MaskLayout))} (default: block)")
    add("--clean", help=f"inside the clean part: {', '.join(get_args(masks.CleanLayout))} (default: causal)")
    add("--tile", type=int, default=BLOCK, help="tokens of a block of the kernel (default: %(default)s)")
    add("--png", type=Path, metavar="FILE", help="draw the mask")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    command.set_defaults(run=run_mask)


def main(argv: list[str] | None = None) -> None:
    """Run the subcommand; without one the planner."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "run":
        command.run(argv[1:])
    elif argv and argv[0] == "scaling":
        scaling.run(argv[1:])
    elif argv and argv[0].startswith("--") and argv[0] != "--help":
        command.run(argv)
    else:
        args = parser().parse_args(argv)
        args.run(args)


def run_mask(args: argparse.Namespace) -> None:
    """Count, print, draw."""
    plan = mask_plan(args)
    if args.tile < 1:
        raise UserError(f"--tile must be at least 1, got {args.tile}")
    if args.png is not None:
        check_can_draw()
        check_file(args.png, flag="--png")
    kind = KINDS[plan.kind]
    mask = kind.build(plan)
    grid = block_grid(mask, block=args.tile, parts=max(1, len(kind.labels)))
    if args.png is not None:
        draw_mask(
            args.png,
            mask,
            block=plan.block_size,
            title=describe(plan),
            labels=kind.labels,
            tile=args.tile,
        )
    rows = mask_rows(plan, grid)
    if args.json:
        print(json.dumps({**asdict(plan), "tile": args.tile, "rows": rows}))
    else:
        print(mask_table(plan, rows, tile=args.tile))


def mask_plan(args: argparse.Namespace) -> MaskPlan:
    """The plan that the flags, and under them the config, ask for.

    Errors: UserError for anything that is missing, wrong or belongs to another kind.
    """
    given = {name: getattr(args, name) for name in ("kind", "block_size", "layout", "clean")}
    flags = {name: value for name, value in given.items() if value is not None}
    told: dict[str, Any] = {}
    if args.config is not None:
        told = mask_of_config(args.config)
    elif args.kind is None:
        raise UserError(f"which mask? give --kind ({', '.join(KINDS)}) or --config")
    length = told.pop("seq_len", None)
    name = flags.get("kind", told.get("kind"))
    if name not in KINDS:
        raise unknown("--kind", name, KINDS)
    kind = KINDS[name]
    for flag in () if kind.blocks else [flag for flag in flags if flag != "kind"]:
        raise UserError(f"--{flag.replace('_', '-')} does not apply to {name}, which has no blocks")
    options = {**told, **flags} if kind.blocks else {"kind": name}
    if kind.blocks:
        check_blocks(name, options)
    return MaskPlan(documents=documents_of(args, length), **options)


def check_blocks(kind: str, options: dict[str, Any]) -> None:
    """Errors: UserError for a block size or a layout that there is not."""
    size = options.get("block_size")
    if size is None:
        raise UserError(f"{kind} needs --block-size, the tokens of a block")
    if size < 1:
        raise UserError(f"--block-size must be at least 1, got {size}")
    for flag, allowed in (("layout", masks.MaskLayout), ("clean", masks.CleanLayout)):
        if options.get(flag, get_args(allowed)[0]) not in get_args(allowed):
            raise unknown(f"--{flag}", options[flag], get_args(allowed))


def documents_of(args: argparse.Namespace, length: int | None) -> list[int]:
    """Lengths of the documents: --documents, or one of --seq-len or of the config's length."""
    if args.documents is not None and args.seq_len is not None:
        raise UserError("--seq-len is one document of that length: give it or --documents")
    if args.documents is None:
        length = length if args.seq_len is None else args.seq_len
        if length is None:
            raise UserError("which documents? give --documents 11,5,8, --seq-len or --config")
        if length < 1:
            raise UserError(f"--seq-len must be at least 1, got {length}")
        return [length]
    if not args.documents.strip():
        raise UserError("--documents is empty (allowed: lengths such as 11,5,8)")
    lengths = []
    for text in args.documents.split(","):
        try:
            lengths.append(int(text))
        except ValueError:
            raise UserError(f"--documents: {text.strip()!r} is not a whole number") from None
        if lengths[-1] < 1:
            raise UserError(f"--documents: a document has at least 1 token, got {lengths[-1]}")
    return lengths


def mask_of_config(path: Path) -> dict[str, Any]:
    """Kind, block size, layouts and sequence length of a TOML's method."""
    config = load_toml(path, make_default=default_config)
    config.model.attention = "dense"  # the mask does not depend on the kernel, which may need a GPU
    model = models.build_spec(config).model
    told: dict[str, Any] = {"seq_len": config.training.seq_len}
    if not hasattr(model, "block_size"):
        family = getattr(getattr(model, "size", None), "attention", "causal")
        return {**told, "kind": f"{family}_document"}
    told |= {"kind": "doubled_blocks", "block_size": model.block_size}
    fields = {"layout": "mask_layout", "clean": "clean_attention"}
    return told | {name: getattr(model, field) for name, field in fields.items() if hasattr(model, field)}


def check_file(path: Path, *, flag: str) -> None:
    """Errors: UserError when no file can have this path."""
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder")
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no folder {path.parent}")


def mask_rows(plan: MaskPlan, grid: BlockGrid) -> list[dict[str, Any]]:
    """The mask, its parts, and a plain causal mask of the data's length, as plain data."""
    length, labels = plan.length, KINDS[plan.kind].labels
    shown: list[tuple[str, int, int, BlockCounts | None]] = [
        (plan.kind, grid.q_len, grid.pairs_allowed, grid.counts)
    ]
    for i, query in enumerate(labels):
        for j, key in enumerate(labels):
            pairs = int(grid.pairs_PP[i, j])
            shown.append((f"{query} -> {key}", length, pairs, grid.part_counts(i, j)))
    causal = causal_counts(length, block=grid.block)
    shown.append(("causal, one document", length, length * (length + 1) // 2, causal))
    return [
        {
            "what": what,
            "length": tokens,
            "pairs_allowed": pairs,
            "allowed_fraction": pairs / tokens**2,
            "blocks": counts and {**counts._asdict(), "fraction_computed": counts.fraction_computed},
            "relative_to_causal": counts and relative_to_causal(counts, length=length),
        }
        for what, tokens, pairs, counts in shown
    ]


def mask_table(plan: MaskPlan, rows: Sequence[dict[str, Any]], *, tile: int) -> str:
    """The rows for people."""
    header = ("mask", "length", "pairs allowed", "full", "partial", "blocks computed", "fraction")
    lines = [(*header, f"relative to causal at {plan.length:,}")]
    for row in rows:
        name = row["what"] if row["what"] in KINDS or "->" not in row["what"] else f"  {row['what']}"
        start = (name, f"{row['length']:,}", f"{row['pairs_allowed']:,} ({row['allowed_fraction']:.2%})")
        blocks = row["blocks"]
        if blocks is None:  # blocks of the kernel straddle the parts
            lines.append((*start, "-", "-", "-", "-", "-"))
            continue
        computed = f"{blocks['full'] + blocks['partial']:,} of {blocks['total']:,}"
        lines.append(
            (
                *start,
                f"{blocks['full']:,}",
                f"{blocks['partial']:,}",
                computed,
                f"{blocks['fraction_computed']:.2%}",
                f"{row['relative_to_causal']:.3f}",
            )
        )
    return f"{describe(plan)}; blocks of {tile} x {tile}\n{aligned(lines)}"


def describe(plan: MaskPlan) -> str:
    """The plan in a line."""
    lengths = ", ".join(map(str, plan.documents[:8])) + (", ..." if len(plan.documents) > 8 else "")
    text = f"{plan.kind}, documents of {lengths}"
    if KINDS[plan.kind].blocks:
        text += f", blocks of {plan.block_size}, layout {plan.layout}, clean {plan.clean}"
    return text


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns that line up: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


if __name__ == "__main__":
    run_cli(main)
