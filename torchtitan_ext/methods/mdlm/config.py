"""The TOML section [mdlm]."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan_ext import backbones
from torchtitan_ext.data.mask_token import resolve_mask_id
from torchtitan_ext.decoding.masked_diffusion import Prediction
from torchtitan_ext.errors import UserError

MASK_KEY = "[mdlm] mask_token_id"


@dataclass(kw_only=True, slots=True)
class Section:
    """Masked diffusion over a bidirectional backbone."""

    noise: Literal["document", "row"] = "document"
    """What shares one noise level: each document of a packed row, or the whole row."""

    eps: float = 1e-3
    """Least probability of a mask: p = (1 - eps) t + eps with t uniform; a masked token weighs 1 / p."""

    prediction: Literal["auto", "own", "shifted"] = "auto"
    """Where token i is read: from its own position (LLaDA) or from the one before (Dream); auto: as the
    family does."""

    padding: Literal["eos", "none"] = "eos"
    """What the padding at the end of a row is: EOS tokens of its last document, masked and predicted as
    the others, so that a response may be shorter than its masks; or nothing."""

    block_size: int = 32
    """Tokens of a block in decoding; training has no blocks."""

    mask_token_id: int | None = None
    """Id of the mask token. None: the family's, the tokenizer's, or the first id that it does not use."""

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ValueError(f"mdlm.eps must be above 0 and below 1, got {self.eps}")
        if self.block_size < 1:
            raise ValueError(f"mdlm.block_size must be at least 1, got {self.block_size}")


def complete(config: Any) -> None:
    """Settle the mask id and where tokens are read, so that the saved config names them.

    Errors: UserError for a causal backbone or a mask id outside the vocabulary.
    """
    section, model = config.mdlm, config.model
    size = bidirectional_size_for(model.flavor, method="mdlm", hf_assets_path=model.hf_assets_path or None)
    section.prediction = resolve_prediction(section.prediction, family=size.family)
    section.mask_token_id = resolve_mask_id(config, given=section.mask_token_id, where=MASK_KEY)


def resolve_prediction(choice: Literal["auto", "own", "shifted"], *, family: str) -> Prediction:
    """``auto`` as the family does."""
    if choice != "auto":
        return choice
    return "shifted" if family == "dream" else "own"


def bidirectional_size_for(
    flavor: str, *, method: str, hf_assets_path: str | Path | None = None
) -> backbones.BackboneSize:
    """The size of a bidirectional backbone.

    Errors: a causal one, with which ``method`` does not work.
    """
    size = backbones.size_for(flavor, hf_assets_path=hf_assets_path)
    if size.attention != "bidirectional":
        raise UserError(
            f"[model] name = {method!r} needs a bidirectional backbone, got flavor = {flavor!r}, "
            f"whose attention is {size.attention} (allowed: llada-* and dream-* flavors)"
        )
    return size
