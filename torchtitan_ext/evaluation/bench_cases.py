"""The methods as the benchmarks and profiles run them: knobs, models of a size, decoding options."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools import utils

from torchtitan_ext import backbones, registry
from torchtitan_ext.backbones import BackboneSize
from torchtitan_ext.decoding import Generation, decoder_for
from torchtitan_ext.errors import unknown
from torchtitan_ext.evaluation import bench
from torchtitan_ext.trainer import ExtTrainer, default_config

BIDIRECTIONAL = ("mdlm", "tdlm")
"""Methods over a backbone that sees both sides."""

BLOCK = 8
"""Tokens of a block, in training and in decoding."""


def methods() -> list[str]:
    """Names of all methods."""
    return sorted(registry.METHODS)


def check_method(name: str) -> None:
    """Errors: UserError for a name that no method has."""
    if name not in registry.METHODS:
        raise unknown("method", name, methods())


def knobs(method: str, *, n_layers: int) -> dict[str, Any]:
    """A method's section: the middle third where a band is looped, blocks of eight."""
    start, end = n_layers // 3, n_layers - n_layers // 3
    return {
        "alodlm": {"start": start, "end": end, "passes": 4, "block_size": BLOCK},
        "block_diffusion": {"block_size": BLOCK},
        "looped": {"start": start + 1, "end": end, "loops": 2},
        "mdlm": {"block_size": BLOCK},
        "t2mlr": {"start": start + 1, "end": end, "forward_depth": 8, "backward_depth": 2},
        "tdlm": {"block_size": BLOCK},
        "tidar": {"block_size": BLOCK},
        "wedlm": {"block_size": BLOCK},
    }.get(method, {})


def options(method: str) -> dict[str, Any]:
    """Decoding options that make random weights do a method's usual work."""
    # The entropy of random weights is near log V, so thresholds on it must lie there too or nothing is
    # ever filled in time; 1e9 fills what the window shows and 0 fills one token a step.
    return {
        "alodlm": {"window": BLOCK, "tau": 0.0, "q": 1.0},
        "block_diffusion": {"policy": "confidence", "tokens_per_forward": 2},
        "mdlm": {"policy": "one_token"},
        "tdlm": {"policy": "one_token"},
        "wedlm": {"window": BLOCK, "tau": 0.0},
    }.get(method, {})


def as_family(size: BackboneSize, method: str) -> BackboneSize:
    """The same sizes for a method that needs a bidirectional backbone."""
    if method not in BIDIRECTIONAL:
        return size
    family = backbones.lookup("llada-debug")
    # LLaDA has no grouped queries and no tied head; the key map has no place for them.
    return replace(
        family,
        **{name: getattr(size, name) for name in ("n_layers", "dim", "n_heads", "head_dim", "ffn_dim")},
        n_kv_heads=size.n_heads,
        vocab_size=size.vocab_size,
        context=size.context,
    )


def write_config(size: BackboneSize, folder: Path) -> str:
    """A folder whose config.json has these sizes, for the flavor "hf"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(backbones.hf_config(size)))
    return str(folder)


def build(method: str, size: BackboneSize, **changes: Any) -> Any:
    """A method's model of a size with random weights, in evaluation mode."""
    size = as_family(size, method)
    module = registry.method(method)
    own: dict[str, Any] = {}
    if hasattr(module, "Section"):
        section = {**knobs(method, n_layers=size.n_layers), **changes}
        if hasattr(module.Section(), "mask_token_id"):
            section.setdefault("mask_token_id", size.vocab_size - 1)
        own["section"] = module.Section(**section)
    with tempfile.TemporaryDirectory() as folder:
        assets = write_config(size, Path(folder))
        spec = module.model_registry("hf", attention="dense", hf_assets_path=assets, **own)
        torch.manual_seed(0)
        model: Any = spec.model.build().to(utils.device_type)
    model.init_weights()
    return model.eval().requires_grad_(False)


def decoding(
    method: str, model: Any, prompts: list[list[int]], *, new_tokens: int, **changes: Any
) -> Callable[[], Generation]:
    """A whole decoding with the method's own decoder."""
    decode: Any = decoder_for(method)
    given = {**options(method), **changes}
    return lambda: decode(model, prompts, max_new_tokens=new_tokens, **given)


def train_config(
    method: str, plain: ExtTrainer.Config, *, folder: Path, change: Callable[[Any], None] | None = None
) -> Any:
    """A method's config with the data, batch, sizes and schedule of ``plain``."""
    config: Any = default_config({"name": method})
    for section in ("training", "dataloader", "optimizer", "lr_scheduler", "tokenizer", "debug"):
        setattr(config, section, getattr(plain, section))
    config.model.flavor, config.model.hf_assets_path = plain.model.flavor, plain.model.hf_assets_path
    if method in BIDIRECTIONAL:
        config.model.hf_assets_path = write_config(as_family(bench.OURS, method), folder / "assets")
    config.model.attention = plain.model.attention
    config.job.dump_folder = str(folder / "ours")
    config.activation_checkpoint.mode = plain.activation_checkpoint.mode
    for name, value in knobs(method, n_layers=bench.OURS.n_layers).items():
        setattr(getattr(config, method), name, value)
    if change is not None:
        change(config)
    config.__post_init__()
    return config
