"""What a machine with CUDA must show, as one table; under five minutes on one GPU.

    python -m tests.gpu.check            # exits with 1 if a row fails; says so and ends without CUDA
    python -m tests.gpu.check --device cpu --only kernels,steps   # the same code here, for its tests

Sections: kernels (flex and varlen against dense, each mask), steps (losses of each method's debug model
against the CPU's), speed (a step against AR's), recompiles, syncs (waits for the device in a step that is
not logged) and memory (the largest use against the planner's).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.models.common.attention import FlexAttention

import torchtitan_ext  # noqa: F401  (installs the CPU device before torchtitan is imported)
from tests.distributed import jobs
from tests.paths import ROOT
from tests.unit import test_trajectories_common as made
from tests.unit.test_compile_steps import counted
from tests.unit.test_host_sync import CASES, Watch, batch
from torchtitan_ext import attention, device, masks, models
from torchtitan_ext.errors import UserError, run_cli, unknown
from torchtitan_ext.planning import fake_run, layers, step
from torchtitan_ext.trainer import default_config
from torchtitan_ext.trajectories.shards import Trajectory

METHODS = ("ar", "looped", "t2mlr", "tidar", "block_diffusion", "wedlm", "alodlm", "mdlm", "tdlm")
LENGTHS = (1, 300, 83, 128)
"""Tokens of the documents under which kernels are compared."""

LOSS_STEPS, TIMED_STEPS = 3, 8
KERNEL_LIMIT = {"cuda": 3e-2, "cpu": 1e-5}
"""Largest error beside dense: bfloat16 on a GPU, float32 here."""

LOSS_LIMIT = 2e-3
MEMORY_LIMIT = 0.15


class Row(NamedTuple):
    """A line of the table."""

    section: str
    what: str
    got: str
    wanted: str
    good: bool


class Settings(NamedTuple):
    """Where and on what the check runs."""

    device: str
    methods: tuple[str, ...]
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def args(self, method: str) -> list[str]:
        """The config of a method's debug model, one process, 32-bit numbers."""
        data = ["--dataloader.dataset", "trajectories", "--dataloader.dataset_path", str(self.folder / "set")]
        small = ["--training.local_batch_size", "2", "--metrics.log_freq", "1000"]
        return [*CASES[method], *small, *(data if method == "tdlm" else []), "--comm.mode", "fake_backend"]


# --- kernels -------------------------------------------------------------------------------


def mask_kinds(where: str) -> dict[str, tuple[masks.Mask, tuple[str, ...]]]:
    """Every kind of mask over :data:`LENGTHS`, and the kernels that can compute it."""
    once = torch.cat([torch.arange(n, device=where) for n in LENGTHS])[None]
    twice = once.repeat(1, 2)
    both = ("flex", "varlen") if where == "cuda" else ("flex",)
    doubled = masks.doubled_blocks
    return {
        "causal": (masks.causal_document(once), both),
        "bidirectional": (masks.bidirectional_document(once), both),
        "doubled, block": (doubled(twice, block_size=8), ("flex",)),
        "doubled, last block": (doubled(twice, block_size=8, layout="last_block"), ("flex",)),
        "doubled, clean by block": (doubled(twice, block_size=8, clean="block"), ("flex",)),
        "dual stream": (masks.dual_stream(twice, block_size=32), ("flex",)),
    }


def attended(backend: str, mask: masks.Mask, *, backward: bool) -> list[torch.Tensor]:
    """Output, and gradients of queries, keys and values, of a kernel with grouped heads."""
    where = mask.positions_BL.device
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, width: int = 64) -> torch.Tensor:
        return torch.randn(1, mask.q_len, heads, width, generator=generator).to(where, dtype)

    q, k, v, weight = draw(4), draw(2), draw(2), draw(4)
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]
    module = attention.inner_attention_config(backend).build()
    out = module(*inputs, attention_masks=attention.build_mask(mask, backend), enable_gqa=True)
    return [out, *(torch.autograd.grad((out * weight).sum(), inputs) if backward else [])]


def kernels(settings: Settings) -> Iterator[Row]:
    """Largest error of each kernel beside dense, relative to the largest number there."""
    limit = KERNEL_LIMIT[settings.device]
    for name, (mask, backends) in mask_kinds(settings.device).items():
        expected = attended("dense", mask, backward=settings.cuda)
        for backend in backends:
            found = attended(backend, mask, backward=settings.cuda)
            pairs = zip(found, expected, strict=True)
            errors = [float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs]
            yield Row(
                "kernels", f"{backend}, {name}", f"{max(errors):.1e}", f"<= {limit:g}", max(errors) <= limit
            )


# --- steps ---------------------------------------------------------------------------------


@contextlib.contextmanager
def trainer_of(args: list[str]) -> Iterator[tuple[Any, Any]]:
    """A trainer in a world of one, and rows whose documents differ in every step."""
    with tempfile.TemporaryDirectory() as folder, fake_run._world(1):
        trainer = jobs.build(folder, args)
        length = trainer.config.training.seq_len
        cuts = (2 + 7 * i % (length - 8) for i in range(1, 10**6))
        trainer.step = 1  # nothing but the first step is logged
        yield trainer, trainer.batch_generator(batch(trainer.config, cut=cut) for cut in cuts)
        trainer.close()


def one_step(trainer: Any, rows: Any) -> None:
    """The trainer's own, unlogged."""
    trainer.step += 1
    trainer.train_step(rows)


def losses(args: list[str]) -> list[float]:
    """Of the first steps."""
    with trainer_of(args) as (trainer, rows):
        found: list[torch.Tensor] = []
        body = trainer.fwd_bwd_fn

        def kept(*given: Any, **named: Any) -> Any:
            loss = body(*given, **named)
            found.append(loss.detach().clone())
            return loss

        trainer.fwd_bwd_fn = kept
        for _ in range(LOSS_STEPS):
            one_step(trainer, rows)
        return [float(loss) for loss in found]


def cpu_losses(settings: Settings) -> dict[str, list[float]]:
    """The same in a process that sees no GPU."""
    command = [sys.executable, "-m", "tests.gpu.check", "--device", "cpu", "--losses", str(settings.folder)]
    done = subprocess.run(
        [*command, "--methods", ",".join(settings.methods)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    if done.returncode:
        raise RuntimeError(f"losses on the CPU: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def steps(settings: Settings) -> Iterator[Row]:
    """Losses of the first steps, with the device's own kernel and with dense, beside the CPU's."""
    expected = cpu_losses(settings)
    for method in settings.methods:
        for kernel in ("auto", "dense") if settings.cuda else ("dense",):
            found = losses([*settings.args(method), "--model.attention", kernel])
            error = max(abs(a - b) / abs(b) for a, b in zip(found, expected[method], strict=True))
            shown = f"{found[-1]:.5f} (off by {error:.1e})"
            wanted = f"{expected[method][-1]:.5f} within {LOSS_LIMIT:g}"
            yield Row("steps", f"{method}, {kernel}", shown, wanted, error <= LOSS_LIMIT)


# --- speed, memory -------------------------------------------------------------------------

LARGE = ["--model.flavor", "smollm2-135M", "--training.seq_len", "1024"]


def large(settings: Settings, method: str) -> list[str]:
    """The config that is timed: a real size where the method has one that fits; the debug model here."""
    args = settings.args(method)
    if not settings.cuda or method in ("mdlm", "tdlm"):
        return args
    return [*args, *LARGE, "--training.local_batch_size", "4", "--training.mixed_precision_param", "bfloat16"]


def synchronize(settings: Settings) -> None:
    if settings.cuda:
        torch.cuda.synchronize()


def timed(settings: Settings, args: list[str]) -> tuple[float, int]:
    """Median seconds of a step, and the most bytes that it holds (0 on the CPU)."""
    with trainer_of(args) as (trainer, rows):
        seconds = []
        for number in range(2 + TIMED_STEPS):
            if settings.cuda and number == 2:
                torch.cuda.reset_peak_memory_stats()
            synchronize(settings)
            begin = time.perf_counter()
            one_step(trainer, rows)
            synchronize(settings)
            seconds.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() if settings.cuda else 0
    return statistics.median(seconds[2:]), peak


def planned_peak(settings: Settings, args: list[str]) -> int:
    """Bytes of the planner's largest moment of the same step."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.toml").write_text(jobs.CONFIG)
        argv = ["--job.config_file", f"{folder}/config.toml", *args, "--model.attention", "dense"]
        config = jobs.front.parse(argv, make_default=default_config)
    spec: Any = models.build_spec(config)
    config.model_spec, config.loss.global_vocab_size = spec, spec.model.vocab_size
    with step.fake_world(1):
        found = step.measure(config, spec, world=1, stand_in="flex" if settings.cuda else None)
    return sum(layers._summed(found, places={}).peak().values())


def speed(settings: Settings) -> Iterator[Row]:
    """Time of a step over AR's at the same size, to read, and memory beside the plan."""
    base, base_debug = None, None
    for method in dict.fromkeys(("ar", *settings.methods)):
        args = large(settings, method)
        seconds, peak = timed(settings, args)
        if method == "ar":
            base = seconds
            base_debug = timed(settings, settings.args("ar"))[0] if settings.cuda else seconds
        over = base if args != settings.args(method) or not settings.cuda else base_debug
        assert over is not None
        yield Row("speed", method, f"{seconds * 1e3:.1f} ms, {seconds / over:.2f} x AR", "to read", True)
        plan = planned_peak(settings, args)
        if not settings.cuda:
            yield Row("memory", method, "-", f"planned {plan / 2**20:.1f} MiB", plan > 0)
            continue
        off = peak / plan - 1
        wanted = f"planned {plan / 2**20:.1f} MiB within {MEMORY_LIMIT:.0%}"
        # A debug model is smaller than what libraries hold for themselves.
        good = abs(off) <= MEMORY_LIMIT or args == settings.args(method)
        yield Row("memory", method, f"{peak / 2**20:.1f} MiB ({off:+.0%})", wanted, good)


# --- recompiles, waits ---------------------------------------------------------------------


def recompiles(settings: Settings) -> Iterator[Row]:
    """Graphs that the blocks are compiled to after the first step."""
    compiled = ["--compile.enable", "true", "--compile.components", "model", "--compile.backend", "counting"]
    for method in settings.methods:
        with counted() as graphs, trainer_of([*settings.args(method), *compiled]) as (trainer, rows):
            one_step(trainer, rows)
            first = len(graphs)
            for _ in range(5):
                one_step(trainer, rows)
            more = len(graphs) - first
        yield Row("recompiles", method, f"{more} after the first step's {first}", "0", more == 0)


def waits(settings: Settings, trainer: Any, rows: Any) -> list[str]:
    """Where a step waits for the device: CUDA's own warnings, or what the CPU's watch sees."""
    if not settings.cuda:
        with Watch() as watch:
            one_step(trainer, watch.between(rows))
        return [f"{where}:{name}" for name, where in watch.seen.elements()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            one_step(trainer, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "synchroniz" in str(w.message)]
    return [f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in found]


ALLOWED_WAITS = {"cuda": 16, "cpu": 2}
"""On a GPU a batch's few tensors and counts are copied to it one by one, each from pageable memory, which
waits for the copy alone; on the CPU the guard's read and torchtitan's count of the batch."""


def syncs(settings: Settings) -> Iterator[Row]:
    """Waits in a step that is not logged."""
    limit = ALLOWED_WAITS[settings.device]
    for method in settings.methods:
        with trainer_of(settings.args(method)) as (trainer, rows):
            for _ in range(2):
                one_step(trainer, rows)
            found = waits(settings, trainer, rows)
        where = ", ".join(f"{place} x{found.count(place)}" for place in sorted(set(found)))
        yield Row("syncs", method, f"{len(found)}: {where}", f"<= {limit}", len(found) <= limit)


# --- the table -----------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "kernels": kernels,
    "steps": steps,
    "syncs": syncs,
    "recompiles": recompiles,
    "speed": speed,
}


def rows_of(section: str, settings: Settings) -> list[Row]:
    """A section's rows; an error is a row that fails, and its trace goes to stderr."""
    found: list[Row] = []
    try:
        found.extend(SECTIONS[section](settings))
    except Exception as error:  # the other sections are still worth a minute of a GPU
        traceback.print_exc()
        last = (str(error).splitlines() or [""])[0]
        found.append(Row(section, "error", f"{type(error).__name__}: {last}"[:120], "none", False))
    return found


def table(rows: list[Row]) -> str:
    """Columns that line up; the last says whether a row is as it must be."""
    lines = [
        ("section", "what", "got", "wanted", ""),
        *((*row[:4], "ok" if row.good else "FAIL") for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


@contextlib.contextmanager
def plain_flex(where: str) -> Iterator[None]:
    """FlexAttention without its search for the fastest kernel, which takes minutes; uncompiled on the CPU."""
    tuned = FlexAttention._compiled_flex_attn
    plain: Any = torch.compile(flex_attention) if where == "cuda" else flex_attention
    FlexAttention._compiled_flex_attn = staticmethod(plain)  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        FlexAttention._compiled_flex_attn = tuned


def make_data(folder: Path) -> None:
    """Trajectories for TDLM's loader."""
    rows = [Trajectory(i, [1, 2, 3], [5] * 8, list(range(1, 9)), 8, None) for i in range(4)]
    tokenizer = default_config({"name": "ar"}).tokenizer.build(tokenizer_path="")
    made.made_up_set(folder / "set", rows, tokenizer=tokenizer)


def chosen(flag: str, text: str | None, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a list on the command line; all of them where none is given."""
    names = allowed if text is None else tuple(text.split(","))
    for name in names:
        if name not in allowed:
            raise unknown(flag, name, allowed)
    return names


def check(settings: Settings, sections: tuple[str, ...]) -> list[Row]:
    """All rows."""
    with plain_flex(settings.device):
        return [row for section in sections for row in rows_of(section, settings)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", metavar="SECTIONS", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--methods", metavar="NAMES", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--losses", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Check, print the table, and exit with 1 if a row fails."""
    args = parser().parse_args(argv)
    sections = chosen("--only", args.only, tuple(SECTIONS))
    methods = chosen("--methods", args.methods, METHODS)
    logging.disable(logging.INFO)
    if args.losses:
        settings = Settings("cpu", methods, Path(args.losses))
        found = {m: losses([*settings.args(m), "--model.attention", "dense"]) for m in methods}
        print(json.dumps(found))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: this machine has no CUDA device (--device cpu runs the same code without one)")
        return
    if args.device == "cpu" and torch.cuda.is_available():
        raise UserError(
            "--device cpu needs CUDA_VISIBLE_DEVICES= here, since torchtitan takes the GPU it sees"
        )
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        rows = check(Settings(args.device, methods, Path(folder)), sections)
    print(table(rows))
    name = (
        torch.cuda.get_device_name() if args.device == "cuda" else device.__name__.split(".")[0] + " on a CPU"
    )
    bad = sum(not row.good for row in rows)
    seconds = time.perf_counter() - begin
    print(f"{name}, torch {torch.__version__}: {len(rows)} rows, {bad} failed, {seconds:.0f} s")
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(main)
