"""Looped and pause-token transformers and an LSTM: the baselines of temporal recurrence."""

from torchtitan_ext.methods.looped.config import Section
from torchtitan_ext.methods.looped.model import model_registry
from torchtitan_ext.methods.looped.objective import build_objective

__all__ = ["Section", "build_objective", "model_registry"]
