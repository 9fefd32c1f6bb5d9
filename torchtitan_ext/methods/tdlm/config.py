"""The TOML section [tdlm]."""

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_ext.data.mask_token import resolve_mask_id
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.mdlm.config import bidirectional_size_for, resolve_prediction

MASK_KEY = "[tdlm] mask_token_id"


@dataclass(kw_only=True, slots=True)
class Section:
    """Attention over earlier denoising steps in a frozen masked diffusion model."""

    layers: list[int] | Literal["dispersed", "middle"] = "dispersed"
    """Layers with a temporal module: zero-based, or `count` of them evenly spaced or in the middle."""

    count: int = 0
    """How many layers "dispersed" and "middle" mean; 0: half of them."""

    heads: int = 4
    """Heads of a temporal module, M."""

    head_dim: int = 64
    """Width of a head, d_h; even, since the temporal rotation turns pairs."""

    window: int | Literal["full", "current"] = "full"
    """What a position remembers: every earlier evaluation, the last n, or only the current one (which
    leaves a gated adapter without memory)."""

    shift: Literal["literal", "moved"] = "literal"
    """Which hidden states are corrected: those at masked tokens (the paper), or those from which masked
    tokens are predicted; they differ for models that read token i at i - 1 (Dream)."""

    prediction: Literal["auto", "own", "shifted"] = "auto"
    """Where token i is read: from its own position (LLaDA) or from the one before (Dream); auto: as the
    family does."""

    states: int = 8
    """States sampled from each trajectory in a training step, K."""

    tau: float = 0.9
    """Confidence above which decoding reveals a token."""

    block_size: int = 32
    """Tokens of a block in decoding."""

    mask_token_id: int | None = None
    """Id of the mask token. None: the family's, the tokenizer's, or the first id that it does not use."""

    def __post_init__(self) -> None:
        if isinstance(self.window, bool):
            raise ValueError(f"tdlm.window must be a number, 'full' or 'current', got {self.window}")
        if self.count < 0:
            raise ValueError(f"tdlm.count must not be negative, got {self.count}")
        for key in ("heads", "head_dim", "window", "block_size"):
            value = getattr(self, key)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"tdlm.{key} must be at least 1, got {value}")
        if self.head_dim % 2:
            raise ValueError(
                f"tdlm.head_dim must be even, since the temporal rotation turns pairs, got {self.head_dim}"
            )
        if self.states < 2:
            raise ValueError(
                f"tdlm.states (K) must be at least 2, one to remember and one to train, got {self.states}"
            )
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tdlm.tau must be between 0 and 1, got {self.tau}")


def complete(config: Any) -> None:
    """Settle the mask id and where tokens are read, so that the saved config names them.

    Errors: UserError for a causal backbone or a mask id outside the vocabulary.
    """
    section, model = config.tdlm, config.model
    size = bidirectional_size_for(model.flavor, method="tdlm", hf_assets_path=model.hf_assets_path or None)
    section.prediction = resolve_prediction(section.prediction, family=size.family)
    section.mask_token_id = resolve_mask_id(config, given=section.mask_token_id, where=MASK_KEY)


def temporal_layers(section: Section, *, n_layers: int) -> list[int]:
    """The layers with a temporal module, zero-based and ascending.

    "dispersed": the middles of ``count`` equal parts of the backbone (every second layer: 1, 3, 5,
    ...); "middle": ``count`` neighbours. Errors: UserError for a layer that the backbone does not
    have or that is named twice, or for more layers than it has.
    """
    if not isinstance(section.layers, str):
        wrong = [i for i in section.layers if not 0 <= i < n_layers]
        if wrong or not section.layers:
            got = f"layer {wrong[0]}" if wrong else "no layer"
            raise UserError(
                f"[tdlm] layers = {section.layers} names {got} (allowed: layers 0 to {n_layers - 1})"
            )
        if len(set(section.layers)) < len(section.layers):
            raise UserError(f"[tdlm] layers = {section.layers} names a layer twice")
        return sorted(section.layers)
    count = section.count or max(n_layers // 2, 1)
    if count > n_layers:
        raise UserError(f"[tdlm] count = {count} is more than the backbone's {n_layers} layers")
    if section.layers == "middle":
        first = (n_layers - count) // 2
        return list(range(first, first + count))
    return [(2 * i + 1) * n_layers // (2 * count) for i in range(count)]
