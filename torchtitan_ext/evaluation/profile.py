"""Where the time of a training step or of a decoding goes, operator by operator."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torchtitan.tools import utils

from torchtitan_ext import backbones
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import bench, bench_cases, bench_decode, bench_tdlm
from torchtitan_ext.trainer import ExtTrainer

Work = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator, or one operator on tensors of one shape."""

    name: str
    calls: int
    self_ms: float
    """Without the operators that it calls."""

    share: float
    """Of the self time of all operators."""

    shapes: str = ""
    """Shapes of its inputs, if they were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What some repetitions of one piece of work spent."""

    what: str
    operators: list[Operator]
    """By self time, the most first."""

    wall_ms: float
    """Time that passed without the profiler, for one repetition."""

    repeats: int

    @property
    def operators_ms(self) -> float:
        """Self time of all operators in one repetition, as the profiler saw it."""
        return sum(operator.self_ms for operator in self.operators) / self.repeats


def profile(
    method: str,
    *,
    decode: bool = False,
    repeats: int = 3,
    threads: int = 2,
    quick: bool = False,
    shapes: bool = False,
    trace: Path | None = None,
) -> Profile:
    """Profile training steps, or with ``decode`` whole decodings, of one method.

    ``repeats``: after one that is not looked at. ``trace``: write the events for a trace viewer.
    ``shapes``: a line for each operator and shapes of its inputs. ``quick``: tiny sizes.
    Errors: an unknown method.
    """
    bench_cases.check_method(method)
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")
    if trace is not None and (trace.is_dir() or not trace.parent.is_dir()):
        raise UserError(f"cannot write {trace}: {'it is a folder' if trace.is_dir() else 'no such folder'}")
    prepared = decoding_work if decode else training_work
    with prepared(method, quick=quick) as (what, work), bench.cpu_threads(threads):
        return measure(what, work, repeats=repeats, shapes=shapes, trace=trace)


def measure(
    what: str, work: Work, *, repeats: int, shapes: bool = False, trace: Path | None = None
) -> Profile:
    """Profile some work."""
    work()
    begin = time.perf_counter()
    work()
    wall = time.perf_counter() - begin
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=shapes) as recorded:
        for _ in range(repeats):
            work()
    if trace is not None:
        part = trace.with_name(f".{trace.name}.part.json")
        recorded.export_chrome_trace(str(part))
        part.replace(trace)
    return Profile(
        what=what, operators=_operators(recorded, shapes=shapes), wall_ms=1e3 * wall, repeats=repeats
    )


def _operators(recorded: Any, *, shapes: bool) -> list[Operator]:
    on_device = utils.device_type != "cpu"
    events = recorded.key_averages(group_by_input_shape=shapes)

    def self_us(event: Any) -> float:
        return event.self_device_time_total if on_device else event.self_cpu_time_total

    total = sum(map(self_us, events)) or 1.0
    return [
        Operator(
            name=event.key,
            calls=event.count,
            self_ms=self_us(event) / 1e3,
            share=self_us(event) / total,
            shapes=_short(event.input_shapes) if shapes else "",
        )
        for event in sorted(events, key=self_us, reverse=True)
    ]


def _short(shapes: Sequence[Any]) -> str:
    """Shapes of the tensors among an operator's inputs."""
    return " ".join("x".join(map(str, shape)) for shape in shapes if shape and isinstance(shape[0], int))


def lines(result: Profile, *, top: int) -> list[tuple[str, ...]]:
    """A header and the ``top`` operators, each with its time in one repetition."""
    with_shapes = any(operator.shapes for operator in result.operators)
    header = ("operator", "calls", "self ms", "share", *(("shapes",) if with_shapes else ()))
    rows = [
        (
            operator.name[:60],
            f"{operator.calls / result.repeats:,.0f}",
            f"{operator.self_ms / result.repeats:,.2f}",
            f"{100 * operator.share:.1f}%",
            *((operator.shapes[:80],) if with_shapes else ()),
        )
        for operator in result.operators[:top]
    ]
    return [header, *rows]


def summary(result: Profile) -> str:
    """What was profiled, and how much of its time is in operators."""
    calls = sum(operator.calls for operator in result.operators) / result.repeats
    return (
        f"{result.what}: {result.wall_ms:,.1f} ms without the profiler; with it "
        f"{result.operators_ms:,.1f} ms in {calls:,.0f} operators; mean of {result.repeats} repetitions"
    )


# --- what is profiled ------------------------------------------------------------------


@contextlib.contextmanager
def training_work(method: str, *, quick: bool) -> Generator[tuple[str, Work]]:
    """A training step of the benchmark's sizes, data and optimizer included; TDLM: without those two."""
    if method == "tdlm":
        sizes = bench_tdlm.QUICK if quick else bench_tdlm.WIDE
        step = bench_tdlm.training_works(bench_tdlm.build(sizes), sizes)[0]
        yield f"train tdlm {sizes.name}, K = {sizes.states}, forward and backward", step
        return
    size = bench.TRAIN_QUICK if quick else bench.TRAIN
    with tempfile.TemporaryDirectory() as name, bench.one_process_world():
        folder = Path(name)
        (folder / "plain").mkdir()
        plain = bench.our_config(size, folder=folder / "plain")
        trainer = ExtTrainer(bench_cases.train_config(method, plain, folder=folder / method))
        try:
            shape = f"{bench.OURS.n_layers} x {bench.OURS.dim}, batch {size.batch} x {size.seq_len}"
            yield f"train {method} {shape}", bench.training_step(trainer)
        finally:
            trainer.close()


@contextlib.contextmanager
def decoding_work(method: str, *, quick: bool) -> Generator[tuple[str, Work]]:
    """A decoding of one row of the benchmark's sizes, random weights."""
    size = bench_decode.DECODE_QUICK if quick else bench_decode.DECODE
    backbone = backbones.lookup(size.flavor)
    model = bench_cases.build(method, backbone)
    prompts = bench.random_prompts(1, size.prompt_tokens, vocab_size=backbone.vocab_size - 1)
    new = size.new_tokens if quick else size.new_tokens // 2
    work = bench_cases.decoding(method, model, prompts, new_tokens=new)
    yield f"decode {method} {size.flavor}'s sizes, 1 x {size.prompt_tokens}+{new}", work
