"""Model specs of TiDAR: a causal backbone as it is, trained and decoded with TiDAR's masks."""

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext import backbones
from torchtitan_ext.doubled import DoubledBackbone, check_kernel
from torchtitan_ext.methods.tidar.config import Section
from torchtitan_ext.parallelize import parallelize_decoder


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
        raise ValueError("tidar.mask_token_id is not settled; models.build_spec does so")
    check_kernel(attention, method="tidar")
    size = backbones.causal_size_for(flavor, hf_assets_path=hf_assets_path, method="tidar")
    return ModelSpec(
        name="tidar",
        flavor=flavor,
        model=DoubledBackbone.Config(
            **backbones.config_fields(size, attention=attention),
            mask_token_id=section.mask_token_id,
            block_size=section.block_size,
            mask_layout=section.mask_layout,
        ),
        parallelize_fn=parallelize_decoder,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=backbones.HFAdapter,
    )
