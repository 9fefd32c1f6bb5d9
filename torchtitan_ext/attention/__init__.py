"""Attention kernels behind one call (dense, flex, varlen)."""

from torchtitan_ext.attention.dense import CachedAttention, DenseAttention, attend_dense, evaluate_mask
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
    "attend_dense",
    "backend_of",
    "build_mask",
    "evaluate_mask",
    "inner_attention_config",
    "resolve_backend",
]
