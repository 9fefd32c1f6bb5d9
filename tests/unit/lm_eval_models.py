"""Tiny checkpoints of every method, for the tests of benchmarks."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from tests.unit.test_load import write_checkpoint
from torchtitan_ext import config as front
from torchtitan_ext import models
from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.trainer import default_config

TOML = """
[model]
name = "{method}"
flavor = "{flavor}"
attention = "dense"
"""
CAUSAL = {
    "ar": ("ar", "smollm2-debug", ""),
    "looped": ("looped", "smollm2-debug", 'kind = "middle"\nstart = 1\nend = 3\nloops = 2'),
    "pause": ("looped", "smollm2-debug", 'kind = "pause"\npause_tokens = 2'),
    "t2mlr": ("t2mlr", "smollm2-debug", "start = 2\nend = 3\nforward_depth = 2\nbackward_depth = 1"),
    "tidar": ("tidar", "smollm2-debug", "block_size = 4"),
    "block_diffusion": ("block_diffusion", "smollm2-debug", 'block_size = 4\nclean_attention = "causal"'),
    "wedlm": ("wedlm", "smollm2-debug", "block_size = 4\nwindow = 3"),
    "alodlm": (
        "alodlm",
        "smollm2-debug",
        "start = 1\nend = 3\npasses = 3\nblock_size = 4\nwindow = 3\ntau = 0.5",
    ),
}
ESTIMATED = {
    "mdlm": ("mdlm", "llada-debug", "block_size = 4"),
    "dream": ("mdlm", "dream-debug", "block_size = 4"),
    "tdlm": ("tdlm", "llada-debug", "block_size = 4\nlayers = [0]\nheads = 2\nhead_dim = 6"),
    "blocks": ("block_diffusion", "smollm2-debug", 'block_size = 4\nclean_attention = "block"'),
}
OTHER = {"lstm": ("looped", "smollm2-debug", 'kind = "lstm"\nlstm_hidden = 16\nlstm_layers = 1')}
ALL = CAUSAL | ESTIMATED | OTHER


def write(folder: Path, name: str) -> Path:
    """A checkpoint with weights in which every parameter has an effect."""
    method, flavor, section = ALL[name]
    toml = TOML.format(method=method, flavor=flavor) + (f"\n[{method}]\n{section}\n" if section else "")
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(toml)
    config = front.load_toml(folder / "config.toml", make_default=default_config)
    model = models.build_spec(config).model.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
    write_checkpoint(folder, model)
    (folder / "config.toml").write_text(toml)
    return folder


@functools.cache
def loaded(name: str) -> LoadedModel:
    """The model of such a checkpoint."""
    with tempfile.TemporaryDirectory() as home:
        return load_model(write(Path(home) / "step-2", name))
