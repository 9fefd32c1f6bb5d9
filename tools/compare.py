"""Compare this project with others, side by side in one run.

    python tools/compare.py bench
    python tools/compare.py bench --only decode --rounds 9 --model-dir ./assets/SmolLM2-135M-Instruct
    python tools/compare.py bench --quick --json bench.json --markdown bench.md

The table goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torchtitan_ext  # noqa: F401 - before torchtitan
from torchtitan_ext.errors import UserError, run_cli
from torchtitan_ext.evaluation import bench


def parser() -> argparse.ArgumentParser:
    """The command line: one subcommand for each kind of comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    _add_bench(commands.add_parser("bench", help="speed, as ratios of one run"))
    return parser


def _add_bench(command: argparse.ArgumentParser) -> None:
    defaults = bench.Settings()
    add = command.add_argument
    add("--only", default="", metavar="NAMES", help=f"of {','.join(bench.BENCHMARKS)} (default: all)")
    add("--rounds", type=int, default=defaults.rounds, help="rounds of A B B A (default: %(default)s)")
    add("--threads", type=int, default=defaults.threads, help="CPU threads (default: %(default)s)")
    add("--quick", action="store_true", help="tiny sizes: does it run? The numbers mean nothing")
    add("--model-dir", type=Path, metavar="HF_DIR", help="decode this model instead of random weights")
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    add("--markdown", type=Path, metavar="FILE", help="write the table")
    command.set_defaults(run=run_bench)


def main(argv: list[str] | None = None) -> None:
    """Run the subcommand."""
    args = parser().parse_args(argv)
    args.run(args)


def run_bench(args: argparse.Namespace) -> None:
    """Measure, print the table, write the files."""
    settings = bench.Settings(
        rounds=args.rounds, threads=args.threads, quick=args.quick, model_dir=args.model_dir
    )
    files = [path for path in (args.json, args.markdown) if path is not None]
    for path in files:  # before minutes of measuring
        if path.is_dir() or not path.parent.is_dir():
            raise UserError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'no such folder'}")
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    report = bench.run(settings, only=only, progress=lambda text: print(text, file=sys.stderr, flush=True))
    text = f"{bench.table(report)}\n\n{bench.summary(report)}\n"
    print(text, end="")
    if args.json is not None:
        write(args.json, json.dumps(bench.to_json(report), indent=2) + "\n")
    if args.markdown is not None:
        write(args.markdown, text)


def write(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    run_cli(main)
