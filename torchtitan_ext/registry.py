"""Method name -> module.

Deleting a method means deleting its folder and its line here.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from torchtitan_ext.errors import unknown

METHODS: dict[str, str] = {
    "alodlm": "torchtitan_ext.methods.alodlm",
    "ar": "torchtitan_ext.methods.ar",
    "block_diffusion": "torchtitan_ext.methods.block_diffusion",
    "looped": "torchtitan_ext.methods.looped",
    "mdlm": "torchtitan_ext.methods.mdlm",
    "t2mlr": "torchtitan_ext.methods.t2mlr",
    "tdlm": "torchtitan_ext.methods.tdlm",
    "tidar": "torchtitan_ext.methods.tidar",
    "wedlm": "torchtitan_ext.methods.wedlm",
}

TORCHTITAN_MODELS: tuple[str, ...] = ("llama3", "qwen3")
"""torchtitan's own dense language models that start through the TOML front."""


def method(name: str) -> ModuleType:
    """The module of a method.

    Raises:
        UserError: no such method; names the nearest.
    """
    if name not in METHODS:
        raise unknown("[model] name", name, [*METHODS, *TORCHTITAN_MODELS])
    return importlib.import_module(METHODS[name])


def is_torchtitan_model(name: str) -> bool:
    """Whether the name is one of torchtitan's own models."""
    return name in TORCHTITAN_MODELS
