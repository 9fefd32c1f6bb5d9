"""Tensor names of each family in a Hugging Face folder, beside the names of this package.

The maps are data: ours -> theirs, with ``{i}`` for the layer number.  Names only;
no family needs its weights permuted, since all use the half-rotation form of RoPE.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchtitan_ext.backbones.sizes import BackboneSize


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyMap:
    """Names of one family."""

    root: dict[str, str]
    """Tensors outside the blocks."""

    block: dict[str, str]
    """Tensors of each block that every size has."""

    qkv_bias: dict[str, str]
    """Tensors of each block when ``size.qkv_bias``; empty where the family has none."""

    qk_norm: dict[str, str]
    """Tensors of each block when ``size.qk_norm``; empty where the family has none."""

    head: str
    """Their name of ``lm_head.weight``."""

    embedding: str
    """Their name of ``tok_embeddings.weight``."""


_QKV = "layers.{i}.attention.qkv_linear"
_THEIR_LAYER = "model.layers.{i}"
_TRANSFORMERS = KeyMap(
    root={
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    },
    block={
        f"{_QKV}.wq.weight": f"{_THEIR_LAYER}.self_attn.q_proj.weight",
        f"{_QKV}.wk.weight": f"{_THEIR_LAYER}.self_attn.k_proj.weight",
        f"{_QKV}.wv.weight": f"{_THEIR_LAYER}.self_attn.v_proj.weight",
        "layers.{i}.attention.wo.weight": f"{_THEIR_LAYER}.self_attn.o_proj.weight",
        "layers.{i}.feed_forward.w1.weight": f"{_THEIR_LAYER}.mlp.gate_proj.weight",
        "layers.{i}.feed_forward.w2.weight": f"{_THEIR_LAYER}.mlp.down_proj.weight",
        "layers.{i}.feed_forward.w3.weight": f"{_THEIR_LAYER}.mlp.up_proj.weight",
        "layers.{i}.attention_norm.weight": f"{_THEIR_LAYER}.input_layernorm.weight",
        "layers.{i}.ffn_norm.weight": f"{_THEIR_LAYER}.post_attention_layernorm.weight",
    },
    qkv_bias={
        f"{_QKV}.wq.bias": f"{_THEIR_LAYER}.self_attn.q_proj.bias",
        f"{_QKV}.wk.bias": f"{_THEIR_LAYER}.self_attn.k_proj.bias",
        f"{_QKV}.wv.bias": f"{_THEIR_LAYER}.self_attn.v_proj.bias",
    },
    qk_norm={
        "layers.{i}.attention.q_norm.weight": f"{_THEIR_LAYER}.self_attn.q_norm.weight",
        "layers.{i}.attention.k_norm.weight": f"{_THEIR_LAYER}.self_attn.k_norm.weight",
    },
    head="lm_head.weight",
    embedding="model.embed_tokens.weight",
)

_LLADA_BLOCK = "model.transformer.blocks.{i}"
_LLADA = KeyMap(
    root={
        "tok_embeddings.weight": "model.transformer.wte.weight",
        "norm.weight": "model.transformer.ln_f.weight",
        "lm_head.weight": "model.transformer.ff_out.weight",
    },
    block={
        f"{_QKV}.wq.weight": f"{_LLADA_BLOCK}.q_proj.weight",
        f"{_QKV}.wk.weight": f"{_LLADA_BLOCK}.k_proj.weight",
        f"{_QKV}.wv.weight": f"{_LLADA_BLOCK}.v_proj.weight",
        "layers.{i}.attention.wo.weight": f"{_LLADA_BLOCK}.attn_out.weight",
        "layers.{i}.feed_forward.w1.weight": f"{_LLADA_BLOCK}.ff_proj.weight",
        "layers.{i}.feed_forward.w2.weight": f"{_LLADA_BLOCK}.ff_out.weight",
        "layers.{i}.feed_forward.w3.weight": f"{_LLADA_BLOCK}.up_proj.weight",
        "layers.{i}.attention_norm.weight": f"{_LLADA_BLOCK}.attn_norm.weight",
        "layers.{i}.ffn_norm.weight": f"{_LLADA_BLOCK}.ff_norm.weight",
    },
    qkv_bias={},
    qk_norm={},
    head="model.transformer.ff_out.weight",
    embedding="model.transformer.wte.weight",
)

KEY_MAPS: dict[str, KeyMap] = {
    "smollm2": _TRANSFORMERS,
    "qwen2_5": _TRANSFORMERS,
    "qwen3": _TRANSFORMERS,
    "dream": _TRANSFORMERS,
    "llada": _LLADA,
}

# Buffers that old files carry; they follow from rope_theta.
_IGNORABLE = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def is_ignorable(hf_name: str) -> bool:
    """Whether a tensor of a Hugging Face folder holds nothing that was learned."""
    return _IGNORABLE.fullmatch(hf_name) is not None


def expand(template: dict[str, str], n_layers: int) -> dict[str, str]:
    """Fill the layer number into both sides of a per-block map."""
    return {
        ours.format(i=i): theirs.format(i=i) for i in range(n_layers) for ours, theirs in template.items()
    }


def hf_names(size: BackboneSize) -> dict[str, str]:
    """Ours -> theirs for every tensor of a backbone, the tied LM head included."""
    keys = KEY_MAPS[size.family]
    block = dict(keys.block)
    if size.qkv_bias:
        block.update(keys.qkv_bias)
    if size.qk_norm:
        block.update(keys.qk_norm)
    return {**keys.root, **expand(block, size.n_layers)}
