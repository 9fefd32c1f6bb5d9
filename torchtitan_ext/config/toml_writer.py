"""What of a config tree can be set, its types and values in words, and the tree written as TOML.

The tree is a dataclass whose fields are sections (dataclasses). ``None`` has no
TOML form: a ``None`` that is also the class's default is left out, any other is
written as the string ``"none"``, which the reader turns back for fields that may
be ``None``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import tomli_w
import tyro

from torchtitan_ext.errors import UserError

SECTION_NAMES = {"profiler": "profiling", "validator": "validation"}
"""Field of the root -> its TOML section, where the two differ."""

_FIRST = ("job", "model")
"""Sections that come first in a file and in messages; the others keep the order of the fields."""

NONE = "none"
"""How ``None`` is written."""


class Entry(NamedTuple):
    """One settable field of a dataclass."""

    field: str
    hint: Any
    value: Any
    """The current value, or the default of a class that has no instance yet."""

    default: Any
    """The class's default (``dataclasses.MISSING`` without one)."""

    section: Any
    """Instance or class with the keys below, or None for a plain value."""


def bare(hint: Any) -> Any:
    """The type without ``Annotated`` metadata."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return hint


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type (itself, if it is no union)."""
    hint = bare(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(bare(m) for m in get_args(hint))
    return (hint,)


def is_optional(hint: Any) -> bool:
    """Whether the type admits ``None``."""
    return type(None) in members(hint)


def dataclass_of(hint: Any) -> type | None:
    """The only dataclass among the type's alternatives, if there is exactly one."""
    found = [m for m in members(hint) if dataclasses.is_dataclass(m) and isinstance(m, type)]
    return found[0] if len(found) == 1 else None


def choices(hint: Any) -> tuple[Any, ...]:
    """The values that the type names one by one (``Literal``)."""
    return tuple(c for m in members(hint) if get_origin(m) is Literal for c in get_args(m) if c is not None)


_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "none"}


def describe(hint: Any) -> str:
    """The type in words."""
    parts: list[str] = []
    for member in members(hint):
        origin, args = get_origin(member) or member, get_args(member)
        if origin is Literal:
            parts += [show(c, kind=False) for c in args]
        elif origin in (list, tuple):
            each = " and ".join(dict.fromkeys(describe(a) for a in args if a is not Ellipsis))
            parts.append(f"a list (each {each})" if each else "a list")
        elif origin is dict or dataclasses.is_dataclass(member):
            parts.append("a table")
        else:
            parts.append(_KINDS.get(member, "any value"))
    if "a number" in parts and "an integer" in parts:
        parts.remove("an integer")
    parts.sort(key="none".__eq__)
    return ", ".join(parts[:-1]) + " or " + parts[-1] if len(parts) > 1 else parts[0]


def show(value: Any, *, kind: bool = True) -> str:
    """A value as it stands in TOML, shortened, with its kind."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "table"}
    text = str(value).lower() if isinstance(value, bool) or value is None else repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{text} ({names.get(type(value), type(value).__name__)})" if kind else text


_WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_ORDER = {int: 0, float: 1, bool: 2, str: 4}


def from_text(hint: Any, text: str) -> Any:
    """A word of the command line as the value that a TOML file would hold.

    Lists are comma-separated or JSON, tables and lists of lists JSON, ``None``
    is none or null. A word that fits no alternative is returned as it is, for
    the type check to refuse.
    """
    for choice in choices(hint):
        if str(choice) == text:
            return choice
    if text.lower() in (NONE, "null") and is_optional(hint):
        return None
    alternatives = sorted(members(hint), key=lambda m: _ORDER.get(m, 3))
    for member in alternatives:
        value = _member_from_text(member, text)
        if value is not None:
            return value
    for member in alternatives:
        # A plain string, where one is allowed, is not a list of one.
        if (get_origin(member) or member) in (list, tuple) and str not in alternatives:
            return _split(text, get_args(member))
    return text


def _member_from_text(member: Any, text: str) -> Any:
    """The word as one type, None if it is not of that type."""
    if member is bool:
        return _WORDS.get(text.lower())
    if member is str:
        return text
    if member in (int, float):
        try:
            return member(text)
        except ValueError:
            return None
    container = get_origin(member) or member
    if container in (list, tuple, dict) or dataclasses.is_dataclass(member):
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            return None
        return value if isinstance(value, list if container in (list, tuple) else dict) else None
    return None


def _split(text: str, args: tuple[Any, ...]) -> list[Any] | str:
    """A comma-separated list, each item as its type; the text itself if the items are lists or tables."""
    containers = [m for a in args if a is not Ellipsis for m in members(a) if m not in _KINDS]
    if any(get_origin(m) is not Literal for m in containers):
        return text
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    if len(args) != len(items) or Ellipsis in args:
        args = (args[0] if args else str,) * len(items)
    return [from_text(hint, item) for hint, item in zip(args, items, strict=True)]


def is_flag(hint: Any) -> bool:
    """Whether an option of the type may stand without a value."""
    return set(members(hint)) <= {bool, type(None)}


def _is_toml(hint: Any, *, nested: bool = False) -> bool:
    """Whether values of the type can be written in TOML. ``Any`` only inside a container."""
    alternatives = members(hint)
    if len(alternatives) > 1:
        several = sum(dataclasses.is_dataclass(m) for m in alternatives) > 1
        return not several and all(_is_toml(m, nested=nested) for m in alternatives)
    (hint,) = alternatives
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(a is None or isinstance(a, (str, int)) for a in args)
    if origin in (list, tuple):
        return all(a is Ellipsis or _is_toml(a, nested=True) for a in args)
    if origin is dict:
        return args[0] is str and _is_toml(args[1], nested=True)
    if hint is Any:
        return nested
    return hint in (bool, int, float, str, list, tuple, dict, type(None)) or dataclasses.is_dataclass(hint)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def entries(node: Any, *, root: bool = False) -> dict[str, Entry]:
    """Settable fields by TOML name, of a config or of a config class; at the root only sections.

    Skipped: fields without ``init``, fields that tyro suppresses, and types
    that TOML cannot hold (callables, modules).
    """
    cls = node if isinstance(node, type) else type(node)
    hints = typing.get_type_hints(cls, include_extras=True)
    found: dict[str, Entry] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if not field.init or tyro.conf.Suppress in getattr(hint, "__metadata__", ()):
            continue
        default = _default(field)
        value = default if isinstance(node, type) else getattr(node, field.name)
        section = value if _is_config(value) else dataclass_of(hint)
        if section is None and (root or not _is_toml(hint)):
            continue
        name = SECTION_NAMES.get(field.name, field.name) if root else field.name
        found[name] = Entry(field.name, hint, value, default, section)
    return {n: found[n] for n in _FIRST if n in found} | found if root else found


def leaves(node: Any, *, prefix: str = "") -> list[str]:
    """Dotted names of all keys below."""
    found: list[str] = []
    for name, entry in entries(node, root=not prefix).items():
        dotted = f"{prefix}{name}"
        found += [dotted] if entry.section is None else leaves(entry.section, prefix=f"{dotted}.")
    return found


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _plain(value: Any, *, key: str) -> Any:
    """A value as TOML holds it."""
    if _is_config(value):
        return _table(value, key=key)
    if isinstance(value, (list, tuple)):
        return [_plain(v, key=key) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v, key=f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"{key}: {value!r} ({type(value).__name__}) cannot be written to TOML")


def _table(config: Any, *, key: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, entry in entries(config).items():
        if entry.value is not None:
            table[name] = _plain(entry.value, key=f"{key}.{name}")
        elif entry.default is not None:
            table[name] = NONE
    return table


def to_dict(config: Any) -> dict[str, Any]:
    """The settable tree by TOML section and key, with plain values.

    Sections without a key are left out.

    Raises:
        UserError: a value that TOML cannot hold, such as ``None`` inside a list.
    """
    sections = entries(config, root=True)
    tables = {n: _table(e.value, key=n) for n, e in sections.items() if e.value is not None}
    return {name: table for name, table in tables.items() if table}


def toml_text(config: Any) -> str:
    """The settable tree (or a dictionary from :func:`to_dict`) as TOML text."""
    return tomli_w.dumps(config if isinstance(config, dict) else to_dict(config))


def save(config: Any, path: str | os.PathLike[str]) -> None:
    """Write the settable tree to a file, whole or not at all; makes the folder."""
    text, path = toml_text(config), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
