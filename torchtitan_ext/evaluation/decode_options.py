"""``key=value,...`` to the keyword options of a decoder, checked against its signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_origin

from pydantic import TypeAdapter, ValidationError

from torchtitan_ext.config.toml_writer import describe, from_text, members
from torchtitan_ext.errors import UserError, unknown

OPTION = "--decode-options"
GIVEN = frozenset({"max_new_tokens", "stop_ids", "bos_id"})
"""What an evaluation gives every decoder itself."""


def available(decode: Callable[..., Any]) -> dict[str, Any]:
    """The keyword options that a word can express (numbers, strings, choices), with their types."""
    parameters = inspect.signature(decode, eval_str=True).parameters.values()
    return {
        p.name: p.annotation
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name not in GIVEN and _is_word(p.annotation)
    }


def _is_word(hint: Any) -> bool:
    return all(m in (bool, int, float, str, type(None)) or get_origin(m) is Literal for m in members(hint))


def parse_options(text: str, decode: Callable[..., Any]) -> dict[str, Any]:
    """The options in ``text`` with the types of the decoder's signature; empty text gives none.

    Errors: UserError for a part that is not key=value, a key that the decoder does not take or
    that comes twice, and a value of another type.
    """
    hints, options = available(decode), {}
    for part in text.split(",") if text.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UserError(f"{OPTION} {text!r}: got {part.strip()!r}, expected key=value,key=value")
        if key not in hints:
            raise unknown(f"key in {OPTION}", key, hints)
        if key in options:
            raise UserError(f"{OPTION} {text!r}: {key} comes twice")
        try:
            options[key] = TypeAdapter(hints[key]).validate_python(from_text(hints[key], value), strict=True)
        except ValidationError as error:
            raise UserError(f"{OPTION}: {key} is {value!r}, expected {describe(hints[key])}") from error
    return options
