"""``config.json`` of a Hugging Face folder <-> :class:`BackboneSize`.

What this package cannot compute exactly is refused by name; nothing is dropped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtitan_ext.backbones.sizes import BackboneSize, Family, lookup
from torchtitan_ext.errors import UserError, unknown

_BACKBONES: dict[str, Family] = {
    "llama": "smollm2",
    "qwen2": "qwen2_5",
    "qwen3": "qwen3",
    "Dream": "dream",
    "llada": "llada",
}

OWN_TYPES: dict[str, tuple[str, str]] = {
    f"torchtitan_ext_{method}_{backbone.lower()}": (method, backbone)
    for method, backbones in {
        "alodlm": ("llama", "qwen2", "qwen3"),
        "looped": ("llama", "qwen2", "qwen3"),
        "t2mlr": ("llama", "qwen2", "qwen3"),
        "tdlm": ("llada", "Dream"),
    }.items()
    for backbone in backbones
}
"""``model_type`` of an export of a method that is more than a backbone -> method and backbone's type."""

MODEL_TYPES: dict[str, Family] = {
    **_BACKBONES,
    **{own: _BACKBONES[backbone] for own, (_, backbone) in OWN_TYPES.items()},
}
"""``model_type`` of a config.json -> family; an export of a method is read as the backbone it extends."""

ARCHITECTURES: dict[Family, str] = {
    "smollm2": "LlamaForCausalLM",
    "qwen2_5": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "dream": "DreamModel",
    "llada": "LLaDAModelLM",
}

_MASK_TOKENS: dict[Family, int] = {"llada": 126336, "dream": 151666}


def size_from_hf(config: dict[str, Any]) -> BackboneSize:
    """The size a ``config.json`` describes, for any size of a known family.

    Errors: an unknown ``model_type``, a missing key, or a feature that changes the
    arithmetic (rope scaling, sliding windows, biases elsewhere, other activations, experts,
    quantisation).
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise unknown("config.json model_type", str(model_type), MODEL_TYPES)
    if config.get("quantization_config"):
        raise UserError("config.json has a quantization_config; only unquantised weights can be read")
    family = MODEL_TYPES[model_type]
    return _llada_size(config) if family == "llada" else _transformers_size(config, family=family)


def size_from_folder(folder: str | Path) -> BackboneSize:
    """The size described by ``config.json`` in a folder."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} not found; a Hugging Face folder has a config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(config).__name__}")
    try:
        return size_from_hf(config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def size_for(flavor: str, *, hf_assets_path: str | Path | None = None) -> BackboneSize:
    """The size of a flavor; ``"hf"`` takes it from ``config.json`` under ``hf_assets_path``."""
    if flavor != "hf":
        return lookup(flavor)
    if not hf_assets_path:
        raise UserError('model.flavor = "hf" needs model.hf_assets_path, a folder with a config.json')
    return size_from_folder(hf_assets_path)


def causal_size_for(flavor: str, *, method: str, hf_assets_path: str | Path | None = None) -> BackboneSize:
    """:func:`size_for` of a causal backbone.

    Errors: a bidirectional one, with which ``method`` does not work.
    """
    size = size_for(flavor, hf_assets_path=hf_assets_path)
    if size.attention != "causal":
        raise UserError(
            f"[model] name = {method!r} needs a causal backbone, got flavor = {flavor!r}, "
            f"whose attention is {size.attention}"
        )
    return size


def hf_config(size: BackboneSize, *, dtype: str = "float32") -> dict[str, Any]:
    """A ``config.json`` for a size: the inverse of :func:`size_from_hf`.

    ``dtype``: the dtype of the tensors beside it, such as ``"bfloat16"``.
    """
    config = _llada_config(size) if size.family == "llada" else _transformers_config(size)
    tokens = {
        "bos_token_id": size.bos_token_id,
        "eos_token_id": size.eos_token_id,
        "pad_token_id": size.pad_token_id,
        "mask_token_id": size.mask_token_id,
    }
    config.update({name: token for name, token in tokens.items() if token is not None})
    return {"architectures": [ARCHITECTURES[size.family]], **config, "torch_dtype": dtype}


def _transformers_config(size: BackboneSize) -> dict[str, Any]:
    model_type = next(name for name, family in MODEL_TYPES.items() if family == size.family)
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": size.vocab_size,
        "hidden_size": size.dim,
        "intermediate_size": size.ffn_dim,
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": size.n_heads,
        "num_key_value_heads": size.n_kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.context,
        "rms_norm_eps": size.norm_eps,
        "rope_theta": size.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": size.tied,
        "attention_dropout": 0.0,
        "initializer_range": size.init_std,
        "use_cache": True,
    }
    if size.family in ("smollm2", "qwen3"):
        config["attention_bias"] = False
    if size.family == "smollm2":
        config["mlp_bias"] = False
    else:
        config.update(use_sliding_window=False, sliding_window=None)
    return config


def _llada_config(size: BackboneSize) -> dict[str, Any]:
    return {
        "model_type": "llada",
        "init_std": size.init_std,
        "activation_type": "silu",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "attention_layer_norm": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "scale_logits": False,
        "alibi": False,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": size.rope_theta,
        "d_model": size.dim,
        "n_layers": size.n_layers,
        "n_heads": size.n_heads,
        "n_kv_heads": size.n_kv_heads,
        "mlp_hidden_size": size.ffn_dim,
        "max_sequence_length": size.context,
        "rms_norm_eps": size.norm_eps,
        "vocab_size": size.vocab_size,
        "embedding_size": size.vocab_size,
        "weight_tying": size.tied,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "residual_dropout": 0.0,
        "init_device": "cpu",
    }


def _transformers_size(config: dict[str, Any], *, family: Family) -> BackboneSize:
    _require(config, hidden_act="silu", mlp_bias=False, partial_rotary_factor=1.0, use_mrope=False)
    if family != "dream":
        _require(config, attention_bias=(family == "qwen2_5"))
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
    if experts:
        raise UserError(f"config.json has {experts[0]} = {config[experts[0]]}; experts are not supported")
    _refuse_sliding_window(config)
    dim, n_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    return BackboneSize(
        family=family,
        n_layers=_int(config, "num_hidden_layers"),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=_int(config, "num_key_value_heads", default=n_heads),
        head_dim=_int(config, "head_dim", default=128 if family == "qwen3" else dim // n_heads),
        ffn_dim=_int(config, "intermediate_size"),
        vocab_size=_int(config, "vocab_size"),
        rope_theta=_rope_theta(config),
        norm_eps=float(_get(config, "rms_norm_eps")),
        qkv_bias=family in ("qwen2_5", "dream"),
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        attention="bidirectional" if family == "dream" else "causal",
        context=_int(config, "max_position_embeddings"),
        init_std=float(config.get("initializer_range", 0.02)),
        **_tokens(config, family=family),  # pyrefly: ignore[bad-argument-type] - token ids only
    )


def _llada_size(config: dict[str, Any]) -> BackboneSize:
    _require(
        config,
        activation_type="silu",
        block_type="llama",
        layer_norm_type="rms",
        layer_norm_with_affine=True,
        bias_for_layer_norm=False,
        attention_layer_norm=False,
        include_bias=False,
        include_qkv_bias=False,
        input_emb_norm=False,
        scale_logits=False,
        alibi=False,
        rope=True,
        rope_scaling=None,
        multi_query_attention=False,
    )
    dim, n_heads = _int(config, "d_model"), _int(config, "n_heads")
    vocab_size = _int(config, "vocab_size")
    return BackboneSize(
        family="llada",
        n_layers=_int(config, "n_layers"),
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=_int(config, "n_kv_heads", default=n_heads),
        head_dim=dim // n_heads,
        ffn_dim=_int(config, "mlp_hidden_size"),
        # The embedding may be padded beyond the vocabulary.
        vocab_size=_int(config, "embedding_size", default=vocab_size),
        rope_theta=float(config.get("rope_theta", 10000.0)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        qkv_bias=False,
        qk_norm=False,
        tied=bool(_get(config, "weight_tying")),
        attention="bidirectional",
        context=_int(config, "max_sequence_length"),
        init_std=float(config.get("init_std", 0.02)),
        **_tokens(config, family="llada"),  # pyrefly: ignore[bad-argument-type] - token ids only
    )


def _get(config: dict[str, Any], key: str) -> Any:
    if key not in config:
        raise UserError(f"config.json lacks {key!r}")
    return config[key]


def _int(config: dict[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    value = _get(config, key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"config.json {key!r} must be a whole number, got {value!r}")
    return value


def _require(config: dict[str, Any], **needed: Any) -> None:
    """Refuse a key that is there with another value; an absent or null key means the default."""
    for key, value in needed.items():
        got = config.get(key)
        if got is not None and got != value:
            raise UserError(f"config.json has {key} = {got!r}; only {value!r} is supported")


def _refuse_sliding_window(config: dict[str, Any]) -> None:
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise UserError(
            f"config.json has layer_types {sorted(layer_types)}; only 'full_attention' is supported"
        )
    in_use = config.get("use_sliding_window") and config.get("sliding_window") is not None
    if in_use and config.get("max_window_layers", 0) < config.get("num_hidden_layers", 0):
        raise UserError(
            f"config.json uses a sliding window of {config['sliding_window']} tokens; "
            "only full attention is supported (use_sliding_window = false)"
        )


def _rope_theta(config: dict[str, Any]) -> float:
    """Rotary base, from the flat keys or from the ``rope_parameters`` of newer files."""
    scaling = config.get("rope_scaling") or {}
    parameters = config.get("rope_parameters") or {}
    for source, name in ((scaling, "rope_scaling"), (parameters, "rope_parameters")):
        kind = source.get("rope_type", source.get("type", "default"))
        if kind != "default":
            raise UserError(
                f"config.json has {name} of type {kind!r}; scaled rotary embeddings are not supported"
            )
        if source.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError("config.json has a partial_rotary_factor; only full rotation is supported")
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))


def _tokens(config: dict[str, Any], *, family: Family) -> dict[str, int | None]:
    """Special tokens; where a file lists several, the first is the one that ends a sequence."""
    tokens: dict[str, int | None] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        tokens[name] = next(iter(value), None) if isinstance(value, list) else value
    tokens["mask_token_id"] = config.get("mask_token_id", _known_mask(config, family=family))
    return tokens


def _known_mask(config: dict[str, Any], *, family: Family) -> int | None:
    """The published mask token, where the vocabulary has it."""
    mask = _MASK_TOKENS.get(family)
    vocab_size = config.get("embedding_size") or config.get("vocab_size") or 0
    return mask if mask is not None and mask < vocab_size else None
