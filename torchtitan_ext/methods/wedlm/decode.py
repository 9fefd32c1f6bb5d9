"""Decoding of WeDLM: a sliding window of masks, filled where the model is sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchtitan_ext.decoding.interface import Generation
from torchtitan_ext.decoding.streaming import Rules, generate


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    window: int | None = None,
    tau: float | None = None,
    position_penalty: float | None = None,
    **kwargs: Any,
) -> Generation:
    """Continue every prompt; see :class:`~torchtitan_ext.decoding.interface.Decoder`.

    What is not given comes from the section [wedlm] of the model's config.
    ``window``: masked slots a step begins with. ``tau``: slots whose entropy (nats), plus
    ``position_penalty`` for each slot of distance from the first masked one, is below it are
    filled, or else the least.
    """
    config: Any = model.config
    rules = Rules(
        window=config.window if window is None else window,
        tau=config.tau if tau is None else tau,
        position_penalty=config.position_penalty if position_penalty is None else position_penalty,
    )
    return generate(model, prompts, mask_id=config.mask_token_id, rules=rules, **kwargs)
