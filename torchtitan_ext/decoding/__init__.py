"""Decoding: KV cache, sampling, one file per decoder."""

from torchtitan_ext.decoding.autoregressive import generate
from torchtitan_ext.decoding.interface import (
    Decoder,
    FinishReason,
    Generation,
    GenerationResult,
    OnToken,
    decoder_for,
)
from torchtitan_ext.decoding.kv_cache import KVCache
from torchtitan_ext.decoding.sampling import SamplingParams
from torchtitan_ext.decoding.text import TextStream

__all__ = [
    "Decoder",
    "FinishReason",
    "Generation",
    "GenerationResult",
    "KVCache",
    "OnToken",
    "SamplingParams",
    "TextStream",
    "decoder_for",
    "generate",
]
