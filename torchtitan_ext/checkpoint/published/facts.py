"""What the description of a published folder consists of, and how its fields are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published folder in this package's terms."""

    method: str
    """[model] name."""

    section: dict[str, Any]
    """The method's own section."""

    backbone: dict[str, Any]
    """config.json of the backbone alone, as transformers writes it."""

    place: Callable[[str], str]
    """Name of a backbone's tensor in transformers -> its name in the folder."""

    own: dict[str, str]
    """Parameters that the method adds: this package's name -> name in the folder's safetensors."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that come from other files: this package's name -> value."""


def whole_number(values: Mapping[str, Any], name: str, *, where: str) -> int:
    """A field that must be an int."""
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{where}: {name} must be a whole number, got {value!r}")
    return value


def require(values: Mapping[str, Any], needed: Mapping[str, Any], *, where: str) -> None:
    """Refuse fields with another value than the one this package computes."""
    for name, value in needed.items():
        got = values.get(name)
        if got != value or isinstance(got, bool) != isinstance(value, bool):
            raise UserError(f"{where} has {name} = {got!r}; only {value!r} is supported")
