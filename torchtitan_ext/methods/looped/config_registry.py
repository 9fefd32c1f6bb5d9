"""Configs for torchtitan's own ``--module torchtitan_ext.methods.looped --config NAME``."""

from typing import Any

from torchtitan_ext.trainer import ExtTrainer, default_config


def debug() -> ExtTrainer.Config:
    """A tiny middle-looped backbone on the standard library's sources, on a CPU."""
    config: Any = default_config({"name": "looped"})
    config.model.flavor = "smollm2-debug"
    config.looped.kind, config.looped.loops = "middle", 3
    config.looped.start, config.looped.end = 2, 3
    config.training.local_batch_size = 8
    config.training.seq_len = 256
    config.training.steps = 10
    config.training.mixed_precision_param = "float32"
    config.metrics.log_freq = 1
    return config
