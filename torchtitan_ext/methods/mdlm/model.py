"""Model specs of masked diffusion: a bidirectional backbone as it is."""

from dataclasses import dataclass

from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext import backbones
from torchtitan_ext.decoding.masked_diffusion import Prediction
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.mdlm.config import Section, bidirectional_size_for, resolve_prediction
from torchtitan_ext.parallelize import parallelize_decoder


class MaskedBackbone(backbones.Backbone):
    """A bidirectional backbone that fills masks. It has no parameters of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(backbones.Backbone.Config):
        mask_token_id: int
        """Id of the mask token; decoders read it here."""

        prediction: Prediction
        """Whether token i is read from its own position or from the one before."""

        block_size: int
        """Tokens of a block in decoding."""

        def update_from_config(self, *, config, **kwargs) -> None:
            degree = config.parallelism.pipeline_parallel_degree
            if degree > 1:
                # Only the masked positions are read out, and a pipeline hands on nothing but tokens.
                raise UserError(
                    f"[parallelism] pipeline_parallel_degree = {degree} does not work with "
                    f"[model] name = {config.model.name!r} (allowed: 1)"
                )
            backbones.Backbone.Config.update_from_config(self, config=config, **kwargs)


def model_registry(
    flavor: str,
    *,
    attention: str = "dense",
    hf_assets_path: str | None = None,
    section: Section | None = None,
) -> ModelSpec:
    """Spec of a bidirectional backbone by flavor.

    Errors: UserError for a causal backbone; ValueError without a mask id.
    """
    section = section or Section()
    if section.mask_token_id is None:
        raise ValueError("mdlm.mask_token_id is not settled; models.build_spec does so")
    size = bidirectional_size_for(flavor, method="mdlm", hf_assets_path=hf_assets_path)
    return ModelSpec(
        name="mdlm",
        flavor=flavor,
        model=MaskedBackbone.Config(
            **backbones.config_fields(size, attention=attention),
            mask_token_id=section.mask_token_id,
            prediction=resolve_prediction(section.prediction, family=size.family),
            block_size=section.block_size,
        ),
        parallelize_fn=parallelize_decoder,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=backbones.HFAdapter,
    )
