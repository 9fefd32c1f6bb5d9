"""Decoding of masked diffusion: a response of masks is revealed block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchtitan_ext.decoding.interface import Generation
from torchtitan_ext.decoding.masked_diffusion import AfterStop, Comparison, Policy, generate


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    policy: Policy = "one_token",
    tau: float | None = None,
    comparison: Comparison = "strict",
    after_stop: AfterStop = "drop",
    block_size: int | None = None,
    **kwargs: Any,
) -> Generation:
    """Continue every prompt; see :func:`~torchtitan_ext.decoding.masked_diffusion.generate`.

    ``block_size``: the model's, if not given.
    """
    config: Any = model.config
    return generate(
        model,
        prompts,
        mask_id=config.mask_token_id,
        prediction=config.prediction,
        policy=policy,
        tau=tau,
        comparison=comparison,
        after_stop=after_stop,
        block_size=config.block_size if block_size is None else block_size,
        **kwargs,
    )
