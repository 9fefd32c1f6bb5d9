"""``tools/evaluate.py --tasks``: benchmarks through lm-eval, the same code path as its own command line."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_ext import progress
from torchtitan_ext.device import usable_device
from torchtitan_ext.errors import UserError, unknown
from torchtitan_ext.evaluation import decoding, publish
from torchtitan_ext.evaluation.lm_eval import check_installed

BATCH_SIZE = 8
GYM = "reasoning_gym"
NAMES = ("arc_challenge", "arc_easy", "gsm8k", "humaneval", "openbookqa", "piqa", "winogrande")
"""Tasks with a file; those of reasoning-gym are reasoning_gym:NAME."""

GENERATED = ("gsm8k", "humaneval", GYM)

OPTIONS: dict[str, Any] = {
    "data": None,
    "limit": None,
    "num_fewshot": None,
    "method": None,
    "max_length": None,
    "mc_samples": 32,
    "skip_broken": False,
    "allow_code_execution": False,
    "sandbox_network": "refuse",
}
"""Options of --tasks alone, with their defaults."""


def add_arguments(add: Any) -> None:
    """Options of ``--tasks``; None tells that one was not given."""
    add("--tasks", metavar="NAME,...", help=f"benchmarks: {', '.join(NAMES)}, {GYM}:NAME")
    add("--data", metavar="PATH", help="folder with the benchmarks' files, or the file of the only one")
    add("--limit", type=int, help="samples of each benchmark, its first (default: all)")
    add("--num-fewshot", type=int, help="examples in a prompt (default: the benchmark's)")
    add("--method", help="refuse a checkpoint of another method")
    add("--max-length", type=int, help="a context shorter than the model's")
    add("--mc-samples", type=int, help="draws for each likelihood of mdlm and tdlm (default: 32)")
    add("--skip-broken", action="store_true", default=None, help="leave broken lines of a file out")
    add(
        "--allow-code-execution",
        action="store_true",
        default=None,
        help="run generated programs (humaneval) in a sandbox",
    )
    add("--sandbox-network", help="allow: run them where no network can be taken away (default: refuse)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One measure of one benchmark."""

    task: str
    metric: str
    value: float
    stderr: float | None
    samples: int
    shots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How benchmarks are run."""

    tasks: tuple[str, ...]
    """Names as on the command line."""

    data: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    skip_broken: bool = False
    allow_code_execution: bool = False
    sandbox_network: str = "refuse"
    seed: int = 0
    """Of the examples in prompts and of reasoning-gym's samples."""

    def metadata(self) -> dict[str, Any]:
        """What the tasks' loaders are given."""
        return {
            "data": self.data,
            "skip_broken": self.skip_broken,
            "sandbox_network": self.sandbox_network,
            "gym_seed": self.seed,
            "gym_size": self.limit or 200,
        }


def parse_tasks(text: str) -> tuple[str, ...]:
    """Names separated by commas. Errors: UserError for one that is unknown or comes twice."""
    names: list[str] = []
    for part in text.split(","):
        name = part.strip()
        known = name in NAMES or (name.startswith(f"{GYM}:") and name != f"{GYM}:")
        if not known:
            raise unknown("benchmark in --tasks", name, [*NAMES, f"{GYM}:NAME"])
        if name in names:
            raise UserError(f"--tasks {text!r}: {name} comes twice")
        names.append(name)
    return tuple(names)


def settings_of(args: argparse.Namespace) -> Settings:
    """Of a command line, refused before a model is loaded.

    Errors: UserError for options that do not fit, a missing package, or data that is not there.
    """
    for name, value in OPTIONS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    settings = Settings(
        tasks=parse_tasks(args.tasks),
        data=args.data,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        skip_broken=args.skip_broken,
        allow_code_execution=args.allow_code_execution,
        sandbox_network=args.sandbox_network,
        seed=args.seed,
    )
    for name, least in (("limit", 1), ("num_fewshot", 0), ("max_length", 2), ("mc_samples", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if settings.sandbox_network not in ("refuse", "allow"):
        raise unknown("--sandbox-network", settings.sandbox_network, ("refuse", "allow"))
    if "humaneval" in settings.tasks and not settings.allow_code_execution:
        raise UserError("humaneval runs programs that the model writes: give --allow-code-execution")
    decoded = [name for name in settings.tasks if name.split(":")[0] in GENERATED]
    if args.decode_options and not decoded:
        raise UserError("--decode-options has no use here: no benchmark of --tasks is decoded")
    if args.csv is not None and args.csv.is_dir():
        raise UserError(f"--csv {args.csv} is a folder, expected a file")
    if args.device is not None:
        usable_device(args.device)
    check_installed()
    _check_data(settings)
    return settings


def _check_data(settings: Settings) -> None:
    from torchtitan_ext.evaluation import local_tasks

    filed = [name for name in settings.tasks if name in NAMES and name != "humaneval"]
    if settings.data is not None and Path(settings.data).is_file() and len(settings.tasks) > 1:
        raise UserError(
            f"--data {settings.data} is a file, but --tasks names {len(settings.tasks)} benchmarks"
        )
    for name in filed:
        local_tasks.find_file(name, settings.data)
    for name in settings.tasks:
        if name.startswith(f"{GYM}:"):
            local_tasks.check_reasoning_gym(name.partition(":")[2])


def build_tasks(settings: Settings) -> list[Any]:
    """The lm-eval task objects, under the names of the command line.

    Errors: UserError for broken files, and for more examples in a prompt than there are.
    """
    from lm_eval.tasks import TaskManager

    from torchtitan_ext.evaluation.local_tasks import FOLDER, PREFIX

    built = []
    for name in settings.tasks:
        kind, _, gym = name.partition(":")
        metadata: dict[str, Any] = settings.metadata() | ({GYM: gym} if gym else {})
        manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
        (task,) = manager.load([f"{PREFIX}{kind}"])["tasks"].values()
        task.config.task = name
        shots = _shots(task, settings)
        if kind == "gsm8k" and shots > len(task.dataset["train"]):
            raise UserError(
                f"gsm8k shows {shots} examples, but there are {len(task.dataset['train'])} in a train.jsonl "
                "beside its file: give --num-fewshot 0"
            )
        built.append(task)
    return built


def _shots(task: Any, settings: Settings) -> int:
    """Examples in a prompt; lm-eval leaves tasks that have 0 at 0."""
    own = task.config.num_fewshot or 0
    return own if own == 0 or settings.num_fewshot is None else settings.num_fewshot


def evaluate(lm: Any, settings: Settings) -> list[Result] | None:
    """Every measure of every benchmark; None on all ranks but the first.

    Errors: UserError for what :func:`build_tasks` refuses, and for more ranks than samples.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    with progress.own_bars_alone():
        built = build_tasks(settings)
    for task in built:
        count = min(len(task.eval_docs), settings.limit or len(task.eval_docs))
        if count < lm.world_size:
            raise UserError(f"{task.config.task} has {count} samples for {lm.world_size} ranks: start fewer")
    with progress.own_bars_alone():
        found = simple_evaluate(
            model=lm,
            tasks=built,
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            task_manager=TaskManager(include_defaults=False),
            confirm_run_unsafe_code=settings.allow_code_execution,
            log_samples=False,
            fewshot_random_seed=settings.seed,
        )
    if found is None:
        return None
    shots = {task.config.task: _shots(task, settings) for task in built}
    return [
        result
        for name in settings.tasks
        for result in _results(
            name, found["results"][name], count=found["n-samples"][name]["effective"], shots=shots[name]
        )
    ]


def _results(name: str, measured: Mapping[str, Any], *, count: int, shots: int) -> list[Result]:
    rows = []
    for key, value in measured.items():
        metric, comma, which = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = measured.get(f"{metric}_stderr,{which}")
        known = isinstance(error, float) and math.isfinite(error)
        rows.append(
            Result(
                task=name,
                metric=metric,
                value=float(value),
                stderr=error if known else None,
                samples=count,
                shots=shots,
            )
        )
    return rows


def table(results: Sequence[Result]) -> str:
    """Aligned lines: a head, and one for each measure."""
    lines = [["benchmark", "samples", "shots", "measure", "value", "stderr"]]
    for r in results:
        error = "-" if r.stderr is None else f"{r.stderr:.4f}"
        lines.append([r.task, str(r.samples), str(r.shots), r.metric, f"{r.value:.4f}", error])
    return decoding.aligned(lines)


def run(args: argparse.Namespace) -> None:
    """What ``tools/evaluate.py --tasks`` does."""
    settings = settings_of(args)
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from torchtitan_ext.evaluation.lm_eval_model import ExtLM

    try:
        lm = ExtLM(
            args.path,
            step=args.step,
            method=args.method,
            batch_size=args.batch_size or BATCH_SIZE,
            max_length=args.max_length,
            dtype=args.dtype,
            device=args.device,
            mc_samples=args.mc_samples,
            mc_seed=args.seed,
            seed=args.seed,
            decode=args.decode_options,
        )
        publish.settle(args, lm.loaded)
        results = evaluate(lm, settings)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if results is not None:
        report(lm.get_model_info(), settings, results, args)
        rows = [asdict(result) for result in results]
        publish.publish(args, lm.loaded, rows, names=["task", "metric"], prefix="benchmarks")


def report(
    about: Mapping[str, Any], settings: Settings, results: Sequence[Result], args: argparse.Namespace
) -> None:
    """Print, and write what was asked for."""
    rows = [asdict(result) for result in results]
    if args.json:
        told = {**about, "data": settings.data, "limit": settings.limit, "seed": settings.seed}
        print(json.dumps({**told, "results": rows}))
    else:
        print(f"{about['checkpoint']}: {about['method']}, likelihood {about['likelihood']}")
        print(table(results))
    if args.csv is not None:
        decoding.write_rows(args.csv, rows, names=list(rows[0]))
    sys.stdout.flush()
