"""Evaluate a trained model: accuracy on a synthetic task, length by length.

    python tools/evaluate.py outputs/ --task group_retrieval --lengths 1:48 --csv out.csv --png out.png
    python tools/evaluate.py outputs/checkpoint/step-400 --task group_retrieval --lengths 8,16,32 --json

The knobs of the task are those of the checkpoint's config.toml; flags override them. The table (or
with --json one JSON object) goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_ext.checkpoint.hf_folder import DTYPES
from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.data.tasks import TASKS, Task, TextTask
from torchtitan_ext.device import default_device, usable_device
from torchtitan_ext.errors import UserError, run_cli, unknown
from torchtitan_ext.evaluation import plots, tasks


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("path", metavar="CKPT", help="step-N, a folder of them, or a dump folder")
    add("--step", type=int, help="step to load instead of the newest")
    add("--task", help=f"synthetic task: {', '.join(TASKS)}")
    add("--lengths", help="1:32, 1:32:4, 1,2,4,8 or 16 (default: 1 to the longest in training)")
    add("--samples", type=int, default=256, help="for each length (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="samples in a forward (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the samples (default: %(default)s)")
    for knob in tasks.KNOBS:
        add(f"--{knob.replace('_', '-')}", type=int, help=f"{knob} of the task instead of the checkpoint's")
    add("--csv", type=Path, metavar="FILE", help="write the table there")
    add("--png", type=Path, metavar="FILE", help="draw accuracy against length there")
    add("--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)} (default: %(default)s)")
    add("--device", help="default: the accelerator where there is one, else cpu")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Evaluate as the command line says."""
    args = parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s", force=True
    )
    if args.dtype not in DTYPES:
        raise unknown("--dtype", args.dtype, DTYPES)
    if args.task is None:
        raise UserError(f"nothing to evaluate: give --task ({', '.join(TASKS)})")
    check_task_arguments(args)
    device = usable_device(args.device or default_device())
    loaded = load_model(args.path, dtype=DTYPES[args.dtype], device=device, step=args.step)
    run_task(loaded, args)


def check_task_arguments(args: argparse.Namespace) -> None:
    """What can be refused before a model is loaded."""
    if args.task not in TASKS:
        raise unknown("--task", args.task, TASKS)
    if args.lengths is not None:
        tasks.parse_lengths(args.lengths)
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for option, path in (("--csv", args.csv), ("--png", args.png)):
        if path is not None and path.is_dir():
            raise UserError(f"{option} {path} is a folder, expected a file")
    if args.png is not None:
        plots.check_can_draw()


def run_task(loaded: LoadedModel, args: argparse.Namespace) -> None:
    """Evaluate on a synthetic task, print, and write what was asked for."""
    given = {knob: getattr(args, knob) for knob in tasks.KNOBS if getattr(args, knob) is not None}
    lengths = tasks.parse_lengths(args.lengths) if args.lengths is not None else None
    task, trained = tasks.task_of_run(
        args.task, loaded.config, overrides=given, length=lengths[0] if lengths else None
    )
    lengths = lengths or list(range(1, task.longest + 1))
    head = [
        f"{loaded.path}: {tasks.describe(task)}; length in {task.length_is}",
        tasks.header(answers=isinstance(task, TextTask)),
    ]

    def show(result: tasks.LengthResult) -> None:
        print(*head, tasks.row(result), sep="\n", flush=True)
        head.clear()

    results = tasks.evaluate_lengths(
        loaded.model,
        task,
        lengths,
        samples=args.samples,
        batch_size=args.batch_size,
        seed=args.seed,
        trained_maximum=trained,
        text=tasks.TextSetup.of(loaded) if isinstance(task, TextTask) else None,
        on_result=None if args.json else show,
    )
    if args.json:
        print(json.dumps(report(loaded, task, trained, results, seed=args.seed)))
    if args.csv is not None:
        tasks.write_csv(args.csv, results)
    if args.png is not None:
        plots.draw_lengths(
            args.png,
            {loaded.method: results},
            trained_maximum=trained,
            length_is=task.length_is,
            title=tasks.describe(task),
        )


def report(
    loaded: LoadedModel, task: Task, trained: int | None, results: list[tasks.LengthResult], *, seed: int
) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "checkpoint": str(loaded.path),
        "method": loaded.method,
        "task": task.name,
        "knobs": tasks.used(task),
        "trained_maximum": trained,
        "seed": seed,
        "results": tasks.records(results),
    }


if __name__ == "__main__":
    run_cli(main)
