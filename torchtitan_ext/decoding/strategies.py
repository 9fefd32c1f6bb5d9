"""Decoding strategies by name, for generation and evaluation: ``tidar:8``, ``threshold:0.7``.

They are the rows of TiDAR table 4, and the same names work on every model that has a mask token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

from torch import nn

from torchtitan_ext import errors
from torchtitan_ext.decoding import autoregressive, block_diffusion, self_speculative
from torchtitan_ext.decoding.interface import Decoder
from torchtitan_ext.errors import UserError

Kind = Literal["ar", "tidar", "confidence", "threshold", "left_to_right"]

FORMS: dict[Kind, tuple[str, ...]] = {
    "ar": (),
    "tidar": ("DRAFT", "BETA"),
    "confidence": ("K",),
    "threshold": ("TAU",),
    "left_to_right": ("K",),
}
"""What may follow each name, separated by colons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How a model is decoded; the fields that ``kind`` does not name are ignored by it."""

    kind: Kind
    """``ar``: one token a forward; ``tidar``: self-speculation; the others: masked blocks."""

    draft_length: int | None = None
    """DRAFT of ``tidar``: tokens drafted for a forward; None is the model's block size."""

    beta: float = 1.0
    """BETA of ``tidar``: weight of the autoregressive logits when drafts are judged."""

    tokens_per_forward: int = 1
    """K of ``confidence`` and ``left_to_right``."""

    threshold: float = 0.9
    """TAU of ``threshold``."""

    @property
    def name(self) -> str:
        """The shortest text that :func:`parse` reads as this strategy."""
        draft = "" if self.draft_length is None else str(self.draft_length)
        values = {
            "ar": [],
            "tidar": [draft, "" if self.beta == 1 else _short(self.beta)],
            "confidence": ["" if self.tokens_per_forward == 1 else str(self.tokens_per_forward)],
            "left_to_right": ["" if self.tokens_per_forward == 1 else str(self.tokens_per_forward)],
            "threshold": ["" if self.threshold == 0.9 else _short(self.threshold)],
        }[self.kind]
        return ":".join([self.kind, *values]).rstrip(":")

    @property
    def label(self) -> str:
        """What a table or a plot says."""
        match self.kind:
            case "ar":
                return "AR"
            case "tidar":
                drafts = "" if self.draft_length is None else f", {self.draft_length} drafts"
                return f"TiDAR{drafts}" + ("" if self.beta == 1 else f", beta {_short(self.beta)}")
            case "confidence":
                return f"Confidence max, {self.tokens_per_forward} a forward"
            case "left_to_right":
                return f"Left to right, {self.tokens_per_forward} a forward"
            case "threshold":
                return f"Confidence > {_short(self.threshold)}"


def parse(text: str) -> Strategy:
    """A strategy from its name: ``ar``, ``tidar[:DRAFT[:BETA]]``, ``confidence[:K]``,
    ``left_to_right[:K]`` or ``threshold[:TAU]``; an empty value is the default.

    Errors: an unknown name (with the nearest), a value too many, or one outside its range.
    """
    kind, *values = text.strip().split(":")
    if kind not in FORMS:
        raise errors.unknown("decoding strategy", kind, get_args(Kind))
    names = FORMS[kind]
    if len(values) > len(names):
        form = kind + "".join(f"[:{name}" for name in names) + "]" * len(names)
        raise UserError(f"decoding strategy {text!r} has too many values (allowed: {form})")
    given = {}
    for name, value in zip(names, values, strict=False):
        if value:
            key, read = _VALUES[name]
            given[key] = read(text, name, value)
    return Strategy(kind=kind, **given)


def decoder_of(strategy: Strategy, model: nn.Module) -> Decoder:
    """The decoder of a strategy, with the mask token and the block size of the model.

    Besides what every decoder takes, all but the one of ``ar`` take ``on_step``.
    Errors: a model without a mask token; ``tidar`` on one whose clean tokens see their whole block.
    """
    if strategy.kind == "ar":
        return autoregressive.generate
    mask_id, block_size = _trained(model, "mask_token_id", strategy), _trained(model, "block_size", strategy)
    clean: Any = getattr(model.config, "clean_attention", "causal")
    if strategy.kind != "tidar":
        bound = partial(
            block_diffusion.generate,
            mask_id=mask_id,
            block_size=block_size,
            policy=strategy.kind,
            tokens_per_forward=strategy.tokens_per_forward,
            threshold=strategy.threshold,
            clean=clean,
        )
        return cast(Decoder, bound)
    if clean != "causal":
        raise UserError(
            f"decoding strategy {strategy.name!r} verifies drafts with causal clean tokens, "
            f"but the model was trained with clean_attention = {clean!r}"
        )
    draft_length = block_size if strategy.draft_length is None else strategy.draft_length
    bound = partial(self_speculative.generate, mask_id=mask_id, draft_length=draft_length, beta=strategy.beta)
    return cast(Decoder, bound)


def _short(value: float) -> str:
    """The number as a user would write it, without loss."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _trained(model: nn.Module, key: str, strategy: Strategy) -> int:
    value = getattr(getattr(model, "config", None), key, None)
    if value is None:
        raise UserError(
            f"decoding strategy {strategy.name!r} needs a model trained with a mask token "
            f"(methods tidar, block_diffusion), but the config of this {type(model).__name__} has no {key}"
        )
    return value


def _count(text: str, name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) > 0):
        raise UserError(
            f"decoding strategy {text!r}: {name} must be a whole number of at least 1, got {value!r}"
        )
    return int(value)


def _fraction(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise UserError(f"decoding strategy {text!r}: {name} must be a number between 0 and 1, got {value!r}")
    return number


_VALUES: dict[str, tuple[str, Callable[[str, str, str], Any]]] = {
    "DRAFT": ("draft_length", _count),
    "BETA": ("beta", _fraction),
    "K": ("tokens_per_forward", _count),
    "TAU": ("threshold", _fraction),
}
