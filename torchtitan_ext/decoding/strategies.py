"""Decoding strategies by name, for generation and evaluation: ``tidar:8``, ``threshold:0.7``.

They are the rows of TiDAR table 4, the policies that TDLM is compared with, and ``stream``, the
decoder of streaming methods. Which of them a model can follow depends on what it was trained for
(:data:`KINDS`); one name means the same on all of them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

from torch import nn

from torchtitan_ext import errors, registry
from torchtitan_ext.decoding import autoregressive, block_diffusion, clean_stream, self_speculative
from torchtitan_ext.decoding.depth_cache import Passes
from torchtitan_ext.decoding.interface import Decoder, decoder_for
from torchtitan_ext.errors import UserError

Kind = Literal["ar", "tidar", "confidence", "threshold", "left_to_right", "one_token", "entropy", "stream"]
Family = Literal["plain", "blocks", "denoising", "streaming"]

FORMS: dict[Kind, tuple[str, ...]] = {
    "ar": (),
    "tidar": ("DRAFT", "BETA"),
    "confidence": ("K",),
    "threshold": ("TAU",),
    "left_to_right": ("K",),
    "one_token": (),
    "entropy": ("NATS",),
    "stream": (),
}
"""What may follow each name, separated by colons."""

KINDS: dict[Family, tuple[Kind, ...]] = {
    "plain": ("ar",),
    "blocks": ("ar", "tidar", "confidence", "threshold", "left_to_right"),
    "denoising": ("one_token", "threshold", "entropy", "confidence"),
    "streaming": ("ar", "stream"),
}
"""What each family of models can follow; see :func:`family_of`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """How a model is decoded; the fields that ``kind`` does not name are ignored by it."""

    kind: Kind
    """``ar``: one token a forward; ``tidar``: self-speculation; ``stream``: a sliding window of masks;
    the others: masked blocks."""

    draft_length: int | None = None
    """DRAFT of ``tidar``: tokens drafted for a forward; None is the model's block size."""

    beta: float = 1.0
    """BETA of ``tidar``: weight of the autoregressive logits when drafts are judged."""

    tokens_per_forward: int = 1
    """K of ``confidence`` and ``left_to_right``."""

    threshold: float = 0.9
    """TAU of ``threshold``."""

    nats: float = 0.5
    """NATS of ``entropy``: tokens whose entropy is below it are revealed."""

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
            "one_token": [],
            "entropy": ["" if self.nats == 0.5 else _short(self.nats)],
            "stream": [],
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
            case "one_token":
                return "One token a forward"
            case "entropy":
                return f"Entropy < {_short(self.nats)}"
            case "stream":
                return "Streaming"


def parse(text: str) -> Strategy:
    """A strategy from its name: ``ar``, ``tidar[:DRAFT[:BETA]]``, ``confidence[:K]``,
    ``left_to_right[:K]``, ``threshold[:TAU]``, ``one_token``, ``entropy[:NATS]`` or ``stream``; an empty
    value is the default.

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


def family_of(model: nn.Module) -> Family:
    """What decides how a model can be decoded.

    ``plain``: no mask token; ``denoising``: says from which position a masked token is read;
    ``streaming``: fills a window of masks by entropy; ``blocks``: any other with a mask token.
    """
    config = getattr(model, "config", None)
    if getattr(config, "mask_token_id", None) is None:
        return "plain"
    if getattr(config, "prediction", None) is not None:
        return "denoising"
    return "streaming" if getattr(config, "position_penalty", None) is not None else "blocks"


def decoder_of(strategy: Strategy, model: nn.Module, *, method: str | None = None) -> Decoder:
    """The decoder of a strategy, with the mask token and the block size of the model.

    ``method``: whose own decoder ``ar`` of a model without a mask token, ``stream`` and the policies of
    denoising mean; what a strategy does not say is as the model's config has it.
    Besides what every decoder takes, all but the one of ``ar`` take ``on_step``.
    Errors: UserError for a strategy that the model's method does not have.
    """
    family = family_of(model)
    _check(strategy, model, family=family, method=method)
    if family == "blocks" and strategy.kind != "ar":
        return _block_decoder(strategy, model)
    if strategy.kind == "ar" and family == "streaming":
        return partial(clean_stream.generate, passes=_passes_of(model, method=method))
    if strategy.kind == "ar" and (family != "plain" or method is None):
        return autoregressive.generate
    if method is None:
        raise ValueError(f"{strategy.name!r} is decoded by the model's own method; name it")
    own = decoder_for(method)
    return cast(Decoder, partial(own, **_POLICIES[strategy.kind](strategy))) if family == "denoising" else own


def _passes_of(model: nn.Module, *, method: str | None) -> type[Passes]:
    """How a token goes through a streaming model: its method's ``LoopedPasses`` where there are several."""
    if getattr(model.config, "passes", 1) == 1:
        return Passes
    if method is None:
        raise ValueError("'ar' of a recurrent core is decoded by the passes of its method; name it")
    return importlib.import_module(f"{registry.method(method).__name__}.decode").LoopedPasses


_POLICIES: dict[Kind, Callable[[Strategy], dict[str, Any]]] = {
    "one_token": lambda strategy: {"policy": "one_token"},
    "confidence": lambda strategy: {"policy": "one_token"},
    "threshold": lambda strategy: {"policy": "threshold", "tau": strategy.threshold},
    "entropy": lambda strategy: {"policy": "entropy", "tau": strategy.nats},
}
"""Options of the decoders of denoising; the most confident token alone is their ``one_token``."""


def _check(strategy: Strategy, model: nn.Module, *, family: Family, method: str | None) -> None:
    """Errors: UserError, with what can be followed, for a strategy that this model cannot."""
    allowed = KINDS[family]
    several = strategy.kind == "confidence" and strategy.tokens_per_forward > 1
    if strategy.kind in allowed and not (several and family == "denoising"):
        return
    whose = f"method {method!r}" if method is not None else f"this {type(model).__name__}"
    what = f"{whose} has no decoding strategy {strategy.name!r}"
    if family == "plain":
        what = (
            f"decoding strategy {strategy.name!r} needs a model trained with a mask token; {whose} has none"
        )
    shown = ["confidence:1" if family == "denoising" and kind == "confidence" else kind for kind in allowed]
    raise UserError(f"{what} (allowed: {', '.join(sorted(shown))})")


def _block_decoder(strategy: Strategy, model: nn.Module) -> Decoder:
    """``tidar``, or a policy of masked blocks."""
    config: Any = model.config
    clean: Any = getattr(config, "clean_attention", "causal")
    block_size: int | None = getattr(config, "block_size", None)
    if block_size is None:
        raise UserError(
            f"decoding strategy {strategy.name!r} needs a model trained on masked blocks, "
            f"but the config of this {type(model).__name__} has no block_size"
        )
    if strategy.kind != "tidar":
        bound = partial(
            block_diffusion.generate,
            mask_id=config.mask_token_id,
            block_size=block_size,
            policy=cast(Any, strategy.kind),
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
    bound = partial(
        self_speculative.generate, mask_id=config.mask_token_id, draft_length=draft_length, beta=strategy.beta
    )
    return cast(Decoder, bound)


def _short(value: float) -> str:
    """The number as a user would write it, without loss."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


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


def _nats(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise UserError(f"decoding strategy {text!r}: {name} must be a number of at least 0, got {value!r}")
    return number


_VALUES: dict[str, tuple[str, Callable[[str, str, str], Any]]] = {
    "DRAFT": ("draft_length", _count),
    "BETA": ("beta", _fraction),
    "K": ("tokens_per_forward", _count),
    "TAU": ("threshold", _fraction),
    "NATS": ("nats", _nats),
}
