"""WeDLM: streaming block diffusion under causal attention."""

from torchtitan_ext.methods.wedlm.config import Section, complete
from torchtitan_ext.methods.wedlm.model import model_registry
from torchtitan_ext.methods.wedlm.objective import build_objective

__all__ = ["Section", "build_objective", "complete", "model_registry"]
