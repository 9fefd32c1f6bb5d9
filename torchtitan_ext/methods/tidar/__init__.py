"""TiDAR: one transformer that drafts by diffusion and verifies autoregressively."""

from torchtitan_ext.methods.tidar.config import Section, complete
from torchtitan_ext.methods.tidar.model import model_registry
from torchtitan_ext.methods.tidar.objective import build_objective

__all__ = ["Section", "build_objective", "complete", "model_registry"]
