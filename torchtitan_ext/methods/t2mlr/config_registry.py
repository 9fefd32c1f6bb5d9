"""Configs for torchtitan's own ``--module torchtitan_ext.methods.t2mlr --config NAME``."""

from typing import Any

from torchtitan_ext.trainer import ExtTrainer, default_config


def debug() -> ExtTrainer.Config:
    """A tiny recurrent backbone on the standard library's sources, on a CPU."""
    config: Any = default_config({"name": "t2mlr"})
    config.model.flavor = "smollm2-debug"
    config.t2mlr.start, config.t2mlr.end = 2, 3
    config.t2mlr.forward_depth, config.t2mlr.backward_depth = 4, 2
    config.training.local_batch_size = 8
    config.training.seq_len = 256
    config.training.steps = 10
    config.training.mixed_precision_param = "float32"
    config.metrics.log_freq = 1
    return config
