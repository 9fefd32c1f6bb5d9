"""From the [model] section to torchtitan's ModelSpec and the method's objective."""

import importlib
from typing import Any

from torchtitan.models.common.attention import BaseAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils

from torchtitan_ext import attention, registry
from torchtitan_ext.errors import unknown
from torchtitan_ext.objective import Objective
from torchtitan_ext.parallelize import with_keyed_weights
from torchtitan_ext.registry import TORCHTITAN_MODELS

__all__ = ["TORCHTITAN_MODELS", "build_objective", "build_spec"]


def build_spec(config: Any, *, device_type: str | None = None) -> ModelSpec:
    """The spec of a resolved config, with weights that do not depend on the parallelism.

    ``device_type``: the device whose attention kernel "auto" means; None: this process's.

    Raises:
        UserError: unknown method, model, flavor or attention.
    """
    section = config.model
    device_type = device_type or utils.device_type
    if registry.is_torchtitan_model(section.name):
        spec = _torchtitan_spec(section, device_type=device_type)
    else:
        module = registry.method(section.name)
        complete = getattr(module, "complete", None)
        if complete is not None:  # what the method's section leaves to the rest of the config
            complete(config)
        backend = attention.resolve_backend(section.attention, device_type)
        own = getattr(config, section.name, None)
        spec = module.model_registry(
            section.flavor,
            attention=backend,
            hf_assets_path=section.hf_assets_path or None,
            **({} if own is None else {"section": own}),
        )
    return with_keyed_weights(spec, seed=config.debug.seed)


def _torchtitan_spec(section: Any, *, device_type: str) -> ModelSpec:
    """One of torchtitan's own models; the dense attention is put in where it is chosen."""
    module = importlib.import_module(f"torchtitan.models.{section.name}")
    flavors = getattr(module, f"{section.name}_configs")
    if section.flavor not in flavors:
        raise unknown(f"[model] flavor of {section.name}", section.flavor, flavors)
    backend = attention.resolve_backend(section.attention, device_type)
    spec = module.model_registry(section.flavor, attn_backend="flex" if backend == "dense" else backend)
    if backend == "dense":
        for index, (_, config, _, _) in enumerate(spec.model.traverse(BaseAttention.Config)):
            config.inner_attention = attention.inner_attention_config("dense", layer_id=index)
    return spec


def build_objective(config: Any) -> Objective:
    """The method's objective; torchtitan's own models are trained on next tokens."""
    name = "ar" if registry.is_torchtitan_model(config.model.name) else config.model.name
    return registry.method(name).build_objective(config)
