"""What a method costs next to the plain autoregressive model of the same sizes.

Both sides run in this project's trainer, in one process and one run.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from torchtitan_ext.evaluation import bench
from torchtitan_ext.trainer import ExtTrainer, default_config

TIDAR_GOAL = 1 / 2.2
"""A doubled sequence: twice the linear layers, and attention that skips what is empty."""

OVER_FLOPS = 1.05
"""How much longer a step may take than its floating-point operations say."""


def bench_tidar(settings: bench.Settings) -> list[bench.Row]:
    """A training step of ``tidar`` against one of ``ar`` on the same data tokens: time and peak memory."""

    def blocks(config: Any) -> None:
        config.tidar.block_size = 8

    return against_ar("tidar", settings, change=blocks, goal=TIDAR_GOAL)


def bench_wedlm(settings: bench.Settings) -> list[bench.Row]:
    """A training step of ``wedlm`` against one of ``ar``; the goal is what its FLOPs predict."""

    def blocks(config: Any) -> None:
        config.wedlm.block_size = 8

    return against_ar("wedlm", settings, change=blocks)


def bench_alodlm(settings: bench.Settings) -> list[bench.Row]:
    """A training step of ``alodlm``, four passes of the middle third, against one of ``ar``; as above."""

    def looped(config: Any) -> None:
        section = config.alodlm
        section.start, section.end, section.passes, section.block_size = 2, 4, 4, 8

    return against_ar("alodlm", settings, change=looped)


def against_ar(
    method: str, settings: bench.Settings, *, change: Callable[[Any], None], goal: float | None = None
) -> list[bench.Row]:
    """Two rows: rate of data tokens in training, and peak memory of a step.

    ``change``: fills the method's section. ``goal``: for both ratios; None: for the rate what
    the models' FLOPs predict, with :data:`OVER_FLOPS` to spare, and none for the memory.
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
            predicted = flops(peer) / flops(ours)
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
        goal=goal or 0.0,
    )
    return [
        bench.row_of(f"train {shape}: {method} / ar", rounds, goal=goal or predicted / OVER_FLOPS),
        memory,
    ]


def flops(trainer: ExtTrainer) -> int:
    """FLOPs of a data token in training, as MFU counts them."""
    spec: Any = trainer.model_config
    _, per_token = spec.get_nparams_and_flops(trainer.model_parts[0], trainer.config.training.seq_len)
    return per_token


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


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensor storage that are alive at once while it is entered.

    torch's own MemTracker follows modules and refuses one that is called again and again, as a
    recurrent core's neighbours are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        if storage not in self._known:
            size = storage.nbytes()
            self._known[storage] = size
            weakref.finalize(storage, self._free, size)
            self.now += size
            self.peak = max(self.peak, self.now)
        return tensor

    def _free(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(torch.Tensor, self.see, func(*args, **(kwargs or {})))


def peak_bytes(trainer: ExtTrainer, step: bench.Work) -> int:
    """Most bytes of tensors that were alive at once during one training step, weights included."""
    counter = PeakBytes()
    for part in trainer.model_parts:
        for tensor in (*part.parameters(), *part.buffers()):
            counter.see(tensor)
    for optimizer in trainer.optimizers:
        tree_map_only(torch.Tensor, counter.see, dict(optimizer.state))
    with counter:
        step()
    return counter.peak


BENCHMARKS: dict[str, bench.Benchmark] = {
    "tidar": bench_tidar,
    "wedlm": bench_wedlm,
    "alodlm": bench_alodlm,
}
