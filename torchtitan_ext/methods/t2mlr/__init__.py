"""T2MLR: temporal middle-layer recurrence with Jacobi-parallel training."""

from torchtitan_ext.methods.t2mlr.config import Section
from torchtitan_ext.methods.t2mlr.model import model_registry
from torchtitan_ext.methods.t2mlr.objective import build_objective

NO_WEIGHT_DECAY = (r"fusion\.g_(current|recurrent)$",)
"""Parameters without weight decay, whatever [optimizer] says: the gates."""

__all__ = ["NO_WEIGHT_DECAY", "Section", "build_objective", "model_registry"]
