"""Model specs of the autoregressive method: a backbone as it is."""

from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext import backbones
from torchtitan_ext.parallelize import parallelize_decoder


def model_registry(flavor: str, *, attention: str = "dense", hf_assets_path: str | None = None) -> ModelSpec:
    """Spec of a backbone by flavor, such as "smollm2-135M".

    ``attention`` is a resolved backend; ``hf_assets_path`` is needed for flavor
    "hf", which takes family and sizes from that folder's config.json.
    """
    size = backbones.size_for(flavor, hf_assets_path=hf_assets_path)
    return ModelSpec(
        name="ar",
        flavor=flavor,
        model=backbones.build_config(size, attention=attention),
        parallelize_fn=parallelize_decoder,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=backbones.HFAdapter,
    )
