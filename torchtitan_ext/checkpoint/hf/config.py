"""Configs of exported folders: what their config.json holds, in a class for each method."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from torchtitan_ext.backbones import BackboneSize
from torchtitan_ext.backbones.hf_config import size_from_hf
from torchtitan_ext.checkpoint.convert import HF_SECTION

METHOD_NAMES: dict[str, str] = {
    "alodlm": "ALoDLM",
    "block_diffusion": "BlockDiffusion",
    "looped": "Looped",
    "mdlm": "MDLM",
    "t2mlr": "T2MLR",
    "tdlm": "TDLM",
    "tidar": "TiDAR",
    "wedlm": "WeDLM",
}
"""Methods with classes of their own here, and how the classes are called; ar is a plain backbone."""


class MethodConfig(PretrainedConfig):
    """A config.json with a "torchtitan_ext" entry, kept as it is.

    ``model_type`` is the folder's, not the class's, so that what is saved again reads the same.
    """

    method: ClassVar[str] = ""

    @property
    def section(self) -> dict[str, Any]:
        """The method's section; nothing for a published backbone."""
        return (getattr(self, HF_SECTION, None) or {}).get("section", {})

    @property
    def size(self) -> BackboneSize:
        """The backbone.

        Errors: UserError for one that is not supported.
        """
        return size_from_hf(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the folder's ``model_type``."""
        values = super().to_dict()
        values["model_type"] = self.__dict__.get("model_type", type(self).model_type)
        return values


def _config_class(method: str) -> type[MethodConfig]:
    name = f"{METHOD_NAMES[method]}Config"
    body = {"method": method, "__module__": __name__, "__doc__": f"Config of a {method} export."}
    return type(name, (MethodConfig,), body)


CONFIGS: dict[str, type[MethodConfig]] = {method: _config_class(method) for method in METHOD_NAMES}
"""Method -> config class."""

globals().update({cls.__name__: cls for cls in CONFIGS.values()})
