"""ALoDLM: WeDLM with a recurrent core whose depth each token chooses."""

from torchtitan_ext.methods.alodlm.config import Section, complete
from torchtitan_ext.methods.alodlm.model import model_registry
from torchtitan_ext.methods.alodlm.objective import build_objective

NO_WEIGHT_DECAY = (r"gate\.depth_bias$",)
"""Parameters without weight decay, whatever [optimizer] says: the hazards' starting point."""

__all__ = ["NO_WEIGHT_DECAY", "Section", "build_objective", "complete", "model_registry"]
