"""Autoregressive next-token training: the baseline of every method."""

from torchtitan_ext.methods.ar.model import model_registry
from torchtitan_ext.methods.ar.objective import build_objective

__all__ = ["build_objective", "model_registry"]
