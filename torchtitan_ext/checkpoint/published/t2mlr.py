"""Folders of princeton-pli/T2MLR: a wrapper around a causal model of transformers.

Known from its source (Apache-2.0; read for names and behaviour) and from folders that its
``save_pretrained`` wrote:

- ``config.json`` has ``model_type`` "t2mlr", ``architectures`` ["T2MLRWrapper"], the wrapped
  model's whole config under ``base_config`` and the settings of the recurrence beside it.
- Tensors have the wrapped model's names behind ``t2mlr_model.``; the block where the
  recurrence enters is wrapped once more: its own tensors lie under ``model.``, the
  recurrence's under ``t2mlr_mixing_module.``. A tied head is left out.
- ``l_start`` and ``l_end`` count from 0, ``l_end`` is inclusive and may be negative.
- The mixer "gated" is Phi of Eq. 2.3 with [h, W_rec R] as gate features. The cache of a token is the
  output of block ``l_end``, plus the previous cache and rescaled if
  ``recurrent_residual_to_recurrent_cache``.

Not exact: their rescaling has 1e-6 below the root, this package's has none. Where it acts (rms between
1/5 and 5) the factors differ by a relative 1.25e-5 at most.

Not known: which checkpoints are public (their README names none), and which tokens were recurrent in
training. That is data in their code (``control_flows``), not in the folder; here every token is, as in
their pretraining runs (``control_flow_all_recurrent``). A model whose prompts were not
recurrent computes something else on them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torchtitan_ext.backbones.hf_config import ARCHITECTURES, MODEL_TYPES, size_from_hf
from torchtitan_ext.checkpoint.published.facts import Published, require, whole_number
from torchtitan_ext.errors import UserError, nearest, unknown

MODEL_TYPE, ARCHITECTURE, PREFIX = "t2mlr", "T2MLRWrapper", "t2mlr_model."

CAUSAL = ("llama", "qwen2", "qwen3")
"""``model_type`` of the models that this package has and theirs wraps."""

FUSION = {
    "core.fusion.f_current.weight": "input_gate_proj.weight",
    "core.fusion.f_current.bias": "input_gate_proj.bias",
    "core.fusion.f_recurrent.weight": "recurrent_gate_proj.weight",
    "core.fusion.f_recurrent.bias": "recurrent_gate_proj.bias",
    "core.fusion.w_recurrent.weight": "recurrent_projection.weight",
    "core.fusion.g_current": "rezero_gamma_input_gate",
    "core.fusion.g_recurrent": "rezero_gamma_recurrent_gate",
}
"""This package's name -> name under ``t2mlr_mixing_module.``."""

_READ: dict[str, Any] = {
    "l_start": 0,
    "l_end": -1,
    "batch_forward_approximate_depth": 1,
    "batch_backward_approximate_depth": 10_000_000,
    "connection_detach": False,
    "use_learnable_gate": False,
    "use_learnable_recurrent_gate": None,
    "use_learnable_input_gate": None,
    "recurrent_projection_dim": None,
    "recurrent_state_proj_type": "auto",
    "recurrent_residual_to_recurrent_cache": False,
    "recurrent_residual_to_recurrent_cache_weight": 1.0,
    "recurrent_residual_to_recurrent_cache_post_norm": False,
    "recurrent_residual_to_recurrent_cache_post_norm_eps": 1e-6,
    "recurrent_residual_to_recurrent_cache_post_norm_clamp": 5.0,
    "recurrent_mixing_module_name": "none",
    "use_recurrent_projection": False,
    "t2mlr_enabled": True,
    "gate_proj_type": "linear",
    "normalize_gates": False,
    "pre_norm_streams": False,
    "post_norm": False,
    "recurrent_skip_to_l_end": False,
    "disable_x_branch": False,
    "use_rezero_residual": True,
    "rezero_gamma_scalar": True,
}
"""Settings that decide what is computed, with the value that an absent one has."""

_NEEDED: dict[str, Any] = {
    "t2mlr_enabled": True,
    "recurrent_mixing_module_name": "gated",
    "use_recurrent_projection": True,
    "recurrent_state_proj_type": "linear",
    "use_learnable_recurrent_gate": True,
    "use_learnable_input_gate": True,
    "gate_proj_type": "linear",
    "normalize_gates": False,
    "pre_norm_streams": False,
    "post_norm": False,
    "recurrent_skip_to_l_end": False,
    "disable_x_branch": False,
    "use_rezero_residual": True,
    "rezero_gamma_scalar": True,
}
_NEEDED_OF_A_RESIDUAL: dict[str, Any] = {
    "recurrent_residual_to_recurrent_cache_weight": 1.0,
    "recurrent_residual_to_recurrent_cache_post_norm": True,
    "recurrent_residual_to_recurrent_cache_post_norm_eps": 1e-6,
    "recurrent_residual_to_recurrent_cache_post_norm_clamp": 5.0,
}
"""Asked for where the cache has the previous one in it."""

_NOT_READ = (
    # Initial values, gradients, dropout, memory, logging; and what only the mixers use that are refused.
    "base_config",
    "base_model_type",
    "batch_forward",
    "eval_batch_forward",
    "recurrent_weight",
    "orig_weight",
    "recurrent_residual_to_recurrent_cache_detach",
    "recurrent_skip_to_l_end_weight",
    "recurrent_skip_to_l_end_detach",
    "recurrent_skip_to_l_end_post_norm",
    "recurrent_skip_to_l_end_post_norm_eps",
    "recurrent_skip_to_l_end_post_norm_clamp",
    "pre_norm_type",
    "post_norm_eps",
    "post_norm_clamp",
    "recurrent_alpha",
    "recurrent_state_mlp_hidden_dim",
    "recurrent_state_mlp_num_layers",
    "recurrent_state_mlp_activation",
    "recurrent_state_mlp_dropout",
    "raise_on_nonfinite_gates",
    "mixing_module_kwargs",
    "recurrent_gate_init",
    "input_gate_init",
    "gate_weight_init_std",
    "gate_mlp_hidden_dim",
    "gate_mlp_num_layers",
    "gate_mlp_activation",
    "gate_mlp_dropout",
    "concat_recurrent",
    "freeze_base_model",
    "use_recurrent_weight_curriculum",
    "recurrent_weight_curriculum_start",
    "recurrent_weight_curriculum_end",
    "recurrent_weight_curriculum_schedule",
    "recurrent_weight_curriculum_warmup_steps",
    "recurrent_weight_curriculum_warmup_ratio",
    "bfa_gradient_checkpointing",
    "bfa_memory_efficient_cache",
    "gate_input_detach",
    "recurrent_gate_input_detach",
    "input_gate_input_detach",
    "rezero_gamma_recurrent_gate_init",
    "rezero_gamma_input_gate_init",
    "rezero_gamma_init",
    "hidden_size",
    "dtype",
)
# A config of transformers has many fields of its own; these words mark the wrapper's.
_OF_THE_RECURRENCE = re.compile(r"recurr|gate|t2mlr|mix|rezero|gamma|approximate|connection|l_start|l_end")


def is_published(config: dict[str, Any]) -> bool:
    """Whether a config.json is one of theirs; older ones carry the wrapped model's ``model_type``."""
    architectures = config.get("architectures") or []
    return (
        config.get("model_type") == MODEL_TYPE
        or ARCHITECTURE in architectures
        or {"base_config", "recurrent_mixing_module_name"} <= set(config)
    )


def describe(folder: Path, config: dict[str, Any]) -> Published:
    """The folder in this package's terms.

    Errors: a mixer, a cache or a backbone that this package does not have; an unknown setting.
    """
    where = str(folder / "config.json")
    settings = _settings(config, where=where)
    backbone = _backbone(config, where=where)
    try:
        size = size_from_hf(backbone)
    except UserError as error:
        raise UserError(f"{where}: base_config: {error}") from error
    if settings["recurrent_state_proj_type"] == "auto":
        # Theirs is a linear map exactly if it keeps the width.
        kept = settings["recurrent_projection_dim"] in (None, size.dim)
        settings["recurrent_state_proj_type"] = "linear" if kept else "mlp"
    require(settings, _NEEDED, where=where)
    residual = bool(settings["recurrent_residual_to_recurrent_cache"])
    if residual:
        require(settings, _NEEDED_OF_A_RESIDUAL, where=where)
    first, last = _band(settings, n_layers=size.n_layers, where=where)
    block = f"model.layers.{first}."
    return Published(
        method="t2mlr",
        section={
            "start": first + 1,
            "end": last + 1,
            **_depths(settings, where=where),
            "gate_features": "projected",
            "cache_norm": "clamped",
            "temporal_residual": residual,
        },
        backbone=backbone,
        place=lambda name: PREFIX + (f"{block}model.{name.removeprefix(block)}" if block in name else name),
        own={ours: f"{PREFIX}{block}t2mlr_mixing_module.{theirs}" for ours, theirs in FUSION.items()},
    )


def _settings(config: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The settings that are read; the mixer's own arguments go before the others."""
    known = [*_READ, *_NOT_READ]
    for name in config:
        if name not in known and _OF_THE_RECURRENCE.search(name):
            raise UserError(f"{where}: unknown setting of the recurrence {name!r}{nearest(name, known)}")
    arguments = config.get("mixing_module_kwargs") or {}
    if not isinstance(arguments, dict):
        raise UserError(f"{where}: mixing_module_kwargs must be an object, got {arguments!r}")
    for name in arguments:
        if name not in known:
            raise UserError(f"{where}: unknown name {name!r} in mixing_module_kwargs{nearest(name, known)}")
    given = {**_READ, **config, **arguments}
    settings = {name: given[name] for name in _READ}
    for name in ("use_learnable_recurrent_gate", "use_learnable_input_gate"):
        if settings[name] is None:
            settings[name] = settings["use_learnable_gate"]
    return settings


def _backbone(config: dict[str, Any], *, where: str) -> dict[str, Any]:
    """config.json of the wrapped model."""
    base = config.get("base_config")
    if not isinstance(base, dict):
        raise UserError(f"{where} lacks base_config, the wrapped model's own config")
    kind = base.get("model_type") or config.get("base_model_type")
    if kind == "tinyllama":
        # Their small Llama for tasks from scratch; rotary positions can be switched off.
        off = {"disable_positional_encoding": False}
        require({**off, **base}, off, where=f"{where}: base_config")
        kind = "llama"
    dropped = ("attn_impl", "_name_or_path", "architectures", "disable_positional_encoding")
    kept = {name: value for name, value in base.items() if name not in dropped}
    if kind not in CAUSAL:
        raise UserError(f"{where}: base_config: {unknown('model_type', str(kind), CAUSAL)}")
    return {**kept, "model_type": kind, "architectures": [ARCHITECTURES[MODEL_TYPES[kind]]]}


def _band(settings: dict[str, Any], *, n_layers: int, where: str) -> tuple[int, int]:
    """First and last block of the recurrent band, from 0."""
    first = whole_number(settings, "l_start", where=where)
    given = last = whole_number(settings, "l_end", where=where)
    last += n_layers if last < 0 else 0
    if not 0 <= first <= last < n_layers:
        raise UserError(f"{where}: l_start = {first}, l_end = {given} is not a band of the {n_layers} layers")
    return first, last


def _depths(settings: dict[str, Any], *, where: str) -> dict[str, int]:
    """D_f and D_b of training."""
    forward = whole_number(settings, "batch_forward_approximate_depth", where=where)
    backward = whole_number(settings, "batch_backward_approximate_depth", where=where)
    if forward < 1 or backward < 0:
        raise UserError(
            f"{where}: batch_forward_approximate_depth = {forward}, batch_backward_approximate_depth = "
            f"{backward}; only at least 1 and 0 are supported"
        )
    detached = bool(settings["connection_detach"])
    return {"forward_depth": forward, "backward_depth": 0 if detached else min(backward, forward)}
