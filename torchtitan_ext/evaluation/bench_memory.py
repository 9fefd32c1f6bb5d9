"""Bytes of tensors that are alive at once during a training step."""

from __future__ import annotations

import tempfile
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from torchtitan_ext.backbones import BackboneSize
from torchtitan_ext.evaluation import bench, bench_cases
from torchtitan_ext.trainer import ExtTrainer

GROWTH_GOAL = 0.95
"""More passes may cost hardly more memory at a large vocabulary than at a small one."""


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


def alodlm_growth(settings: bench.Settings) -> list[bench.Row]:
    """What more passes K add to ALoDLM's peak at a large vocabulary, against a small one.

    If the logits of all passes were alive at once, it would be K x vocabulary x tokens more.
    """
    small, large = (2048, 4096) if settings.quick else (2048, 32768)
    few, many = 2, 4
    size = bench.TRAIN_QUICK if settings.quick else bench.TrainSize(4, 128)
    backbone = bench.OURS
    if settings.quick:
        backbone = replace(backbone, dim=64, n_heads=4, n_kv_heads=4, ffn_dim=128)
    grown = {
        vocabulary: peak_of(many, replace(backbone, vocab_size=vocabulary), size=size)
        - peak_of(few, replace(backbone, vocab_size=vocabulary), size=size)
        for vocabulary in (large, small)
    }
    shape = f"{backbone.n_layers} x {backbone.dim}, batch {size.batch} x {size.seq_len}"
    row = bench.row_of_once(
        f"peak memory added by {many} passes over {few}, {shape}: alodlm vocabulary {large} / {small}",
        grown[large] / 2**20,
        grown[small] / 2**20,
        unit="MiB",
        goal=GROWTH_GOAL,
        note="the logits of two more passes would be "
        f"{(many - few) * 2 * size.batch * size.seq_len * (large - small) * 4 / 2**20:,.0f} MiB more",
    )
    return [row]


def peak_of(passes: int, backbone: BackboneSize, *, size: bench.TrainSize) -> int:
    """Peak of a training step of ALoDLM."""

    def change(config: Any) -> None:
        config.alodlm.passes = passes

    with tempfile.TemporaryDirectory() as name, bench.one_process_world():
        folder = Path(name)
        (folder / "plain").mkdir()
        plain = bench.our_config(size, folder=folder / "plain", backbone=backbone)
        trainer = ExtTrainer(bench_cases.train_config("alodlm", plain, folder=folder, change=change))
        try:
            torch.manual_seed(0)
            step = bench.training_step(trainer)
            step()  # the optimizer's states are made in the first
            return peak_bytes(trainer, step)
        finally:
            trainer.close()
