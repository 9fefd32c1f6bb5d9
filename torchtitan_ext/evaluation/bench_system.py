"""What surrounds a training step: the data, the start, and converting its result."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext import backbones
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import bench
from torchtitan_ext.trainer import ExtTrainer

DATA_GOAL = 50.0
"""A step's data may take 2% of the step."""

COPY_GOAL = 0.5
"""A conversion should go at half the speed of copying its files."""

START_SECONDS = 20.0
"""A debug model's first step should be over by then."""

ROOT = Path(__file__).resolve().parent.parent.parent
STEP = re.compile(r"step:\s+1\b")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


# --- data ------------------------------------------------------------------------------


def bench_data(settings: bench.Settings) -> list[bench.Row]:
    """How long a training step of ``ar`` waits for its batch, preparation included."""
    size = bench.TRAIN_QUICK if settings.quick else bench.TRAIN
    with tempfile.TemporaryDirectory() as folder, bench.one_process_world():
        trainer = ExtTrainer(bench.our_config(size, folder=Path(folder)))
        try:
            with bench.cpu_threads(settings.threads):
                waits, steps = _waits(trainer, count=4 * settings.rounds)
        finally:
            trainer.close()
    rounds = bench.pairs([1e3 * x for x in waits], [1e3 * x for x in steps])
    shape = f"{bench.OURS.n_layers} x {bench.OURS.dim}, batch {size.batch} x {size.seq_len}"
    row = bench.row_of(
        f"data of a step, {shape}: waiting for it / the whole step",
        rounds,
        unit="ms",
        goal=DATA_GOAL,
        note="one process, which also tokenises; the ratio is the step's time over the waiting",
    )
    return [replace(row, ratios=[r.peer / max(r.ours, 1e-6) for r in rounds])]


def _waits(trainer: ExtTrainer, *, count: int) -> tuple[list[float], list[float]]:
    """Seconds spent inside the iterator, and of the whole step, step by step; the first is left out."""
    waited = [0.0]

    def timed(batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            begin = time.perf_counter()
            batch = next(batches)
            waited[-1] += time.perf_counter() - begin
            yield batch

    step = bench.training_step(trainer, through=timed)
    seconds = []
    for _ in range(count + 1):
        waited.append(0.0)
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return waited[2:], seconds[1:]


# --- conversion ------------------------------------------------------------------------


def bench_convert(settings: bench.Settings) -> list[bench.Row]:
    """Both directions of a conversion against copying the same bytes, and the memory they take."""
    from safetensors.torch import save_file

    size, shard = CONVERTED, 64 * 2**20
    if settings.quick:
        size, shard = backbones.lookup("smollm2-debug"), 2**18
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hf, checkpoint, back, copies = (folder / part for part in ("hf", "dcp", "back", "copies"))
        hf.mkdir()
        (hf / "config.json").write_text(json.dumps(backbones.hf_config(size)))
        save_file(_weights(size), str(hf / "model.safetensors"))
        convert_from_hf(hf, checkpoint)
        total = (hf / "model.safetensors").stat().st_size

        def take() -> int:
            convert_from_hf(hf, checkpoint, overwrite=True)
            return total

        def give() -> int:
            convert_to_hf(checkpoint, back, max_shard_bytes=shard, overwrite=True)
            return total

        def copy() -> int:
            copies.mkdir(exist_ok=True)
            target = copies / "model.safetensors"
            shutil.copyfile(hf / "model.safetensors", target)
            descriptor = os.open(target, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            return total

        taken, given, copied = bench.interleave((take, give, copy), rounds=settings.rounds)
        # In runs of their own: the sampling costs time, which the copy would not have paid.
        memory = {name: _most_memory(work) for name, work in zip(CONVERSIONS, (take, give), strict=True)}
    megabytes = [rate / 2**20 for rate in copied]
    what = f"convert {total / 2**20:,.0f} MiB "
    rows = [
        bench.row_of(
            f"{what}{name}: ours / copying the file",
            bench.pairs([rate / 2**20 for rate in rates], megabytes),
            unit="MiB/s",
            goal=COPY_GOAL,
            note="the copy is flushed to the disk",
        )
        for name, rates in zip(CONVERSIONS, (taken, given), strict=True)
    ]
    return rows + [
        bench.row_of_once(
            f"{what}{name}, memory: ours / two shards",
            most / 2**20,
            2 * shard / 2**20,
            unit="MiB",
            goal=1.0,
            note="anonymous memory of the process above what it had before, sampled",
            least=1e-3,
        )
        for name, most in memory.items()
        if most is not None
    ]


CONVERSIONS = ("Hugging Face to DCP", "DCP to Hugging Face")


CONVERTED = replace(backbones.lookup("smollm2-135M"), vocab_size=16384, tied=True)
"""SmolLM2-135M with a smaller embedding, so that no tensor is larger than a shard."""


def _weights(size: backbones.BackboneSize) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face names."""
    config = backbones.build_config(size, attention="dense")
    model = config.build()
    model.init_weights()
    named = backbones.HFAdapter(config, None).to_hf(model.state_dict())
    return {name: tensor.detach().clone().contiguous() for name, tensor in named.items()}


def _most_memory(work: bench.Work, *, runs: int = 2) -> int | None:
    """The most of :func:`rise_of_memory` in some runs; None where the system does not say."""
    grown: list[int] = []
    for _ in range(runs):
        with rise_of_memory(grown):
            work()
    return max(grown, default=None)


@contextmanager
def rise_of_memory(into: list[int]) -> Generator[None]:
    """Append how many bytes of anonymous memory the process had at most above its beginning (Linux)."""
    _give_back()
    begin = _anonymous()
    if begin is None:
        yield
        return
    peak, done = [begin], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _anonymous() or 0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    into.append(peak[0] - begin)


def _give_back() -> None:
    """Return freed memory to the system, else what was used earlier hides what is needed now."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _anonymous() -> int | None:
    """RssAnon of this process in bytes; None where the system does not say."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
    return int(found[1]) * 1024 if found else None


# --- start -----------------------------------------------------------------------------

STARTED = ("ar", "t2mlr", "tidar", "alodlm")
"""Methods whose debug TOML is started; the others start the same way."""


def bench_start(settings: bench.Settings) -> list[bench.Row]:
    """From the command to the first step's log line of debug models, one process."""
    rows = []
    for method in STARTED[:1] if settings.quick else STARTED:
        toml = ROOT / "train_configs" / method / "debug.toml"
        if not toml.is_file():
            raise UserError(f"{toml} not found; the benchmark of the start needs a checkout")
        with tempfile.TemporaryDirectory() as folder:
            options = ["--job.config_file", str(toml), "--job.dump_folder", folder]
            command = ["-m", "torchtitan_ext.launch", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", "localhost:0", "-m", "torchtitan_ext.train", *options]
            if settings.quick:
                command = ["-c", "print('step:  1')"]
            seconds = seconds_to_first_step([sys.executable, *command])
        rows.append(
            bench.row_of_once(
                f"start to first step of {toml.relative_to(ROOT)}: ours / {START_SECONDS:.0f} s",
                seconds,
                START_SECONDS,
                unit="s",
                goal=1.0,
                note="one process, one thread, imports included"
                + ("; --quick starts an interpreter alone" if settings.quick else ""),
            )
        )
    return rows


def seconds_to_first_step(command: Sequence[str]) -> float:
    """Start a run, wait for its first step, end it. Errors: RuntimeError when it ends before."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    begin, lines = time.perf_counter(), []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(COLOUR.sub("", line))
                if STEP.search(lines[-1]):
                    return time.perf_counter() - begin
        finally:
            _end(process)
    raise RuntimeError(f"the run ended before its first step: {' '.join(lines[-3:]).strip()}")


def _end(process: subprocess.Popen) -> None:
    """Stop a run as a user would, and wait until every worker has closed the pipe; a debug run is short."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    process.stdout.read()
    process.wait()


BENCHMARKS: dict[str, bench.Benchmark] = {
    "data": bench_data,
    "convert": bench_convert,
    "start": bench_start,
}
