"""Configs for torchtitan's own ``--module torchtitan_ext.methods.ar --config NAME``."""

from torchtitan_ext.trainer import ExtTrainer, default_config


def debug() -> ExtTrainer.Config:
    """A tiny backbone on the standard library's sources, on a CPU."""
    config = default_config({"name": "ar"})
    config.model.flavor = "smollm2-debug"
    config.training.local_batch_size = 8
    config.training.seq_len = 256
    config.training.steps = 10
    config.training.mixed_precision_param = "float32"
    config.metrics.log_freq = 1
    return config


def smollm2_135m() -> ExtTrainer.Config:
    """SmolLM2-135M from scratch on FineWeb-Edu, as train_configs/ar/smollm2-135M_h100.toml."""
    config = default_config({"name": "ar"})
    config.model.flavor = "smollm2-135M"
    config.dataloader.dataset = "fineweb_edu"
    config.training.seq_len = 2048
    config.compile.enable = True
    return config
