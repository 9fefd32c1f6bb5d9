"""Configs for torchtitan's own ``--module torchtitan_ext.methods.tdlm --config NAME``."""

from typing import Any

from torchtitan_ext.trainer import ExtTrainer, default_config


def debug() -> ExtTrainer.Config:
    """A tiny backbone with temporal modules, on a CPU; the data are trajectories of that backbone."""
    config: Any = default_config({"name": "tdlm"})
    config.model.flavor = "llada-debug"
    config.tdlm.head_dim, config.tdlm.states = 16, 4
    config.training.local_batch_size = 8
    config.training.seq_len = 64
    config.training.steps = 10
    config.training.mixed_precision_param = "float32"
    config.metrics.log_freq = 1
    return config
