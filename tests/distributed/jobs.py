"""What the processes of a distributed test do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import torchtitan_ext  # noqa: F401  (installs the CPU device before torchtitan is imported)
from torchtitan_ext import config as front
from torchtitan_ext.trainer import ExtTrainer, default_config

CONFIG = """
[model]
name = "ar"
flavor = "smollm2-debug"

[training]
local_batch_size = 8
seq_len = 64
steps = 5
mixed_precision_param = "float32"

[optimizer]
lr = 3e-3

[lr_scheduler]
warmup_steps = 2

[activation_checkpoint]
mode = "none"

[dataloader]
dataset = "stdlib"

[metrics]
log_freq = 1

[debug]
enable_structured_logging = false
"""


class Recorder:
    """Stands in for TensorBoard and keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None: ...

    def series(self, name: str) -> dict[int, float]:
        return {step: float(row[name]) for step, row in self.rows if name in row}


def build(folder: str, args: list[str], *, toml: str = CONFIG) -> ExtTrainer:
    """A trainer for the TOML and the arguments, with its dump folder inside ``folder``."""
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.WARNING)
    path = Path(folder) / "config.toml"
    if not path.exists() or path.read_text() != toml:
        path.write_text(toml)
    argv = ["--job.config_file", str(path), "--job.dump_folder", f"{folder}/out", *args]
    config = front.parse(argv, make_default=default_config)
    return config.build()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(trainer: ExtTrainer) -> dict[str, torch.Tensor]:
    """All parameters in full, by name."""
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): full(parameter)
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
    }


def finish(trainer: ExtTrainer) -> None:
    trainer.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def initial_weights(folder: str, args: list[str], toml: str = CONFIG) -> dict[str, torch.Tensor]:
    trainer = build(folder, args, toml=toml)
    result = weights(trainer)
    finish(trainer)
    return result


def train(folder: str, args: list[str], toml: str = CONFIG, with_weights: bool = False) -> dict[str, Any]:
    """Losses and gradient norms by step (and the final weights)."""
    trainer = build(folder, args, toml=toml)
    recorder = Recorder()
    trainer.metrics_processor.logger = recorder
    trainer.train()
    result: dict[str, Any] = {
        "loss": recorder.series("loss_metrics/global_avg_loss"),
        "grad_norm": recorder.series("grad_norm"),
        "rows": recorder.rows,
    }
    if with_weights:
        result["weights"] = weights(trainer)
    finish(trainer)
    return result


def gradients(folder: str, args: list[str], toml: str = CONFIG) -> dict[str, torch.Tensor]:
    """Unclipped gradients of the first step, in full, by name."""
    trainer = build(folder, [*args, "--training.max_norm", "1e9"], toml=toml)
    trainer.checkpointer.load(step=-1)
    trainer.step = 1
    captured: dict[str, torch.Tensor] = {}

    def capture(*_: Any) -> None:
        for part in trainer.model_parts:
            for name, parameter in part.named_parameters():
                if parameter.grad is not None:
                    captured[name.replace("_checkpoint_wrapped_module.", "")] = full(parameter.grad)

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(capture)
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    finish(trainer)
    return captured
