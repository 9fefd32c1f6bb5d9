"""Configs for torchtitan's own ``--module torchtitan_ext.methods.wedlm --config NAME``."""

from typing import Any

from torchtitan_ext.trainer import ExtTrainer, default_config


def debug() -> ExtTrainer.Config:
    """A tiny backbone on the standard library's sources, on a CPU."""
    config: Any = default_config({"name": "wedlm"})
    config.model.flavor = "smollm2-debug"
    config.wedlm.block_size = 8
    config.training.local_batch_size = 8
    config.training.seq_len = 128
    config.training.steps = 10
    config.training.mixed_precision_param = "float32"
    config.metrics.log_freq = 1
    return config
