"""Block diffusion: the baseline that TiDAR is compared with, trained with the same recipe."""

from torchtitan_ext.methods.block_diffusion.config import Section, complete
from torchtitan_ext.methods.block_diffusion.model import model_registry
from torchtitan_ext.methods.block_diffusion.objective import build_objective

__all__ = ["Section", "build_objective", "complete", "model_registry"]
