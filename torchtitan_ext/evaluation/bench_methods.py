"""What a method costs next to the plain autoregressive model of the same sizes.

Both sides run in this project's trainer, in one process and one run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torchtitan.tools import utils

from torchtitan_ext.evaluation import bench
from torchtitan_ext.trainer import ExtTrainer, default_config

TIDAR_GOAL = 1 / 2.2
"""A doubled sequence: twice the linear layers, and attention that skips what is empty."""


def bench_tidar(settings: bench.Settings) -> list[bench.Row]:
    """A training step of ``tidar`` against one of ``ar`` on the same data tokens: time and peak memory."""

    def blocks(config: Any) -> None:
        config.tidar.block_size = 8

    return against_ar("tidar", settings, change=blocks, goal=TIDAR_GOAL)


def against_ar(
    method: str, settings: bench.Settings, *, change: Callable[[Any], None], goal: float
) -> list[bench.Row]:
    """Two rows: rate of data tokens in training, and peak memory of a step.

    ``change``: fills the method's section. ``goal``: for both ratios.
    """
    size = bench.TRAIN_QUICK if settings.quick else bench.TRAIN
    with tempfile.TemporaryDirectory() as folder, bench.one_process_world():
        (Path(folder) / "ar").mkdir()
        (Path(folder) / method).mkdir()
        plain = bench.our_config(size, folder=Path(folder) / "ar")
        other = like(plain, method, folder=Path(folder) / method)
        change(other)
        other.__post_init__()
        ours, peer = ExtTrainer(other), ExtTrainer(plain)
        try:
            with bench.cpu_threads(settings.threads):
                steps = bench.training_step(ours), bench.training_step(peer)
                rounds = bench.alternate(*steps, rounds=settings.rounds)
                peaks = [peak_bytes(trainer, step) for trainer, step in zip((ours, peer), steps, strict=True)]
        finally:
            for trainer in (ours, peer):
                trainer.close()
    shape = f"{bench.OURS.n_layers} x {bench.OURS.dim}, batch {size.batch} x {size.seq_len}"
    memory = bench.Row(
        what=f"peak memory of a step, {shape}: {method} / ar",
        ours=peaks[0] / 2**20,
        peer=peaks[1] / 2**20,
        unit="MiB",
        ratios=[peaks[1] / peaks[0]],
        goal=goal,
    )
    return [bench.row_of(f"train {shape}: {method} / ar", rounds, goal=goal), memory]


def like(plain: ExtTrainer.Config, method: str, *, folder: Path) -> Any:
    """A method's config with the data, batch, sizes and schedule of another one."""
    config: Any = default_config({"name": method})
    for section in ("training", "dataloader", "optimizer", "lr_scheduler", "tokenizer", "debug"):
        setattr(config, section, getattr(plain, section))
    config.model.flavor, config.model.hf_assets_path = plain.model.flavor, plain.model.hf_assets_path
    config.model.attention = plain.model.attention
    config.job.dump_folder = str(folder / "ours")
    config.activation_checkpoint.mode = plain.activation_checkpoint.mode
    return config


def peak_bytes(trainer: ExtTrainer, step: bench.Work) -> int:
    """Most bytes of tensors that were alive at once during one training step, weights included."""
    tracker = MemTracker()
    tracker.track_external(*trainer.model_parts, *trainer.optimizers)
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")
    device = torch.device(utils.device_type)
    return max(total["Total"] for at, total in peak.items() if at.type == device.type)


BENCHMARKS: dict[str, bench.Benchmark] = {"tidar": bench_tidar}
