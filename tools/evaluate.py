"""Evaluate a trained model: a synthetic task, benchmarks, or decoding strategies side by side.

    python tools/evaluate.py outputs/ --task group_retrieval --lengths 1:48 --csv out.csv --png out.png
    python tools/evaluate.py outputs/checkpoint/step-400 --task group_retrieval --lengths 8,16,32 --json
    python tools/evaluate.py outputs/ --task chain_sum --decode-options tokens_per_forward=2
    python tools/evaluate.py outputs/ --decode ar,tidar:4,tidar:8,confidence,left_to_right:2,threshold:0.9
    python tools/evaluate.py outputs/ --decode ar,tidar --task chain_sum
    python tools/evaluate.py outputs/ --task chain_sum --sweep "tau=0.1,0.4,0.8;q=0.3,0.5" --png frontier.png
    python tools/evaluate.py outputs/ --task chain_sum --depths --png depths.png
    python tools/evaluate.py outputs/ --tasks arc_easy,piqa,winogrande --data FOLDER --limit 200 --json
    python tools/evaluate.py outputs/ --step 400 --task chain_sum --tensorboard

The knobs of a task are those of the checkpoint's config.toml; flags override them. Without a task,
strategies continue held-out documents of the checkpoint's own data. --sweep decodes the samples of all
lengths with every combination of options of the method's own decoder. --depths shows in which pass of a
step each kind of token is committed, with --sweep for every combination. --tasks measures benchmarks of
local files through lm-eval, under torchrun on several ranks. The table (or with --json one JSON object)
goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_ext import progress
from torchtitan_ext.checkpoint.hf_folder import DTYPES
from torchtitan_ext.checkpoint.load import LoadedModel, find_folder, load_model
from torchtitan_ext.data.tasks import TASKS, Task, TextTask
from torchtitan_ext.decoding import SamplingParams, decoder_for
from torchtitan_ext.decoding.choice import chosen_decoder
from torchtitan_ext.decoding.strategies import FORMS, Strategy
from torchtitan_ext.device import default_device, usable_device
from torchtitan_ext.errors import UserError, run_cli, unknown
from torchtitan_ext.evaluation import benchmarks, decoding, depths, plots, publish, sweep, tasks
from torchtitan_ext.evaluation.decode_options import parse_options
from torchtitan_ext.evaluation.prompts import Prompt, file_prompts, held_out_prompts

DECODE_DEFAULTS = {
    "prompts": 20,
    "prompt_tokens": 64,
    "max_new_tokens": 200,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "prompts_file": None,
}
"""Options of --decode without --task."""

SAMPLES = 256
"""Of each length, with --task."""

BATCH_SIZE = {"task": 64, "decode": 1, "tasks": benchmarks.BATCH_SIZE}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("path", metavar="CKPT", help="step-N, a folder of them, or a dump folder")
    add("--step", type=int, help="step to load instead of the newest")
    add("--task", help=f"synthetic task: {', '.join(TASKS)}")
    add("--lengths", help="1:32, 1:32:4, 1,2,4,8 or 16 (default: 1 to the longest in training)")
    add("--samples", type=int, help=f"for each length of --task (default: {SAMPLES})")
    add(
        "--batch-size",
        type=int,
        help="samples in a forward (default: 64; --tasks: 8), or prompts (--decode: 1)",
    )
    add("--seed", type=int, default=0, help="of the samples, prompts and draws (default: %(default)s)")
    for knob in tasks.KNOBS:
        flag, kind = f"--{knob.replace('_', '-')}", tasks.knob_type(knob)
        add(flag, type=kind, help=f"{knob} of the task instead of the checkpoint's")
    add("--decode-options", default="", metavar="KEY=VALUE,...", help="options of the method's decoder")
    add("--sweep", metavar="KEY=V,V;KEY=V,V", help="options of the method's decoder, in all combinations")
    add(
        "--cost",
        help=f"what --sweep weighs accuracy against: {', '.join(sweep.COSTS)} (default: gflop or nfe)",
    )
    add("--depths", action="store_true", help="count the passes in which kinds of tokens are committed")
    add("--decode", metavar="NAME,...", help=f"decoding strategies to compare: {', '.join(FORMS)}")
    _add_decode(add)
    benchmarks.add_arguments(add)
    add("--csv", type=Path, metavar="FILE", help="write the table there")
    add("--png", type=Path, metavar="FILE", help="draw accuracy against length or cost, or the passes, there")
    publish.add_argument(add)
    add("--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)} (default: %(default)s)")
    add("--device", help="default: the accelerator where there is one, else cpu")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def _add_decode(add: Any) -> None:
    """Options of --decode; None tells that one was not given."""
    given = {name: f"(default: {value})" for name, value in DECODE_DEFAULTS.items()}
    add(
        "--prompts", type=int, help=f"held-out documents to continue {given['prompts']}, or lines of the file"
    )
    add("--prompt-tokens", type=int, help=f"of each document {given['prompt_tokens']}")
    add("--max-new-tokens", type=int, help=f"of each prompt {given['max_new_tokens']}")
    add("--temperature", type=float, help=f"0 takes the most probable token {given['temperature']}")
    add("--top-k", type=int, help=f"draw from the k most probable tokens, 0 is off {given['top_k']}")
    add("--top-p", type=float, help=f"draw from the smallest set of this probability {given['top_p']}")
    add("--prompts-file", metavar="FILE", help="one prompt a line instead of held-out documents; - is stdin")


def main(argv: list[str] | None = None) -> None:
    """Evaluate as the command line says."""
    args = parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s", force=True
    )
    if args.dtype not in DTYPES:
        raise unknown("--dtype", args.dtype, DTYPES)
    if args.task is None and args.decode is None and args.tasks is None:
        raise UserError(f"nothing to evaluate: give --task ({', '.join(TASKS)}), --tasks or --decode")
    if args.batch_size is None:
        args.batch_size = BATCH_SIZE[_mode(args)]
    publish.check_given(args)
    if args.tasks is not None:
        check_benchmark_arguments(args)
        benchmarks.run(args)
        return
    for name in benchmarks.OPTIONS:
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} belongs to --tasks, which is not given")
    strategies = decoding.parse_strategies(args.decode) if args.decode is not None else []
    if args.task is not None:
        check_task_arguments(args)
    else:
        check_decode_arguments(args)
    device = usable_device(args.device or default_device())
    grid = check_sweep(args) if args.sweep is not None else {}
    loaded = load_model(args.path, dtype=DTYPES[args.dtype], device=device, step=args.step)
    publish.settle(args, loaded)
    if args.task is None:
        run_decode(loaded, args, strategies)
    elif args.depths:
        run_depths(loaded, args, grid)
    elif grid:
        run_sweep(loaded, args, grid)
    elif strategies:
        run_task_decoded(loaded, args, strategies)
    else:
        run_task(loaded, args)


def _mode(args: argparse.Namespace) -> str:
    """Which of the three kinds of evaluation."""
    if args.tasks is not None:
        return "tasks"
    return "decode" if args.task is None else "task"


def check_benchmark_arguments(args: argparse.Namespace) -> None:
    """What --tasks has no use for."""
    if args.samples is not None:
        raise UserError("--samples has no use with --tasks: --limit N takes the first N of each benchmark")
    others = ("task", "decode", "lengths", "sweep", "cost", "depths", "png", *tasks.KNOBS, *DECODE_DEFAULTS)
    for name in others:
        if getattr(args, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} has no use with --tasks")
    if args.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {args.batch_size}")


def check_decode_arguments(args: argparse.Namespace) -> None:
    """What can be refused before a model is loaded, without a task; fills in the defaults of --decode."""
    for name in ("lengths", "samples", "png", "decode_options", "sweep", "cost", "depths", *tasks.KNOBS):
        value = getattr(args, name)
        if value not in (None, "") and value is not False:
            raise UserError(f"--{name.replace('_', '-')} belongs to --task, which is not given")
    if args.prompts_file is not None and args.prompt_tokens is not None:
        raise UserError("--prompt-tokens has no use with --prompts-file, whose lines are the prompts")
    for name, value in DECODE_DEFAULTS.items():
        if getattr(args, name) is None and not (name == "prompts" and args.prompts_file is not None):
            setattr(args, name, value)
    for name in ("prompts", "prompt_tokens", "max_new_tokens", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    sampling_of(args)
    if args.csv is not None and args.csv.is_dir():
        raise UserError(f"--csv {args.csv} is a folder, expected a file")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """How --decode chooses tokens."""
    return SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)


def check_task_arguments(args: argparse.Namespace) -> None:
    """What can be refused before a model is loaded, with a task."""
    if args.task not in TASKS:
        raise unknown("--task", args.task, TASKS)
    TASKS[args.task].check_installed()
    for name in DECODE_DEFAULTS:
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} belongs to --decode without --task")
    if args.decode is not None:
        if not issubclass(TASKS[args.task], TextTask):
            raise UserError(f"--decode has no use for the task {args.task!r}, which is not decoded")
        if args.decode_options:
            raise UserError("--decode-options are those of the method's own decoder; give it or --decode")
    if args.decode_options and not issubclass(TASKS[args.task], TextTask):
        raise UserError(f"--decode-options has no use for the task {args.task!r}, which is not decoded")
    check_sweep_arguments(args)
    check_depths_arguments(args)
    if args.lengths is not None:
        tasks.parse_lengths(args.lengths)
    args.samples = SAMPLES if args.samples is None else args.samples
    for name in ("samples", "batch_size"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for option, path in (("--csv", args.csv), ("--png", args.png)):
        if path is not None and path.is_dir():
            raise UserError(f"{option} {path} is a folder, expected a file")
    if args.png is not None:
        plots.check_can_draw()


def check_sweep_arguments(args: argparse.Namespace) -> None:
    """What can be refused without knowing the checkpoint."""
    if args.sweep is not None:
        if not issubclass(TASKS[args.task], TextTask):
            raise UserError(f"--sweep has no use for the task {args.task!r}, which is not decoded")
        if args.decode is not None:
            raise UserError("--sweep varies the method's own decoder; give it or --decode")
    if args.cost is not None:
        if args.sweep is None:
            raise UserError("--cost belongs to --sweep, which is not given")
        if args.cost not in sweep.COSTS:
            raise unknown("--cost", args.cost, sweep.COSTS)


def check_depths_arguments(args: argparse.Namespace) -> None:
    """What can be refused without knowing the checkpoint."""
    if not args.depths:
        return
    if not issubclass(TASKS[args.task], TextTask):
        raise UserError(f"--depths has no use for the task {args.task!r}, which is not decoded")
    for name in ("decode", "cost"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} has no use with --depths, which counts passes of the method's decoder")


def check_sweep(args: argparse.Namespace) -> sweep.Grid:
    """The options to vary, refused before the weights are loaded if the method's decoder lacks them."""
    folder = find_folder(Path(args.path).expanduser(), step=args.step)
    args.path, args.step = folder, None  # settled, so that a damaged checkpoint is passed over once
    decode = decoder_for(sweep.method_of(folder))
    parse_options(args.decode_options, decode)
    return sweep.parse_grid(args.sweep, decode)


def run_decode(loaded: LoadedModel, args: argparse.Namespace, strategies: Sequence[Strategy]) -> None:
    """Compare decoding strategies on prompts, print, and write what was asked for."""
    prompts, origin = prompts_of(loaded, args)
    results = decoding.evaluate(
        loaded,
        strategies,
        prompts,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        sampling=sampling_of(args),
        on_batch=lambda done: progress.plain_line(f"{done} of {len(prompts)} prompts"),
    )
    truth = decoding.reference(loaded.model, prompts)
    rows = [asdict(result) for result in results]
    if args.json:
        told = {
            name: getattr(args, name) for name in ("max_new_tokens", "batch_size", "temperature", "top_k")
        }
        told |= {"top_p": args.top_p, "seed": args.seed}
        about = {"checkpoint": str(loaded.path), "method": loaded.method, "data": origin}
        counted = {"prompts": len(prompts), "prompt_tokens": [len(prompt.tokens) for prompt in prompts]}
        print(json.dumps({**about, **counted, **told, "reference": truth, "results": rows}))
    else:
        how = "greedy" if args.temperature == 0 else f"temperature {args.temperature:g}"
        print(f"{loaded.path}: {len(prompts)} prompts ({origin}), {args.max_new_tokens} new tokens, {how}")
        print(decoding.table(results))
        if truth is not None:
            print(decoding.describe_reference(truth))
    if args.csv is not None:
        decoding.write_csv(args.csv, results)
    publish.publish(args, loaded, rows, names=["strategy"], prefix="decode")


def prompts_of(loaded: LoadedModel, args: argparse.Namespace) -> tuple[list[Prompt], str]:
    """The prompts, and where they come from."""
    if args.prompts_file is not None:
        return file_prompts(loaded, args.prompts_file, count=args.prompts), str(args.prompts_file)
    return held_out_prompts(
        loaded,
        count=args.prompts,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.max_new_tokens,
        seed=args.seed,
    )


def task_and_lengths(loaded: LoadedModel, args: argparse.Namespace) -> tuple[Task, int | None, list[int]]:
    """The task with its knobs, the greatest length in training, and the lengths to evaluate."""
    given = {knob: getattr(args, knob) for knob in tasks.KNOBS if getattr(args, knob) is not None}
    lengths = tasks.parse_lengths(args.lengths) if args.lengths is not None else None
    task, trained = tasks.task_of_run(
        args.task, loaded.config, overrides=given, length=lengths[0] if lengths else None
    )
    return task, trained, lengths or list(range(task.least_length, task.longest + 1))


def run_task_decoded(loaded: LoadedModel, args: argparse.Namespace, strategies: Sequence[Strategy]) -> None:
    """Evaluate on a task in words with every strategy, print, and write what was asked for."""
    task, trained, lengths = task_and_lengths(loaded, args)
    decoders = {s.name: chosen_decoder(s, loaded.model, method=loaded.method) for s in strategies}
    width = max(len(name) for name in ("strategy", *decoders))
    head = [f"{loaded.path}: {tasks.describe(task)}; length in {task.length_is}"]
    curves: dict[str, list[tasks.LengthResult]] = {}
    for name, decode in decoders.items():

        def show(result: tasks.LengthResult, name: str = name) -> None:
            if head:
                print(head.pop(), f"{'strategy':<{width}}  {tasks.header(result)}", sep="\n")
            print(f"{name:<{width}}  {tasks.row(result)}", flush=True)

        curves[name] = tasks.evaluate_lengths(
            loaded.model,
            task,
            lengths,
            samples=args.samples,
            batch_size=args.batch_size,
            seed=args.seed,
            trained_maximum=trained,
            text=replace(tasks.TextSetup.of(loaded), decode=decode),
            on_result=None if args.json else show,
            what=name,
        )
    if args.json:
        told = report(loaded, task, trained, [], seed=args.seed, decode_options={})
        print(json.dumps({**told, "results": {k: tasks.records(v) for k, v in curves.items()}}))
    rows = [{"strategy": name, **row} for name, found in curves.items() for row in tasks.records(found)]
    if args.csv is not None:
        decoding.write_rows(args.csv, rows, names=list(rows[0]))
    picture = partial(draw, curves=curves, task=task, trained=trained)
    publish.publish(args, loaded, rows, names=["strategy", "length"], prefix=task.name, draw=picture)


def run_task(loaded: LoadedModel, args: argparse.Namespace) -> None:
    """Evaluate on a synthetic task, print, and write what was asked for."""
    task, trained, lengths = task_and_lengths(loaded, args)
    head = [f"{loaded.path}: {tasks.describe(task)}; length in {task.length_is}"]

    def show(result: tasks.LengthResult) -> None:
        if head:
            print(head.pop(), tasks.header(result), sep="\n")
        print(tasks.row(result), flush=True)

    text = tasks.TextSetup.of(loaded, options=args.decode_options) if isinstance(task, TextTask) else None
    results = tasks.evaluate_lengths(
        loaded.model,
        task,
        lengths,
        samples=args.samples,
        batch_size=args.batch_size,
        seed=args.seed,
        trained_maximum=trained,
        text=text,
        on_result=None if args.json else show,
        what=task.name,
    )
    if args.json:
        options = dict(text.options) if text is not None else {}
        print(json.dumps(report(loaded, task, trained, results, seed=args.seed, decode_options=options)))
    if args.csv is not None:
        tasks.write_csv(args.csv, results)
    rows = tasks.records(results)
    picture = partial(draw, curves={loaded.method: results}, task=task, trained=trained)
    publish.publish(args, loaded, rows, names=["length"], prefix=task.name, draw=picture)


def run_sweep(loaded: LoadedModel, args: argparse.Namespace, grid: sweep.Grid) -> None:
    """Evaluate the method's decoder over a grid of its options, print, and write what was asked for."""
    task, trained, lengths = task_and_lengths(loaded, args)
    assert isinstance(task, TextTask)
    text = tasks.TextSetup.of(loaded, options=args.decode_options)
    results = sweep.evaluate(
        loaded.model,
        task,
        lengths,
        sweep.settings_of(grid),
        text=text,
        samples=args.samples,
        batch_size=args.batch_size,
        seed=args.seed,
        cost=args.cost,
        on_batch=sweep.show_progress,
    )
    cost = args.cost or sweep.default_cost(results)
    records = [result.record() for result in results]
    if args.json:
        told = report(loaded, task, trained, [], seed=args.seed, decode_options=dict(text.options))
        about = {"lengths": lengths, "batch_size": args.batch_size, "sweep": grid, "cost": cost}
        print(json.dumps({**told, **about, "results": records}))
    else:
        spread = f"{task.length_is} {', '.join(map(str, lengths))}"
        print(f"{loaded.path}: {tasks.describe(task)}; {spread}; {args.samples} samples each")
        print(sweep.table(results), f"* on the frontier of accuracy and {sweep.COSTS[cost]}", sep="\n")
    if args.csv is not None:
        decoding.write_rows(args.csv, records, names=list(records[0]))
    title = f"{loaded.method}, {tasks.describe(task)}"
    picture = partial(sweep.draw, results=results, cost=cost, title=title)
    publish.publish(args, loaded, records, names=list(grid), prefix=f"{task.name}/sweep", draw=picture)


def run_depths(loaded: LoadedModel, args: argparse.Namespace, grid: sweep.Grid) -> None:
    """Count in which pass each kind of token is committed, print, and write what was asked for."""
    depths.passes_of(loaded.model, method=loaded.method)
    task, trained, lengths = task_and_lengths(loaded, args)
    assert isinstance(task, TextTask)
    text = tasks.TextSetup.of(loaded, options=args.decode_options)
    results = depths.evaluate(
        loaded.model,
        task,
        lengths,
        sweep.settings_of(grid),
        method=loaded.method,
        text=text,
        samples=args.samples,
        batch_size=args.batch_size,
        seed=args.seed,
        on_batch=sweep.show_progress,
    )
    records = [result.record() for result in results]
    if args.json:
        told = report(loaded, task, trained, [], seed=args.seed, decode_options=dict(text.options))
        print(json.dumps({**told, "lengths": lengths, "sweep": grid, "results": records}))
    else:
        spread = f"{task.length_is} {', '.join(map(str, lengths))}"
        print(f"{loaded.path}: {tasks.describe(task)}; {spread}; {args.samples} samples each")
        print(depths.table(results))
    if args.csv is not None:
        decoding.write_rows(args.csv, records, names=list(records[0]))
    picture = partial(depths.draw, results=results, title=f"{loaded.method}, {tasks.describe(task)}")
    names = [*grid, "kind"]
    publish.publish(args, loaded, records, names=names, prefix=f"{task.name}/depths", draw=picture)


def draw(path: Path, curves: dict[str, list[tasks.LengthResult]], task: Task, trained: int | None) -> None:
    """Accuracy against length."""
    plots.draw_lengths(
        path, curves, trained_maximum=trained, length_is=task.length_is, title=tasks.describe(task)
    )


def report(
    loaded: LoadedModel,
    task: Task,
    trained: int | None,
    results: list[tasks.LengthResult],
    *,
    seed: int,
    decode_options: dict[str, Any],
) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "checkpoint": str(loaded.path),
        "method": loaded.method,
        "task": task.name,
        "knobs": tasks.used(task),
        "trained_maximum": trained,
        "seed": seed,
        "decode_options": decode_options,
        "results": tasks.records(results),
    }


if __name__ == "__main__":
    run_cli(main)
