"""Which decoder a tool runs: a named strategy, or the method's own."""

from __future__ import annotations

import inspect

from torch import nn

from torchtitan_ext.decoding.interface import Decoder, decoder_for
from torchtitan_ext.decoding.strategies import Strategy, decoder_of


def chosen_decoder(strategy: Strategy | None, model: nn.Module, *, method: str) -> Decoder:
    """The decoder of a strategy; without one, that of the method.

    Errors: UserError for a strategy that the model cannot follow.
    """
    if strategy is None:
        return decoder_for(method)
    return decoder_of(strategy, model, method=method)


def reports_steps(decode: Decoder, model: nn.Module) -> bool:
    """Whether a decoder takes ``on_step``: those do that may emit several tokens a forward.

    A method's ``decode`` hands on what it does not know to one that does, if its model has a mask token.
    """
    parameters = inspect.signature(decode).parameters
    hands_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "on_step" in parameters or (hands_on and _has_mask_token(model))


def _has_mask_token(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "mask_token_id", None) is not None
