"""Attention kernels behind one call (dense, flex, varlen)."""

from torchtitan_ext.attention.dense import (
    CachedAttention,
    DenseAttention,
    TiledMask,
    attend_dense,
    build_dense_mask,
    evaluate_mask,
    tiled,
)
from torchtitan_ext.attention.dispatch import (
    BACKENDS,
    backend_of,
    build_mask,
    inner_attention_config,
    resolve_backend,
)

__all__ = [
    "BACKENDS",
    "CachedAttention",
    "DenseAttention",
    "TiledMask",
    "attend_dense",
    "backend_of",
    "build_dense_mask",
    "build_mask",
    "evaluate_mask",
    "inner_attention_config",
    "resolve_backend",
    "tiled",
]
