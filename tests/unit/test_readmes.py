"""What the READMEs name exists: functions of the equation tables, files, TOMLs, options of commands."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from torchtitan_ext.config.toml_writer import entries
from torchtitan_ext.registry import METHODS
from torchtitan_ext.trainer import default_config

PACKAGE = ROOT / "torchtitan_ext"
READMES = [ROOT / "README.md", PACKAGE / "methods" / "README.md"]
READMES += [PACKAGE / "methods" / name / "README.md" for name in METHODS]
NAME = re.compile(r"\.?[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
PLACES = ("torchtitan_ext", "tools", "tests", "train_configs", "launch")
FILE = re.compile(rf"(?:\./)?((?:{'|'.join(PLACES)})/[\w./*-]*\w|[\w/*-]+/[\w*-]+\.(?:py|toml|sh|slurm|md))")
OPTION = re.compile(r"--[a-zA-Z][\w.-]*")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """Without the example of the page on adding a method, whose files do not exist here."""
    text = path.read_text()
    if path == PACKAGE / "methods" / "README.md":
        text = re.sub(r"^```\w+\n.*?^```$", "", text, flags=re.M | re.S)
        text = "\n".join(line for line in text.splitlines() if "two_ahead" not in line)
    return text


def quoted(text: str) -> list[str]:
    """Everything between single backticks outside blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


# --- equation -> function ----------------------------------------------------------------


def cells(path: Path) -> list[list[str]]:
    """Backticked names of each right-hand cell of the tables "... | function"."""
    found, inside = [], False
    for line in path.read_text().splitlines():
        if line.startswith("|") and line.rstrip().endswith("| function |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            found.append(re.findall(r"`([^`]+)`", line.rsplit("|", 2)[1]))
    return found


@functools.cache
def module(name: str) -> Any:
    try:
        known = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        known = False
    return importlib.import_module(name) if known else None


def walk(start: Any, parts: list[str]) -> Any:
    """The attribute, of submodules too, or None; fields of dataclasses count."""
    for part in parts:
        inner = getattr(start, part, None)
        if inner is None and hasattr(start, "__path__"):
            inner = module(f"{start.__name__}.{part}")
        if inner is None and part in getattr(start, "__dataclass_fields__", {}):
            inner = start.__dataclass_fields__[part]
        if inner is None:
            return None
        start = inner
    return start


def resolve(name: str, method: str, before: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """What a name means and its parent: seen from the method's folder, the shared rooms, or the name
    before it (``.forward``)."""
    if name.startswith("."):
        starts = before
    else:
        own = module(METHODS[method])
        files = [p.stem for p in (PACKAGE / "methods" / method).glob("*.py") if p.stem != "__init__"]
        rooms = ["torchtitan_ext", *(f"torchtitan_ext.{r}" for r in ("decoding", "data", "evaluation"))]
        starts = (
            own,
            getattr(own, "Section", None),
            *(module(f"{METHODS[method]}.{f}") for f in files),
            *map(module, rooms),
        )
    parts = name.lstrip(".").split(".")
    for start in starts:
        if walk(start, parts) is not None:
            return walk(start, parts), walk(start, parts[:-1])
    return None


@pytest.mark.parametrize("method", sorted(METHODS))
def test_names_of_the_equation_table_exist(method):
    table = cells(PACKAGE / "methods" / method / "README.md")
    assert table, "no table that ends in '| function |'"
    before: tuple[Any, ...] = ()
    for names in table:
        for name in names:
            if not NAME.fullmatch(name) or name.endswith(".py"):
                continue  # a path, an option, ...: checked below
            found = resolve(name, method, before)
            assert found is not None, f"{name} is not there"
            thing, parent = found
            # The next ".name" may belong to this class, to what holds it, or to their module.
            modules = [
                importlib.import_module(x.__module__) for x in (thing, parent) if hasattr(x, "__module__")
            ]
            before = (thing, parent, *modules)


# --- files ---------------------------------------------------------------------------------


def exists(name: str, readme: Path) -> bool:
    """Relative to the repository, the package, or the README's folder; ``*`` stands for anything."""
    for start in (ROOT, PACKAGE, readme.parent):
        if "*" in name or name.endswith("_"):
            if any(start.glob(name + "*" * name.endswith("_"))):
                return True
        elif (start / name).exists():
            return True
    return False


@pytest.mark.parametrize("path", READMES, ids=ids)
def test_files_that_it_names_exist(path):
    text = prose(path)
    links = [t for t in re.findall(r"\]\(([^)#]+)", text) if "://" not in t]
    missing = [t for t in links if not (path.parent / t).exists()]
    # "/..." continues something else: an output, a URL, outputs of a run.
    named = [m[1] for m in re.finditer(rf"(?<![\w./<-]){FILE.pattern}", text)]
    missing += [name for name in named if not exists(name, path)]
    assert not missing


# --- commands ------------------------------------------------------------------------------


def command_lines(path: Path) -> list[str]:
    """Commands that start a tool or a run: in blocks, with continued lines joined, and in backticks."""
    text = prose(path).replace("\\\n", " ")
    blocks = re.findall(r"^(?:```\w*\n(.*?)^```$|((?: {4}.*\n)+))", text, re.M | re.S)
    lines = [line for block in blocks for part in block for line in part.splitlines()] + quoted(text)
    return [re.split(r"\s#", line)[0].strip(" $") for line in lines if re.search(STARTS, line)]


STARTS = re.compile(r"tools/\w+\.py|torchtitan_ext\.train\b|run_train\.sh|run_multinode\.sh|train\.slurm")


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """All options, those of subcommands too."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= set().union(*map(options_of, action.choices.values()))
    return found


@functools.cache
def tool_options(tool: str) -> frozenset[str]:
    path = ROOT / tool
    source = path.read_text()
    if tool == "tools/plan.py":  # its planner reads its own few options beside the config's
        source += "".join(p.read_text() for p in (PACKAGE / "planning").glob("*.py"))
    found = set(re.findall(r'"(--[\w.-]+)"', source))
    return frozenset(found | options_of(runpy.run_path(str(path))["parser"]()))


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("*.py")), ids=ids)
def test_every_tool_has_a_parser(path):
    assert "--help" in tool_options(ids(path))


@functools.cache
def config_keys(method: str) -> frozenset[str]:
    """section.key of everything the TOML front knows for a method."""

    def flat(node: Any, before: str) -> list[str]:
        keys = []
        for name, entry in entries(node, root=not before).items():
            inner = [] if entry.section is None else flat(entry.section, f"{before}{name}.")
            keys += inner or [f"{before}{name}"]
        return keys

    return frozenset(flat(default_config({"name": method}), "")) | {"job.config_file"}


def known(option: str, line: str) -> bool:
    """Whether the program of the line has the option."""
    tool = re.search(r"tools/\w+\.py", line)
    allowed = set(tool_options(tool[0])) if tool else {"--validate", "--nodes", "--world-size", "--dry-run"}
    allowed |= {"--help", "--nproc_per_node"}
    allowed |= {"--nodes", "--gpus-per-node", "--time"} if "sbatch" in line else set()
    keys = frozenset().union(*(config_keys(m) for m in METHODS))
    return option in allowed or option[2:] in keys


@pytest.mark.parametrize("path", READMES, ids=ids)
def test_options_of_its_commands_exist(path):
    lines = command_lines(path)
    wrong = [(o, line) for line in lines for o in OPTION.findall(line) if not known(o, line)]
    assert not wrong
    for line in lines:
        if "..." not in line and "`" not in line:
            shlex.split(line)  # quotes are closed


@pytest.mark.parametrize("path", READMES, ids=ids)
def test_options_in_its_text_belong_to_some_program(path):
    sources = [*(ROOT / "tools").glob("*.py"), *(ROOT / "launch").iterdir(), *PACKAGE.rglob("*.py")]
    everything = "".join(p.read_text() for p in sources)
    options = [o for q in quoted(prose(path)) for o in OPTION.findall(q)]
    keys = frozenset().union(*(config_keys(m) for m in METHODS))
    torchtitans = {"--module", "--config"}  # of its own command line
    unknown = [
        o
        for o in options
        if o not in torchtitans
        and o[2:] not in keys
        and f'"{o}"' not in everything
        and f"{o} " not in everything
        and f'"{o.replace("--no-", "--", 1)}"' not in everything
        and not any(o in tool_options(f"tools/{t.name}") for t in (ROOT / "tools").glob("*.py"))
    ]
    assert not unknown


@pytest.mark.parametrize("path", READMES, ids=ids)
def test_sections_and_keys_that_it_names_exist(path):
    """``[section] key`` and ``[section] key = value``."""
    keys = frozenset().union(*(config_keys(m) for m in METHODS))
    sections = {".".join(k.split(".")[:n]) for k in keys for n in (1, 2, 3)}
    for section, key in re.findall(r"`\[([a-z_0-9.]+)\](?: (\w+))?[^`]*`", prose(path)):
        assert section in sections or section == "dataloader.sources", section
        assert not key or f"{section}.{key}" in keys | sections, f"[{section}] {key}"
