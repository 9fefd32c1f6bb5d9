"""Configs for torchtitan's own ``--module torchtitan_ext.methods.mdlm --config NAME``."""

from typing import Any

from torchtitan_ext.trainer import ExtTrainer, default_config


def debug() -> ExtTrainer.Config:
    """A tiny backbone on the standard library's sources, on a CPU."""
    config: Any = default_config({"name": "mdlm"})
    config.model.flavor = "llada-debug"
    config.training.local_batch_size = 8
    config.training.seq_len = 128
    config.training.steps = 10
    config.training.mixed_precision_param = "float32"
    config.metrics.log_freq = 1
    return config
