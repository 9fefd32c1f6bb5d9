"""A TOML file and the command line onto a tree of config dataclasses.

Precedence: command line > TOML > defaults. Whatever is wrong in either is a
:class:`UserError` of one line that names the file (or the command line), the
key, what was got, what is allowed and the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from torchtitan_ext.config.moved import moved
from torchtitan_ext.config.toml_writer import (
    NONE,
    SECTION_NAMES,
    Entry,
    choices,
    dataclass_of,
    describe,
    entries,
    from_text,
    is_flag,
    is_optional,
    leaves,
    members,
    show,
)
from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.registry import METHODS

COMMAND_LINE = "command line"
"""How values from the command line are called in errors."""

MakeDefault = Callable[[dict[str, Any]], Any]
"""From the values of [model] to the root config with all defaults."""

_USAGE = (
    "no config file: give --job.config_file X.toml (or --model.name NAME to use defaults only); "
    "every other option is --section.key value"
)
_CONFIG_FILE = ("job", "config_file")
_MAX_LISTED = 18


class _Table(dict[str, Any]):
    """Typed values of a section by field name; a ``_Table`` inside is a section inside."""


class Option(NamedTuple):
    """One option of the command line."""

    path: tuple[str, ...]
    text: str | None
    """The value, None for a bare flag."""


def parse(argv: list[str], *, make_default: MakeDefault) -> Any:
    """The root config from ``sys.argv[1:]``; ``--help`` prints every option and exits.

    Raises:
        UserError: anything wrong in the file or on the command line.
    """
    wants_help = any(arg in ("-h", "--help") for arg in argv)
    options = _options([arg for arg in argv if arg not in ("-h", "--help")])
    files = [_required_text(o) for o in options if o.path == _CONFIG_FILE]
    options = [o for o in options if o.path != _CONFIG_FILE]
    path = files[-1] if files else None
    if path is None and not wants_help and ("model", "name") not in [o.path for o in options]:
        raise UserError(_USAGE)
    document = _read_file(path) if path is not None else {}
    root = _default_root(document, options, make_default=make_default, origin=path)
    if wants_help:
        _print_help(root)
    return _merged(root, document, options, origin=path)


def load_toml(path: str | os.PathLike[str], *, make_default: MakeDefault) -> Any:
    """The root config from a file alone, such as the ``config.toml`` beside a checkpoint.

    Raises:
        UserError: the file is missing or anything in it is wrong.
    """
    path = os.fspath(path)
    document = _read_file(path)
    return _merged(
        _default_root(document, [], make_default=make_default, origin=path), document, [], origin=path
    )


# --- reading ---------------------------------------------------------------------------


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        siblings = [str(p) for p in Path(path).parent.glob("*.toml")]
        raise UserError(f"config file {path!r}: no such file{nearest(path, siblings)}") from None
    except IsADirectoryError:
        raise UserError(f"config file {path!r}: is a folder (allowed: a TOML file)") from None
    except OSError as error:
        raise UserError(f"config file {path!r}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: invalid TOML: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: invalid TOML: {error}") from error


def _options(argv: list[str]) -> list[Option]:
    """Split the command line; names get underscores, an option takes at most one following word."""
    options: list[Option] = []
    words: list[list[str]] = []
    for arg in argv:
        if arg.startswith("--") and len(arg) > 2:
            words.append([arg])
        elif not words or len(words[-1]) == 2 or "=" in words[-1][0]:
            after = f" after {words[-1][0]!r}" if words else ""
            raise UserError(
                f"{COMMAND_LINE}: unexpected {arg!r}{after} (allowed: --section.key value; "
                "a list is one comma-separated word)"
            )
        else:
            words[-1].append(arg)
    for word in words:
        name, equals, text = word[0][2:].partition("=")
        value = text if equals else word[1] if len(word) == 2 else None
        options.append(Option(tuple(_printable(name.replace("-", "_")).split(".")), value))
    return options


def _required_text(option: Option) -> str:
    if not option.text:
        raise UserError(f"{COMMAND_LINE}: --{'.'.join(option.path)} needs a value")
    return option.text


def _default_root(
    document: dict[str, Any], options: list[Option], *, make_default: MakeDefault, origin: str | None
) -> Any:
    """The default tree for the [model] values, which are checked first: they choose the tree."""
    # Imported here: sections.py needs this package.
    from torchtitan_ext.config.sections import ModelSection

    model: dict[str, Any] = {}
    known = entries(ModelSection)
    table = document.get("model", {})
    if isinstance(table, dict):
        for key, value in table.items():
            if key in known:
                model[key] = _read_value(known[key].hint, value, origin=origin or "", key=f"model.{key}")
            elif fate := moved(f"model.{key}"):
                raise UserError(f"{origin}: model.{key} {fate}")
    for option in options:
        if option.path[0] == "model" and len(option.path) == 2 and option.path[1] in known:
            text, key = _required_text(option), ".".join(option.path)
            hint = known[option.path[1]].hint
            model[option.path[1]] = _read_value(hint, from_text(hint, text), origin=COMMAND_LINE, key=key)
    try:
        return make_default(model)
    except UserError as error:
        on_command_line = any(option.path[0] == "model" for option in options)
        raise UserError(f"{_origins(origin, on_command_line)}: {error}") from error


def _origins(origin: str | None, command_line: bool) -> str:
    if origin is None:
        return COMMAND_LINE
    return f"{origin} and {COMMAND_LINE}" if command_line else origin


# --- values ----------------------------------------------------------------------------


def _read_value(
    hint: Any, value: Any, *, origin: str, key: str, build: Callable[[type, Any, str], Any] | None = None
) -> Any:
    """A TOML value as the declared type, without conversions but integer to float and list to tuple.

    ``build(cls, table, key)`` makes the configs that lie in lists and tables.
    """
    if (value is None or (value == NONE and NONE not in choices(hint))) and is_optional(hint):
        return None
    if (cls := dataclass_of(hint)) is not None and build is not None:
        return build(cls, value, key)
    for member in members(hint):
        args = get_args(member)
        if not args or dataclass_of(args[-1] if args[-1] is not Ellipsis else args[0]) is None:
            continue
        container = get_origin(member)
        if container is dict and isinstance(value, dict):
            return {
                k: _read_value(args[1], v, origin=origin, key=f"{key}.{k}", build=build)
                for k, v in value.items()
            }
        if container in (list, tuple) and isinstance(value, list):
            items = enumerate(value)
            return container(
                _read_value(args[0], v, origin=origin, key=f"{key}[{i}]", build=build) for i, v in items
            )
    try:
        return _validated(hint, value)
    except ValidationError as error:
        raise UserError(f"{origin}: {key}: got {show(value)}, {_allowed(hint, value, error)}") from error


def _validated(hint: Any, value: Any) -> Any:
    """The value through pydantic's strict JSON rules, where an array may become a tuple."""
    # A date has no JSON form and fits no type here: an object stands for "no type fits".
    text = json.dumps(value, default=lambda unknown: {type(unknown).__name__: str(unknown)})
    return TypeAdapter(hint).validate_json(text, strict=True)


def _allowed(hint: Any, value: Any, error: ValidationError) -> str:
    """What would have been right: the type, the item at fault, a broken constraint, the nearest value."""
    text = f"allowed: {describe(hint)}"
    first = error.errors(include_url=False)[0]
    place = first["loc"][0] if first["loc"] else None
    if isinstance(value, list) and isinstance(place, int) and place < len(value):
        text += f" (item {place} is {show(value[place])})"
        value = value[place]
        hint = next((get_args(m)[0] for m in members(hint) if get_origin(m) in (list, tuple)), hint)
    if first.get("ctx") and first["type"] not in ("literal_error", "json_invalid"):
        text += f" ({first['msg']})"
    return text + _nearest_value(hint, value)


def _nearest_value(hint: Any, value: Any) -> str:
    if (allowed := choices(hint)) and isinstance(value, str):
        near = _closest(value, [str(c) for c in allowed], cutoff=0.5)
        return f"; did you mean {near!r}?" if near else ""
    meant: Any = None
    if isinstance(value, str):
        meant = from_text(hint, value)
    elif isinstance(value, float) and value.is_integer():
        meant = int(value)
    if meant is None or isinstance(meant, (str, list, dict)):
        return ""
    try:
        return f"; did you mean {show(_validated(hint, meant), kind=False)}?"
    except ValidationError:
        return ""


def _closest(name: str, candidates: list[str], *, cutoff: float) -> str | None:
    """The candidate nearest in spelling, whatever the case."""
    lowered = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


# --- merging ---------------------------------------------------------------------------


def _merged(root: Any, document: dict[str, Any], options: list[Option], *, origin: str | None) -> Any:
    table = _read_root(root, document, origin=origin) if origin is not None else _Table()
    for option in options:
        _set_option(root, table, option)
    return _rebuild(root, table, origin=_origins(origin, bool(options)), key="")


def _read_root(root: Any, document: dict[str, Any], *, origin: str) -> _Table:
    for field, name in SECTION_NAMES.items():
        if field in document and name in document:
            raise UserError(f"{origin}: [{field}] and [{name}] are the same section (allowed: one of them)")
    names = {SECTION_NAMES.get(key, key): value for key, value in document.items()}
    return _read_section(root, names, root=root, origin=origin, path=())


def _read_section(
    node: Any, table: dict[str, Any], *, root: Any, origin: str, path: tuple[str, ...]
) -> _Table:
    """Typed values of one TOML table, checked against a config (or a config class)."""
    known = entries(node, root=not path)
    result = _Table()
    for key, value in table.items():
        here = (*path, _printable(key))
        entry = known.get(key)
        if entry is None:
            _refuse(root, here, value, origin=origin, known=known)
        if entry.section is None:
            result[entry.field] = _read_leaf(entry, value, origin=origin, key=".".join(here))
        elif isinstance(value, dict):
            result[entry.field] = _read_section(entry.section, value, root=root, origin=origin, path=here)
        elif value == NONE and is_optional(entry.hint):
            result[entry.field] = None
        else:
            keys = _listed(entries(entry.section))
            raise UserError(
                f"{origin}: {'.'.join(here)}: got {show(value)}, "
                f"allowed: a section [{'.'.join(here)}] with keys {keys}"
            )
    return result


def _read_leaf(entry: Entry, value: Any, *, origin: str, key: str) -> Any:
    """A plain value; lists and tables of configs are built item by item."""

    def build(cls: type, item: Any, item_key: str) -> Any:
        if not isinstance(item, dict):
            keys = _listed(entries(cls))
            raise UserError(f"{origin}: {item_key}: got {show(item)}, allowed: a table with keys {keys}")
        known, fields = entries(cls), _Table()
        for name, inner in item.items():
            if name not in known:
                name = _printable(name)
                own = [f"{item_key}.{k}" for k in known]
                raise UserError(
                    f"{origin}: unknown key {item_key}.{name}{nearest(f'{item_key}.{name}', own)} "
                    f"(allowed: {_listed(known)})"
                )
            inner_entry, inner_key = known[name], f"{item_key}.{name}"
            section = dataclass_of(inner_entry.hint)
            if section is not None and not (inner == NONE and is_optional(inner_entry.hint)):
                fields[inner_entry.field] = build(section, inner, inner_key)
            else:
                fields[inner_entry.field] = _read_leaf(inner_entry, inner, origin=origin, key=inner_key)
        return _rebuild(cls, fields, origin=origin, key=item_key)

    return _read_value(entry.hint, value, origin=origin, key=key, build=build)


def _set_option(root: Any, table: _Table, option: Option) -> None:
    """Put one option of the command line into the typed values."""
    path = (SECTION_NAMES.get(option.path[0], option.path[0]), *option.path[1:])
    node, text, dotted = root, option.text, ".".join(path)
    for depth, part in enumerate(path[:-1]):
        entry = entries(node, root=depth == 0).get(part)
        if entry is None or entry.section is None:
            _refuse_option(root, path, entry, depth=depth)
        # A section that the file set to none comes back with the first key given for it.
        if not isinstance(table.get(entry.field), _Table):
            table[entry.field] = _Table()
        table, node = table[entry.field], entry.section
    known = entries(node, root=len(path) == 1)
    entry = known.get(path[-1])
    if entry is None and (negated := known.get(path[-1].removeprefix("no_"))) and is_flag(negated.hint):
        if text is not None:
            raise UserError(f"{COMMAND_LINE}: --{dotted}: got {text!r}, allowed: no value")
        entry, text = negated, "false"
    if entry is None or entry.section is not None:
        _refuse_option(root, path, entry, depth=len(path) - 1)
    if text is None and is_flag(entry.hint):
        text = "true"
    if text is None:
        raise UserError(f"{COMMAND_LINE}: --{dotted} needs a value (allowed: {describe(entry.hint)})")
    value = from_text(entry.hint, text)
    table[entry.field] = _read_leaf(entry, value, origin=COMMAND_LINE, key=dotted)


def _rebuild(node: Any, table: _Table, *, origin: str, key: str) -> Any:
    """A config with the values put in, bottom-up, so that each ``__post_init__`` sees what was merged.

    ``node`` is a config, or a class whose instance is made from the values alone.
    """
    known = {e.field: (name, e) for name, e in entries(node, root=not key).items()}
    changes: dict[str, Any] = {}
    for field, value in table.items():
        if isinstance(value, _Table):
            name, entry = known[field]
            value = _rebuild(entry.section, value, origin=origin, key=f"{key}.{name}" if key else name)
        changes[field] = value
    if isinstance(node, type):
        for name, entry in known.values():
            if entry.default is dataclasses.MISSING and entry.field not in changes:
                raise UserError(f"{origin}: missing key {key}.{name} (allowed: {describe(entry.hint)})")
    try:
        return node(**changes) if isinstance(node, type) else dataclasses.replace(node, **changes)
    except UserError as error:
        raise UserError(_in_section(origin, key, error)) from error
    except (ValueError, AssertionError) as error:
        raise UserError(_in_section(origin, key, error)) from error


def _in_section(origin: str, key: str, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{origin}: [{key}] {text}" if key else f"{origin}: {text}"


# --- refusing --------------------------------------------------------------------------


def _printable(name: str) -> str:
    """The name for a message of one line."""
    return name if name.isprintable() else repr(name)


def _listed(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "") or "none"


def _suggestion(root: Any, path: tuple[str, ...], own: list[str]) -> str:
    """``"; did you mean 'a.b'?"``: a typo first, then the same key elsewhere, then the closest of all."""
    dotted, prefix = ".".join(path), ".".join(path[:-1])
    near = _closest(path[-1], own, cutoff=0.75)
    if near is None:
        everywhere = leaves(root)
        same = [leaf for leaf in everywhere if leaf.rpartition(".")[2] == path[-1]]
        if same:
            return f"; did you mean {min(same, key=lambda leaf: leaf.count('.'))!r}?"
        near = _closest(path[-1], own, cutoff=0.5)
        if near is None:
            found = _closest(dotted, everywhere, cutoff=0.6)
            return f"; did you mean {found!r}?" if found else ""
    return f"; did you mean {f'{prefix}.{near}' if prefix else near!r}?"


def _refuse(
    root: Any, path: tuple[str, ...], value: Any, *, origin: str, known: dict[str, Entry]
) -> NoReturn:
    """Raise for a key or section of a file that does not exist."""
    dotted = ".".join(path)
    inner = [f"{dotted}.{key}" for key in value] if isinstance(value, dict) else []
    for key in [*inner, dotted]:
        if fate := moved(key):
            raise UserError(f"{origin}: {key} {fate}")
    hint = _suggestion(root, path, list(known))
    if len(path) == 1 and isinstance(value, dict):
        if path[0] in METHODS:
            hint = f"; it needs [model] name = {path[0]!r}"
        raise UserError(f"{origin}: unknown section [{dotted}]{hint} (allowed: {_listed(known)})")
    if len(path) == 1:
        raise UserError(f"{origin}: key {dotted!r} is outside any section{hint} (allowed: {_listed(known)})")
    section = ".".join(path[:-1])
    raise UserError(f"{origin}: unknown key {dotted}{hint} (allowed in [{section}]: {_listed(known)})")


def _refuse_option(root: Any, path: tuple[str, ...], entry: Entry | None, *, depth: int) -> NoReturn:
    """Raise for an option that is not a key; ``depth`` parts of its path exist, the next ends the search."""
    dotted, reached = ".".join(path), ".".join(path[: depth + 1])
    if entry is not None and entry.section is not None:
        keys = _listed(entries(entry.section))
        raise UserError(f"{COMMAND_LINE}: --{reached} is a section (allowed: --{reached}.KEY with {keys})")
    if entry is not None:
        allowed = describe(entry.hint)
        raise UserError(f"{COMMAND_LINE}: --{reached} has no keys of its own (allowed: {allowed})")
    if fate := moved(dotted):
        raise UserError(f"{COMMAND_LINE}: --{dotted} {fate}")
    node = root
    for level, part in enumerate(path[:depth]):
        node = entries(node, root=level == 0)[part].section
    known = entries(node, root=depth == 0)
    near = _closest(dotted, leaves(root), cutoff=0.85)
    hint = f"; did you mean {near!r}?" if near else _suggestion(root, path[: depth + 1], list(known))
    raise UserError(f"{COMMAND_LINE}: unknown option --{dotted}{hint} (allowed: {_listed(known)})")


def _print_help(root: Any) -> NoReturn:
    """Print every option through tyro, with torchtitan's rules, and exit."""
    import tyro
    from torchtitan.config.manager import ConfigManager, custom_registry

    ConfigManager()  # registers torchtitan's rules
    tyro.cli(
        type(root),
        args=["--help"],
        default=root,
        prog="torchtitan_ext.train",
        description="--job.config_file X.toml reads a file; the options below override it.",
        registry=custom_registry,
        use_underscores=True,
    )
    raise SystemExit(0)
