"""Decoding of block diffusion: masks of a block are revealed forward by forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchtitan_ext.decoding.block_diffusion import Policy, generate
from torchtitan_ext.decoding.interface import Generation


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    policy: Policy | None = None,
    tokens_per_forward: int | None = None,
    threshold: float | None = None,
    **kwargs: Any,
) -> Generation:
    """Continue every prompt; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    What is not given comes from the section [block_diffusion] of the model's config.
    """
    config: Any = model.config
    return generate(
        model,
        prompts,
        mask_id=config.mask_token_id,
        block_size=config.block_size,
        clean=config.clean_attention,
        policy=config.policy if policy is None else policy,
        tokens_per_forward=config.tokens_per_forward if tokens_per_forward is None else tokens_per_forward,
        threshold=config.threshold if threshold is None else threshold,
        **kwargs,
    )
