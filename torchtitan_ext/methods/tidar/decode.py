"""Decoding of TiDAR: drafts and their verification in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchtitan_ext.decoding.interface import Generation
from torchtitan_ext.decoding.self_speculative import generate


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    draft_length: int | None = None,
    beta: float = 1.0,
    **kwargs: Any,
) -> Generation:
    """Continue every prompt; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    ``draft_length``: tokens drafted a forward (default: the block size in training).
    ``beta``: weight of the autoregressive head in verification; 1 gives exactly what plain
    autoregressive decoding of the same weights gives (TiDAR section 4.4.3).
    """
    config: Any = model.config
    return generate(
        model,
        prompts,
        mask_id=config.mask_token_id,
        draft_length=config.block_size if draft_length is None else draft_length,
        beta=beta,
        **kwargs,
    )
