"""TDLM: a frozen masked diffusion model whose masked positions attend to their own earlier hidden states."""

from torchtitan_ext.methods.tdlm.config import Section, complete
from torchtitan_ext.methods.tdlm.model import model_registry
from torchtitan_ext.methods.tdlm.objective import build_objective
from torchtitan_ext.methods.tdlm.state_dict_adapter import export_adapter

NO_WEIGHT_DECAY = (r"temporal\.sink$",)
"""Parameters without weight decay, whatever [optimizer] says: the sink logits."""

__all__ = [
    "NO_WEIGHT_DECAY",
    "Section",
    "build_objective",
    "complete",
    "export_adapter",
    "model_registry",
]
