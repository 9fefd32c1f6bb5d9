"""Sizes of the published backbones, and a tiny one of each family.

Facts come from the public ``config.json`` of each model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from torchtitan_ext.errors import UserError, unknown

Family = Literal["smollm2", "qwen2_5", "qwen3", "llada", "dream"]
AttentionKind = Literal["causal", "bidirectional"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneSize:
    """Everything that fixes the shape and the arithmetic of one backbone."""

    family: Family
    """Which published model line: it decides the tensor names in a Hugging Face folder."""

    n_layers: int
    """Number of transformer blocks."""

    dim: int
    """Width of the residual stream."""

    n_heads: int
    """Query heads."""

    n_kv_heads: int
    """Key and value heads; fewer than ``n_heads`` is grouped-query attention."""

    head_dim: int
    """Width of one head; Qwen3 has sizes where it is not ``dim / n_heads``."""

    ffn_dim: int
    """Hidden width of the SwiGLU feed-forward."""

    vocab_size: int
    """Rows of the embedding, which may be more than the tokenizer has tokens."""

    rope_theta: float
    """Base of the rotary frequencies."""

    norm_eps: float
    """Epsilon of every RMSNorm."""

    qkv_bias: bool
    """Biases on the q, k and v projections (never on the output projection)."""

    qk_norm: bool
    """RMSNorm over each query and key head, before the rotation."""

    tied: bool
    """The LM head shares the embedding matrix."""

    attention: AttentionKind
    """Which mask ``get_attention_masks`` builds; the blocks do not know it."""

    context: int
    """Longest sequence in tokens; training may use less."""

    bos_token_id: int | None = None
    """First token of a sequence, for exports without a ``config.json`` of their own."""

    eos_token_id: int | None = None
    """Last token of a sequence, for exports without a ``config.json`` of their own."""

    pad_token_id: int | None = None
    """Padding token, for exports without a ``config.json`` of their own."""

    mask_token_id: int | None = None
    """The token that stands for a masked position, None where the model has none."""

    init_std: float = 0.02
    """Standard deviation of a fresh matrix; narrow models need more than the published ones' 0.02."""

    def __post_init__(self) -> None:
        positive = (
            "n_layers",
            "dim",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "ffn_dim",
            "vocab_size",
            "context",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise UserError(f"backbone {name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise UserError(
                f"backbone n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})"
            )
        if self.head_dim % 2:
            raise UserError(f"backbone head_dim must be even for the rotary embedding, got {self.head_dim}")

    @property
    def n_params(self) -> int:
        """Number of parameters; a tied matrix counts once."""
        q_dim, kv_dim = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = 2 * self.dim * (q_dim + kv_dim)
        attention += (q_dim + 2 * kv_dim) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        return self.n_layers * block + self.dim + (2 - self.tied) * self.vocab_size * self.dim


_SMOLLM2_135M = BackboneSize(
    family="smollm2",
    n_layers=30,
    dim=576,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    ffn_dim=1536,
    vocab_size=49152,
    rope_theta=1e5,
    norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    tied=True,
    attention="causal",
    context=8192,
    bos_token_id=0,
    eos_token_id=0,
)
_SMOLLM2_360M = replace(_SMOLLM2_135M, n_layers=32, dim=960, n_heads=15, n_kv_heads=5, ffn_dim=2560)
_SMOLLM2_1_7B = replace(
    _SMOLLM2_135M, n_layers=24, dim=2048, n_heads=32, n_kv_heads=32, ffn_dim=8192, rope_theta=1.3e5
)
_QWEN2_5_1_5B = BackboneSize(
    family="qwen2_5",
    n_layers=28,
    dim=1536,
    n_heads=12,
    n_kv_heads=2,
    head_dim=128,
    ffn_dim=8960,
    vocab_size=151936,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tied=True,
    attention="causal",
    context=131072,
    bos_token_id=151643,
    eos_token_id=151643,
)
_QWEN3_1_7B = BackboneSize(
    family="qwen3",
    n_layers=28,
    dim=2048,
    n_heads=16,
    n_kv_heads=8,
    head_dim=128,
    ffn_dim=6144,
    vocab_size=151936,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    tied=True,
    attention="causal",
    context=40960,
    bos_token_id=151643,
    eos_token_id=151645,
)
_QWEN3_4B = replace(_QWEN3_1_7B, n_layers=36, dim=2560, n_heads=32, ffn_dim=9728)
_QWEN3_8B = replace(_QWEN3_4B, dim=4096, ffn_dim=12288, tied=False)
_LLADA_8B = BackboneSize(
    family="llada",
    n_layers=32,
    dim=4096,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    ffn_dim=12288,
    vocab_size=126464,
    rope_theta=5e5,
    norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    tied=False,
    attention="bidirectional",
    context=4096,
    bos_token_id=126080,
    eos_token_id=126081,
    pad_token_id=126081,
    mask_token_id=126336,
)
_DREAM_7B = BackboneSize(
    family="dream",
    n_layers=28,
    dim=3584,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    ffn_dim=18944,
    vocab_size=152064,
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=True,
    qk_norm=False,
    tied=False,
    attention="bidirectional",
    context=2048,
    bos_token_id=151665,
    eos_token_id=151643,
    pad_token_id=151643,
    mask_token_id=151666,
)


def _debug(size: BackboneSize, *, n_kv_heads: int = 2, head_dim: int = 16) -> BackboneSize:
    """A tiny backbone with the family's arithmetic, wide enough for a byte vocabulary."""
    return replace(
        size,
        n_layers=4,
        dim=64,
        n_heads=4,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_dim=192,
        vocab_size=264,
        context=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        mask_token_id=None,
    )


SIZES: dict[str, BackboneSize] = {
    "smollm2-135M": _SMOLLM2_135M,
    "smollm2-360M": _SMOLLM2_360M,
    "smollm2-1.7B": _SMOLLM2_1_7B,
    "smollm2-debug": _debug(_SMOLLM2_135M),
    # For synthetic tasks, layers x dim; the vocabulary holds the tasks' own ids. The smaller one is
    # read beyond its trained length: with a high base most of its rotations stay where it has seen them.
    "smollm2-task-2x64": replace(
        _debug(_SMOLLM2_135M, n_kv_heads=4), n_layers=2, ffn_dim=256, rope_theta=1e9, init_std=64**-0.5
    ),
    "smollm2-task-4x384": replace(
        _debug(_SMOLLM2_135M, head_dim=64), dim=384, n_heads=6, n_kv_heads=6, ffn_dim=1024, rope_theta=1e4
    ),
    # The T2MLR paper's parameter-matched baseline: the 135M model at width 584.
    "smollm2-135M-584": replace(_SMOLLM2_135M, dim=584),
    # The T2MLR paper's 1B model; it states 1B parameters and 32 layers' bands, the rest is ours.
    "smollm2-1B": replace(_SMOLLM2_1_7B, n_layers=32, dim=1536, n_heads=24, n_kv_heads=8, ffn_dim=5120),
    # Large enough to learn spelling in minutes of a CPU, for demonstrations on bytes.
    # At this width the usual std of 0.02 starts far slower.
    "smollm2-tiny": replace(
        _debug(_SMOLLM2_135M, head_dim=32), dim=192, n_heads=6, ffn_dim=512, init_std=192**-0.5
    ),
    "qwen2_5-1.5B": _QWEN2_5_1_5B,
    "qwen2_5-debug": _debug(_QWEN2_5_1_5B),
    "qwen3-1.7B": _QWEN3_1_7B,
    "qwen3-4B": _QWEN3_4B,
    "qwen3-8B": _QWEN3_8B,
    "qwen3-debug": _debug(_QWEN3_4B, head_dim=32),
    "qwen3-untied-debug": _debug(_QWEN3_8B, head_dim=32),
    "llada-8B": _LLADA_8B,
    "llada-debug": _debug(_LLADA_8B, n_kv_heads=4),
    "llada-tiny": replace(
        _debug(_LLADA_8B, head_dim=32),
        dim=192,
        n_heads=6,
        n_kv_heads=6,
        ffn_dim=512,
        init_std=192**-0.5,
    ),
    "dream-7B": _DREAM_7B,
    "dream-debug": _debug(_DREAM_7B),
}


def lookup(flavor: str) -> BackboneSize:
    """The size of a flavor such as ``"qwen3-8B"``.

    Raises :class:`UserError` that lists the flavors.
    """
    if flavor not in SIZES:
        raise unknown("model flavor", flavor, SIZES)
    return SIZES[flavor]


_UNRELATED_TO_LOGITS = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "mask_token_id",
    "context",
    "init_std",
}


def differences(first: BackboneSize, second: BackboneSize) -> list[str]:
    """Fields by which two sizes compute different logits; floats may differ by a float32 rounding."""
    names = [field.name for field in fields(BackboneSize) if field.name not in _UNRELATED_TO_LOGITS]
    return [name for name in names if not _same(getattr(first, name), getattr(second, name))]


def same_arithmetic(first: BackboneSize, second: BackboneSize) -> bool:
    """Whether two sizes differ at most in special tokens and context."""
    return not differences(first, second)


def _same(first: object, second: object) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-6)
    return first == second
