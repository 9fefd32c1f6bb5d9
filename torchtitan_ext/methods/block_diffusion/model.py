"""Model specs of block diffusion: a causal backbone whose parameters learn to fill blocks."""

from dataclasses import dataclass

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext import backbones
from torchtitan_ext.doubled import DoubledBackbone, check_kernel
from torchtitan_ext.methods.block_diffusion.config import Section
from torchtitan_ext.parallelize import parallelize_decoder


class BlockDiffusion(DoubledBackbone):
    """A causal backbone that fills blocks of masks; it has no parameters of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(DoubledBackbone.Config):
        policy: str
        """What decoding reveals in a forward."""

        tokens_per_forward: int
        """How many tokens "confidence" and "left_to_right" reveal."""

        threshold: float
        """Confidence over which "threshold" reveals a token."""


def model_registry(
    flavor: str,
    *,
    attention: str = "dense",
    hf_assets_path: str | None = None,
    section: Section | None = None,
) -> ModelSpec:
    """Spec of a causal backbone by flavor.

    Errors: UserError for a bidirectional backbone or packed attention; ValueError without a mask id.
    """
    section = section or Section()
    if section.mask_token_id is None:
        raise ValueError("block_diffusion.mask_token_id is not settled; models.build_spec does so")
    check_kernel(attention, method="block_diffusion")
    size = backbones.causal_size_for(flavor, hf_assets_path=hf_assets_path, method="block_diffusion")
    return ModelSpec(
        name="block_diffusion",
        flavor=flavor,
        model=BlockDiffusion.Config(
            **backbones.config_fields(size, attention=attention),
            mask_token_id=section.mask_token_id,
            block_size=section.block_size,
            clean_attention=section.clean_attention,
            policy=section.policy,
            tokens_per_forward=section.tokens_per_forward,
            threshold=section.threshold,
        ),
        parallelize_fn=parallelize_decoder,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=backbones.HFAdapter,
    )
