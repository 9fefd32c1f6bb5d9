"""Model specs of WeDLM: a causal backbone as it is, trained and decoded with WeDLM's masks."""

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext import backbones, masks
from torchtitan_ext.attention import build_mask
from torchtitan_ext.doubled import DoubledBackbone, check_kernel
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.wedlm.config import Section
from torchtitan_ext.parallelize import parallelize_decoder


class WeDLM(DoubledBackbone):
    """A causal backbone that is trained on dual streams. It has no parameters of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(DoubledBackbone.Config):
        window: int
        """Decoding: masks that are filled at the same time."""

        tau: float
        """Decoding: the entropy below which a mask is filled."""

        position_penalty: float
        """Decoding: added to the entropy for each position behind the first mask."""

    def get_attention_masks(self, positions: torch.Tensor) -> Any:
        """The mask of a dual stream, in the form the kernel takes; ``positions``: [B, 2S]."""
        config = self.config
        assert isinstance(config, WeDLM.Config)
        return build_mask(masks.dual_stream(positions, block_size=config.block_size), config.attention)


def model_registry(
    flavor: str,
    *,
    attention: str = "dense",
    hf_assets_path: str | None = None,
    section: Section | None = None,
) -> ModelSpec:
    """Spec of a causal backbone by flavor.

    Errors: UserError for a bidirectional backbone, packed attention, or no mask id.
    """
    section = section or Section()
    if section.mask_token_id is None:
        raise UserError(
            "[wedlm] mask_token_id must be given here; only a training run takes it from the tokenizer"
        )
    check_kernel(attention, method="wedlm")
    size = backbones.causal_size_for(flavor, hf_assets_path=hf_assets_path, method="wedlm")
    return ModelSpec(
        name="wedlm",
        flavor=flavor,
        model=WeDLM.Config(
            **backbones.config_fields(size, attention=attention),
            mask_token_id=section.mask_token_id,
            block_size=section.block_size,
            window=section.window,
            tau=section.tau,
            position_penalty=section.position_penalty,
        ),
        parallelize_fn=parallelize_decoder,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=backbones.HFAdapter,
    )
