"""Decoding of TDLM: masked diffusion whose forwards read and extend a memory of the earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from torchtitan_ext.decoding.interface import Generation
from torchtitan_ext.decoding.masked_diffusion import AfterStop, Comparison, Policy, generate
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.tdlm.memory import HistoryMemory


def decode(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    policy: Policy = "threshold",
    tau: float | None = None,
    window: int | Literal["full", "current", "off"] | None = None,
    comparison: Comparison = "strict",
    after_stop: AfterStop = "drop",
    block_size: int | None = None,
    **kwargs: Any,
) -> Generation:
    """Continue every prompt; see :func:`~torchtitan_ext.decoding.masked_diffusion.generate`.

    ``window``: which earlier forwards a masked position sees: all, the last n, or the current one
    alone (the temporal modules remain as gated adapters); ``off`` runs the frozen backbone; None:
    what the model was trained with. ``tau`` of ``threshold`` and ``block_size``: the model's, if not
    given. Errors: UserError for a window below 1.
    """
    config: Any = model.config
    if policy == "threshold" and tau is None:
        tau = config.tau
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
        memory=memory_of(model, window=window),
        **kwargs,
    )


def memory_of(
    model: nn.Module, *, window: int | Literal["full", "current", "off"] | None = None
) -> HistoryMemory | None:
    """An empty memory for a model; None for ``off``."""
    config: Any = model.config
    window = config.window if window is None else window
    if window == "off":
        return None
    if not (window in ("full", "current") or (isinstance(window, int) and window >= 1)):
        raise UserError(f"window must be at least 1, 'full', 'current' or 'off', got {window!r}")
    return HistoryMemory(head_dim=config.head_dim, window=window, shift=config.shift)
