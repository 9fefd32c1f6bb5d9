"""Checkpoints of every method with random weights, and their exports."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import torchtitan_ext  # noqa: F401 - before torchtitan
from torchtitan_ext import registry
from torchtitan_ext.checkpoint.convert import ModelChoice, convert_to_hf, model_spec
from torchtitan_ext.config import toml_text

MASK: dict[str, Any] = {"mask_token_id": 260}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "alodlm": ("alodlm", "qwen3-untied-debug", {"start": 1, "end": 3, "passes": 3, "block_size": 4, **MASK}),
    "alodlm-carry-norm": ("alodlm", "smollm2-debug", {"start": 0, "end": 2, "carry_norm": True, **MASK}),
    "block_diffusion": ("block_diffusion", "smollm2-debug", {"block_size": 4, **MASK}),
    "block_diffusion-causal": (
        "block_diffusion",
        "qwen2_5-debug",
        {"block_size": 4, "clean_attention": "causal", **MASK},
    ),
    "looped-middle": ("looped", "qwen2_5-debug", {"kind": "middle", "start": 2, "end": 3, "loops": 3}),
    "looped-full": ("looped", "smollm2-debug", {"kind": "full", "loops": 2}),
    "looped-pause": ("looped", "qwen3-debug", {"kind": "pause", "pause_tokens": 2}),
    "mdlm": ("mdlm", "llada-debug", {"block_size": 4, "prediction": "own", **MASK}),
    "mdlm-dream": ("mdlm", "dream-debug", {"block_size": 4, "prediction": "shifted", **MASK}),
    "t2mlr": ("t2mlr", "smollm2-debug", {"start": 2, "end": 3, "forward_depth": 4, "backward_depth": 2}),
    "t2mlr-projected": (
        "t2mlr",
        "qwen3-debug",
        {
            "start": 1,
            "end": 2,
            "forward_depth": 3,
            "backward_depth": 1,
            "gate_features": "projected",
            "cache_norm": "clamped",
        },
    ),
    "t2mlr-no-residual": (
        "t2mlr",
        "qwen2_5-debug",
        {"start": 2, "end": 2, "forward_depth": 3, "backward_depth": 1, "temporal_residual": False},
    ),
    "tdlm": (
        "tdlm",
        "llada-debug",
        {"heads": 2, "head_dim": 8, "block_size": 4, "prediction": "own", **MASK},
    ),
    "tdlm-current": (
        "tdlm",
        "dream-debug",
        {
            "heads": 2,
            "head_dim": 8,
            "block_size": 4,
            "prediction": "shifted",
            "window": "current",
            "shift": "moved",
            "layers": [1],
            **MASK,
        },
    ),
    "tidar": ("tidar", "smollm2-debug", {"block_size": 4, **MASK}),
    "wedlm": ("wedlm", "qwen3-debug", {"block_size": 4, "window": 4, **MASK}),
}
"""Name -> method, flavor and section."""

SLOW = (
    *("alodlm-carry-norm", "block_diffusion-causal", "looped-full", "mdlm-dream"),
    *("t2mlr-no-residual", "t2mlr-projected"),
)
"""Other choices of a method that has another case; they run with -m slow alone."""


def native(folder: Path, case: str) -> Path:
    """A checkpoint whose parameters are all away from what they start as."""
    method, flavor, section = CASES[case]
    choice = ModelChoice(name=method, flavor=flavor, section=section)
    model = model_spec(choice, assets=None).model.build()
    model.init_states()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * drawn if "norm" in name else 0.15 * drawn)
    dcp.save(dict(model.state_dict()), checkpoint_id=folder, no_dist=True)
    full = asdict(registry.method(method).Section(**section))
    tables = {
        "model": {"name": method, "flavor": flavor},
        method: {k: v for k, v in full.items() if v is not None},
    }
    (folder / "config.toml").write_text(toml_text(tables))
    return folder


def exported(folder: Path, case: str, **options: Any) -> tuple[Path, Path]:
    """A checkpoint and its Hugging Face folder."""
    checkpoint = native(folder / "step-1", case)
    return checkpoint, convert_to_hf(checkpoint, folder / "hf", **options)
