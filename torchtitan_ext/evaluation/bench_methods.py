"""What a method costs next to the plain autoregressive model of the same sizes, in training and decoding.

Both sides run in this project's trainer, in one process and one run.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from torchtitan_ext.evaluation import (
    bench,
    bench_cases,
    bench_decode,
    bench_memory,
    bench_reference,
    bench_t2mlr,
)
from torchtitan_ext.trainer import ExtTrainer

TIDAR_GOAL = 1 / 2.1
"""A doubled sequence: twice the linear layers, and attention that skips what is empty."""

OVER_FLOPS = 1.05
"""How much longer a step may take than its floating-point operations say."""


def bench_method(settings: bench.Settings, *, method: str) -> list[bench.Row]:
    """A training step and a decoding of a method: against ``ar``, the floors and the obvious way."""
    rows = against_ar(method, settings, goal=TIDAR_GOAL if method == "tidar" else None)
    with bench.cpu_threads(settings.threads):
        rows += bench_decode.method_rows(method, settings)
        rows += bench_reference.rows(method, settings)
        if method == "tidar":
            rows += bench_decode.tidar_forward(settings)
        if method == "alodlm":
            rows += bench_memory.alodlm_growth(settings)
        if method == "t2mlr" and settings.t2mlr_run is not None:
            rows += bench_t2mlr.convergence(settings.t2mlr_run, quick=settings.quick)
    return rows


def against_ar(method: str, settings: bench.Settings, *, goal: float | None = None) -> list[bench.Row]:
    """Three rows: rate of data tokens in training, FLOPs against the machine's, peak memory of a step.

    ``goal``: for rate and memory; None: for the rate what the models' FLOPs predict, with
    :data:`OVER_FLOPS` to spare, and none for the memory.
    """
    size = bench.TRAIN_QUICK if settings.quick else bench.TRAIN
    with tempfile.TemporaryDirectory() as name, bench.one_process_world():
        folder = Path(name)
        (folder / "ar").mkdir()
        plain = bench.our_config(size, folder=folder / "ar")
        other = bench_cases.train_config(method, plain, folder=folder / method)
        ours, peer = ExtTrainer(other), ExtTrainer(plain)
        try:
            with bench.cpu_threads(settings.threads):
                steps = bench.training_step(ours), bench.training_step(peer)
                sides = (*steps, bench.product(quick=settings.quick))
                mine, theirs, floor = bench.interleave(sides, rounds=settings.rounds)
                peaks = [
                    bench_memory.peak_bytes(trainer, step)
                    for trainer, step in zip((ours, peer), steps, strict=True)
                ]
            per_token = bench.flops_per_token(ours)
            predicted = bench.flops_per_token(peer) / per_token
        finally:
            for trainer in (ours, peer):
                trainer.close()
    shape = f"{bench.OURS.n_layers} x {bench.OURS.dim}, batch {size.batch} x {size.seq_len}"
    return [
        bench.row_of(
            f"train {shape}: {method} / ar", bench.pairs(mine, theirs), goal=goal or predicted / OVER_FLOPS
        ),
        bench.floor_row(
            f"train {shape}: {method} / FLOP floor",
            [per_token * rate for rate in mine],
            floor,
            unit="GFLOP/s",
            note=bench.FLOP_NOTE,
        ),
        bench.row_of_once(
            f"peak memory of a step, {shape}: {method} / ar",
            peaks[0] / 2**20,
            peaks[1] / 2**20,
            unit="MiB",
            goal=goal or 0.0,
        ),
    ]


BENCHMARKS: dict[str, bench.Benchmark] = {
    method: partial(bench_method, method=method)
    for method in ("tidar", "wedlm", "alodlm", "t2mlr", "looped", "mdlm", "block_diffusion")
}
