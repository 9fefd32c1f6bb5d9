"""Compare this project with others, side by side in one run.

    python tools/compare.py bench
    python tools/compare.py bench --only decode --rounds 9 --model-dir ./assets/SmolLM2-135M-Instruct
    python tools/compare.py bench --quick --json bench.json --markdown bench.md
    python tools/compare.py profile tidar --decode --trace trace.json
    python tools/compare.py lengths RUN1 RUN2 --task group_retrieval --lengths 1:32 --at 16,32 --png out.png
    python tools/compare.py report RUN1 RUN2 --out report/ --eval eval.json=RUN2

The table goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.data.tasks import TASKS
from torchtitan_ext.errors import UserError, run_cli
from torchtitan_ext.evaluation import (
    bench,
    bench_decode,
    bench_methods,
    bench_system,
    bench_tdlm,
    decoding,
    plots,
    profile,
    tasks,
)
from torchtitan_ext.evaluation.report import command as report_command
from torchtitan_ext.evaluation.report.runs import short_names

BENCHMARKS = {
    **bench.BENCHMARKS,
    **bench_decode.BENCHMARKS,
    **bench_methods.BENCHMARKS,
    **bench_tdlm.BENCHMARKS,
    **bench_system.BENCHMARKS,
}

HEADER = ("what", "ours", "peer", "ratio", "rounds", "goal", "state")

STATE = {True: "reached", False: "not reached", None: "-"}
"""Of a goal."""


def parser() -> argparse.ArgumentParser:
    """The command line: one subcommand for each kind of comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_bench(commands.add_parser("bench", help="speed, as ratios of one run"))
    _add_profile(commands.add_parser("profile", help="where a step's or a decoding's time goes"))
    _add_lengths(commands.add_parser("lengths", help="accuracy of several runs on a task, length by length"))
    _add_report(commands.add_parser("report", help="runs on one page: tables, curves, evaluations, pictures"))
    return parser


def _add_lengths(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("runs", nargs="+", metavar="RUN", help="dump folders or checkpoints")
    add("--task", required=True, help=f"synthetic task: {', '.join(TASKS)}")
    add("--lengths", required=True, help="1:32, 1:32:4, 1,2,4,8 or 16")
    add("--at", required=True, help="lengths shown in the table, such as 16,32")
    add("--samples", type=int, default=256, help="for each length (default: %(default)s)")
    add("--png", type=Path, metavar="FILE", help="draw accuracy against length")
    add("--csv", type=Path, metavar="FILE", help="write every run's score at every length")
    command.set_defaults(run=run_lengths)


def _add_report(command: argparse.ArgumentParser) -> None:
    report_command.add_arguments(command)
    command.set_defaults(run=run_report)


def _add_bench(command: argparse.ArgumentParser) -> None:
    defaults = bench.Settings()
    add = command.add_argument
    add("--only", default="", metavar="NAMES", help=f"of {','.join(BENCHMARKS)} (default: all)")
    add("--rounds", type=int, default=defaults.rounds, help="rounds of A B B A (default: %(default)s)")
    add("--threads", type=int, default=defaults.threads, help="CPU threads (default: %(default)s)")
    add("--quick", action="store_true", help="tiny sizes: does it run? The numbers mean nothing")
    add("--model-dir", type=Path, metavar="HF_DIR", help="decode this model instead of random weights")
    add("--t2mlr-run", type=Path, metavar="CKPT", help="also: when the iterates of this trained run settle")
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    add("--markdown", type=Path, metavar="FILE", help="write the table")
    command.set_defaults(run=run_bench)


def _add_profile(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("method", metavar="METHOD", help="such as ar, tidar or t2mlr")
    add("--decode", action="store_true", help="a decoding instead of a training step")
    add("--trace", type=Path, metavar="FILE", help="write the events for a trace viewer")
    add("--top", type=int, default=20, help="operators in the table (default: %(default)s)")
    add("--repeats", type=int, default=3, help="steps or decodings (default: %(default)s)")
    add("--threads", type=int, default=bench.Settings().threads, help="CPU threads (default: %(default)s)")
    add("--shapes", action="store_true", help="a line for each operator and shapes of its inputs")
    add("--quick", action="store_true", help="tiny sizes: does it run? The numbers mean nothing")
    command.set_defaults(run=run_profile)


def main(argv: list[str] | None = None) -> None:
    """Run the subcommand."""
    args = parser().parse_args(argv)
    # torchtitan logs to the root logger, and warns of the second trainer of a process.
    logging.basicConfig(
        stream=sys.stderr, level=logging.ERROR, format="%(levelname)s: %(message)s", force=True
    )
    args.run(args)


def run_bench(args: argparse.Namespace) -> None:
    """Measure, print the table, write the files."""
    settings = bench.Settings(
        rounds=args.rounds,
        threads=args.threads,
        quick=args.quick,
        model_dir=args.model_dir,
        t2mlr_run=args.t2mlr_run,
    )
    files = [path for path in (args.json, args.markdown) if path is not None]
    for path in files:  # before minutes of measuring
        if path.is_dir() or not path.parent.is_dir():
            raise UserError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}")
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    report = bench.run(
        settings,
        only=only,
        benchmarks=BENCHMARKS,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    text = "\n\n".join(filter(None, [table(report), notes(report), summary(report)])) + "\n"
    print(text, end="")
    if args.json is not None:
        write(args.json, json.dumps(to_json(report), indent=2) + "\n")
    if args.markdown is not None:
        write(args.markdown, text)


def run_profile(args: argparse.Namespace) -> None:
    """Profile one method, print its operators by self time."""
    bench.Settings(threads=args.threads)  # refuses what is no number of threads
    if args.top < 1:
        raise UserError(f"--top must be at least 1, got {args.top}")
    names = ("decode", "trace", "repeats", "threads", "shapes", "quick")
    result = profile.profile(args.method, **{name: getattr(args, name) for name in names})
    print(aligned(profile.lines(result, top=args.top)))
    print(f"\n{profile.summary(result)}")


def run_lengths(args: argparse.Namespace) -> None:
    """Evaluate the runs on the same samples, print one table, draw one picture."""
    lengths, shown = tasks.parse_lengths(args.lengths), tasks.parse_lengths(args.at)
    if not set(shown) <= set(lengths):
        raise UserError(f"--at {args.at} must be among --lengths {args.lengths}")
    if args.png is not None:
        plots.check_can_draw()
    folders = [Path(path).expanduser().resolve() for path in args.runs]
    if twice := next((path for i, path in enumerate(args.runs) if folders[i] in folders[:i]), None):
        raise UserError(f"the run {twice} is given twice")
    curves: dict[str, list[tasks.LengthResult]] = {}
    lines = [("run", "parameters", "steps", "seconds", *(f"token accuracy at {n}" for n in shown))]
    task = trained = None
    for path, name in zip(args.runs, short_names(folders), strict=True):
        loaded = load_model(path)
        task, trained = tasks.task_of_run(args.task, loaded.config, length=lengths[0])
        results = tasks.evaluate_lengths(
            loaded.model, task, lengths, samples=args.samples, trained_maximum=trained
        )
        curves[name] = results
        by_length = {result.length: result for result in results}
        lines.append((name, *facts(Path(path), loaded), *(percent(by_length[n]) for n in shown)))
    assert task is not None
    print(aligned(lines))
    if args.csv is not None:
        names = ("length", "samples", "token_accuracy", "exact_match")
        rows = [
            {"run": name, **{key: getattr(result, key) for key in names}}
            for name, results in curves.items()
            for result in results
        ]
        decoding.write_rows(args.csv, rows, names=["run", *names])
    if args.png is not None:
        plots.draw_lengths(
            args.png,
            curves,
            trained_maximum=trained,
            length_is=task.length_is,
            title=tasks.describe(task),
        )


def run_report(args: argparse.Namespace) -> None:
    """Write the page and the Markdown, print where they are."""
    for path in report_command.run(args)[:2]:
        print(path)


def percent(result: tasks.LengthResult) -> str:
    """Token accuracy for people."""
    return f"{100 * result.token_accuracy:.2f}%"


def facts(path: Path, loaded: LoadedModel) -> tuple[str, str, str]:
    """Parameters of a run, and the steps and seconds its trainer noted."""
    parameters = sum(p.numel() for p in loaded.model.parameters())
    note = path / "run.json"
    told = json.loads(note.read_text()) if note.is_file() else {}
    return f"{parameters:,}", str(told.get("step", "?")), f"{told.get('seconds', float('nan')):.0f}"


def write(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def table(report: bench.Report) -> str:
    """The rows as an aligned Markdown table."""
    return aligned([HEADER, *(_cells(row) for row in report.rows)])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A header and rows as a Markdown table whose columns line up."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [padded[0], rule, *padded[1:]])


def _cells(row: bench.Row) -> tuple[str, ...]:
    return (
        row.what,
        f"{row.ours:,.1f} {row.unit}",
        f"{row.peer:,.1f} {row.unit}",
        f"{row.ratio:.3f}",
        f"{min(row.ratios):.3f} to {max(row.ratios):.3f}",
        f">= {row.goal:.2f}" if row.goal else "-",
        STATE[row.reached],
    )


def notes(report: bench.Report) -> str:
    """What the rows say besides, one line a row that has something to say."""
    return "\n".join(f"- {row.what}: {row.note}" for row in report.rows if row.note)


def summary(report: bench.Report) -> str:
    """What the table was measured on, and how to read it."""
    rates, settings = report.rates, report.settings
    lines = [
        f"machine: fp32 matrix product {rates.matmul_gflops:.1f} GFLOP/s, copy {rates.copy_gbytes:.1f} GB/s",
        f"device: {report.device}, {settings.threads} threads of {report.cores} cores; "
        f"load before {report.load_average[0]:.1f}",
        "ratio: ours / peer (bytes, seconds, passes: peer / ours), > 1 is better; "
        f"median of {settings.rounds} rounds, each A B B A or B A A B",
        f"goals: {goals(report)}",
        f"versions: {', '.join(f'{name} {version}' for name, version in versions().items())}",
    ]
    return "\n".join(lines)


def goals(report: bench.Report) -> str:
    """How many are reached."""
    states = [row.reached for row in report.rows if row.reached is not None]
    return f"{sum(states)} of {len(states)} reached"


def versions() -> dict[str, str]:
    """Versions of what was measured; a library that is not installed is left out."""
    names = [n for n in ("torch", "torchtitan", "transformers") if importlib.util.find_spec(n)]
    return {name: importlib.metadata.version(name) for name in names}


def to_json(report: bench.Report) -> dict[str, Any]:
    """The report as plain data, every round's ratio included."""
    settings = {name: _plain(value) for name, value in asdict(report.settings).items()}
    return {
        "settings": settings,
        "versions": versions(),
        "machine": {
            "device": report.device,
            "cores": report.cores,
            "threads": report.settings.threads,
            "torch": torch.__version__,
            **report.rates._asdict(),
            "samples": [rates._asdict() for rates in report.machine],
            "load_average": list(report.load_average),
        },
        "rows": [{**asdict(row), "ratio": row.ratio, "reached": row.reached} for row in report.rows],
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    run_cli(main)
