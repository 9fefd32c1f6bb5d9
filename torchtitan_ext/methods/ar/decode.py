"""Decoding of the autoregressive method: one token a forward."""

from torchtitan_ext.decoding.autoregressive import generate as decode

__all__ = ["decode"]
