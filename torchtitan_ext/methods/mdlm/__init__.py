"""Masked diffusion language models: every token of a document from what is left of it."""

from torchtitan_ext.methods.mdlm.config import Section, complete
from torchtitan_ext.methods.mdlm.model import model_registry
from torchtitan_ext.methods.mdlm.objective import build_objective

__all__ = ["Section", "build_objective", "complete", "model_registry"]
