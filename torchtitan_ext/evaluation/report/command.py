"""``tools/compare.py report``: read the runs, make the page, write it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, get_args

from torchtitan_ext.errors import UserError, unknown
from torchtitan_ext.evaluation import plots
from torchtitan_ext.evaluation.report import charts, evaluations, page, sections
from torchtitan_ext.evaluation.report.blocks import Page, Picture, Section, Text
from torchtitan_ext.evaluation.report.runs import Run, read_runs
from torchtitan_ext.evaluation.tasks import whole_file

HTML, MARKDOWN = "report.html", "report.md"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The flags."""
    add = command.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="dump folders")
    add("--out", type=Path, required=True, metavar="DIR", help=f"folder for {HTML}, {MARKDOWN} and pictures")
    add("--names", default="", metavar="NAME,...", help="of the runs (default: the ends of their paths)")
    add("--title", default="", help="of the page (default: the names)")
    add("--x", default="tokens", help="axis of the curves: tokens or steps (default: %(default)s)")
    add(
        "--smoothing",
        type=float,
        default=0.6,
        metavar="W",
        help="weight of the past in the averages of curves, 0 is off (default: %(default)s)",
    )
    add(
        "--eval",
        action="append",
        default=[],
        metavar="FILE[=RUN]",
        help="JSON of tools/evaluate.py from outside the runs' folders; may come several times",
    )


def run(args: argparse.Namespace) -> list[Path]:
    """Write the report; the files written, the page first.

    Errors: UserError for anything that cannot be read or written, before a file is written.
    """
    if args.x not in get_args(charts.Axis):
        raise unknown("--x", args.x, get_args(charts.Axis))
    if not 0 <= args.smoothing < 1:
        raise UserError(f"--smoothing must be at least 0 and below 1, got {args.smoothing:g}")
    plots.check_can_draw()
    check_out(args.out)
    names = [name.strip() for name in args.names.split(",")] if args.names else []
    if not all(names):
        raise UserError(f"--names {args.names!r} has an empty name")
    runs = read_runs(args.runs, names=names, out=args.out)
    report = build(runs, given=args.eval, axis=args.x, smoothing=args.smoothing, title=args.title)
    return write(report, args.out)


def check_out(out: Path) -> None:
    """Errors: UserError for a folder that cannot be made or written."""
    place = out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UserError(f"--out {out} cannot be a folder: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"--out {out} cannot be written: no permission in {place}")


def build(runs: list[Run], *, given: list[str], axis: charts.Axis, smoothing: float, title: str = "") -> Page:
    """The page of the runs. ``given``: FILE[=RUN] of further evaluations."""
    measured = evaluations.read_all(runs, given)
    lacking = [run.name for run in runs if run.curves and not charts.has_tokens(run)]
    if lacking:
        axis = "steps"
    look = charts.look_of(runs, axis=axis, smoothing=smoothing)
    curves = sections.curve_sections(runs, look=look)
    if lacking and curves:
        text = f"Against steps: {', '.join(lacking)} did not log how many tokens were seen."
        curves[0].blocks.append(Text(text=text))
    found: list[Section] = [
        sections.runs_section(runs),
        sections.config_section(runs),
        *curves,
        sections.evaluation_section(runs, measured, look=look),
        sections.picture_section(runs),
    ]
    names = ", ".join(run.name for run in runs)
    methods = ", ".join(dict.fromkeys(run.method for run in runs if run.method))
    return Page(
        title=title or names,
        lead=f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} of {methods or 'torchtitan_ext'}",
        sections=page.with_own_files([section for section in found if section.blocks]),
    )


def write(report: Page, out: Path) -> list[Path]:
    """The pictures, then the Markdown and the page that belong to them; each file whole or not at all."""
    contents: dict[str, Any] = {
        block.file: block.png
        for section in report.sections
        for block in section.blocks
        if isinstance(block, Picture)
    }
    contents[MARKDOWN] = page.markdown(report).encode()
    contents[HTML] = page.html(report).encode()
    for name, data in contents.items():
        with whole_file(out / name) as temporary:
            temporary.write_bytes(data)
    return [out / name for name in reversed(contents)]
