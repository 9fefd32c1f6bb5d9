"""Registration with transformers' Auto classes; see the package's docstring."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from torchtitan_ext.backbones.hf_config import MODEL_TYPES, OWN_TYPES
from torchtitan_ext.checkpoint.convert import HF_SECTION
from torchtitan_ext.checkpoint.hf.config import CONFIGS
from torchtitan_ext.checkpoint.hf.model import MODELS
from torchtitan_ext.errors import UserError, unknown

_KNOWN = ("llama", "qwen2", "qwen3")
"""Types that transformers has configs for."""


def register() -> None:
    """Let AutoConfig and AutoModelForCausalLM open exports. Calling it again changes nothing."""
    if getattr(CONFIG_MAPPING["llama"], "chooses_method", False):
        return
    for model_type in MODEL_TYPES:
        plain = CONFIG_MAPPING[model_type] if model_type in _KNOWN else None
        AutoConfig.register(model_type, _chooser(model_type, plain), exist_ok=True)
    for method, config_class in CONFIGS.items():
        AutoModelForCausalLM.register(config_class, MODELS[method], exist_ok=True)


def config_for(values: dict[str, Any], plain: type[PretrainedConfig] | None) -> type[PretrainedConfig]:
    """The config class of a config.json.

    ``plain``: transformers' own class for its ``model_type``. Without an entry of this package, a masked
    backbone (LLaDA, Dream) is mdlm.
    Errors: UserError for an unknown method, or a folder that only this package opens and not as a method.
    """
    method = (values.get(HF_SECTION) or {}).get("name")
    if method is None and plain is not None:
        return plain
    if method is None and values.get("model_type") in OWN_TYPES:
        raise UserError(f"config.json of type {values['model_type']!r} lacks its {HF_SECTION!r} entry")
    if method is None:
        method = "mdlm"
    if method not in CONFIGS:
        raise unknown(f"method in config.json {HF_SECTION!r}", str(method), CONFIGS)
    return CONFIGS[method]


def _chooser(model_type: str, plain: type[PretrainedConfig] | None) -> type[PretrainedConfig]:
    """A config class that stands for a ``model_type`` and makes configs of the class that fits."""
    base = plain or PretrainedConfig

    def make(cls: Any, *args: Any, **kwargs: Any) -> PretrainedConfig:
        """Called as the class: composite models build their language model's config so."""
        if plain is not None:
            return plain(*args, **kwargs)
        raise UserError(f"model_type {model_type!r} is opened from a folder, not built from nothing")

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return config_for(config_dict, plain).from_dict(config_dict, **kwargs)

    body = {
        "__doc__": f"Chooses the config of a folder of type {model_type}.",
        # Where the class is from outside transformers, AutoConfig prefers it to a folder's own code, which is
        # right for our types alone: what other folders hold is opened as if this were not registered.
        "__module__": __name__ if model_type in OWN_TYPES else base.__module__,
        "__new__": make,
        "__init__": base.__init__,
        "model_type": model_type,
        "chooses_method": True,
        "from_dict": classmethod(from_dict),
    }
    return type(base.__name__, (base,), body)
