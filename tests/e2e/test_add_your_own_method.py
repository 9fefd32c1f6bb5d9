"""torchtitan_ext/methods/README.md, carried out as it stands, in a copy that has no other method than ar."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = ROOT / "torchtitan_ext" / "methods" / "README.md"
FILE_BLOCK = re.compile(r"^`(?P<path>[^`]+)`:\n\n```\w+\n(?P<text>.*?)^```$", re.M | re.S)
LINE_BLOCK = re.compile(r"^`(?P<path>[^`]+)`, one line more:\n\n```\w+\n(?P<text>[^\n]+\n)```$", re.M)
COMMANDS = re.compile(r"^```sh\n(?P<text>.*?)^```$", re.M | re.S)
FIRST_LINE = "METHODS: dict[str, str] = {\n"

# One process runs all commands: importing torch costs more than they do.
DRIVER = """
import importlib, json, os, pkgutil, runpy, shlex, sys
from pathlib import Path

def run(command):
    program, *words = shlex.split(command)
    assert program == "python", command
    sys.argv = words[1:] if words[0] == "-m" else words
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0

import torchtitan_ext
from torchtitan_ext import config as front, registry
from torchtitan_ext.trainer import default_config

assert Path(torchtitan_ext.__file__).is_relative_to(os.getcwd())
outcome = {"methods": sorted(registry.METHODS), "codes": {}, "imported": [], "parsed": []}
for command in json.loads(sys.argv[1]):
    print("$", command, flush=True)
    outcome["codes"][command] = run(command)
for info in pkgutil.walk_packages(torchtitan_ext.__path__, "torchtitan_ext."):
    if ".remote." not in info.name:  # code for a folder that is opened without this package
        importlib.import_module(info.name)
        outcome["imported"].append(info.name)
for path in sorted(Path("train_configs").rglob("*.toml")):
    front.load_toml(path, make_default=default_config)
    outcome["parsed"].append(str(path))
Path("outcome.json").write_text(json.dumps(outcome))
"""


def delete_method(copy: Path, name: str) -> None:
    """What the page says of removing a method: one folder, one line; its TOMLs have no use then."""
    shutil.rmtree(copy / "torchtitan_ext" / "methods" / name)
    registry = copy / "torchtitan_ext" / "registry.py"
    lines = registry.read_text().splitlines(keepends=True)
    left = [line for line in lines if not line.startswith(f'    "{name}": ')]
    assert len(lines) - len(left) == 1, f"{name} has not exactly one line in the registry"
    registry.write_text("".join(left))
    shutil.rmtree(copy / "train_configs" / name, ignore_errors=True)


def add_method(copy: Path) -> list[str]:
    """Write the page's blocks where they belong; the paths, in order."""
    page, written = PAGE.read_text(), []
    for block in FILE_BLOCK.finditer(page):
        path = copy / block["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block["text"])
        written.append(block["path"])
    for block in LINE_BLOCK.finditer(page):
        path = copy / block["path"]
        before = path.read_text()
        assert before.count(FIRST_LINE) == 1
        path.write_text(before.replace(FIRST_LINE, FIRST_LINE + block["text"]))
        written.append(block["path"])
    return written


def commands() -> list[str]:
    return [line for block in COMMANDS.finditer(PAGE.read_text()) for line in block["text"].splitlines()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package with ``ar`` and the page's method alone, after all commands; their output in log.txt."""
    from torchtitan_ext.registry import METHODS

    copy = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    for name in ("torchtitan_ext", "train_configs", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    (copy / "tests" / "unit").mkdir(parents=True)
    for name in METHODS:
        if name != "ar":
            delete_method(copy, name)
    add_method(copy)
    (copy / "driver.py").write_text(DRIVER)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    before = [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment |= {"PYTHONPATH": os.pathsep.join([str(copy), *before]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "driver.py", json.dumps(commands())],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    (copy / "log.txt").write_text(done.stdout)
    return copy


def outcome(copy: Path) -> dict:
    return json.loads((copy / "outcome.json").read_text())


def test_page_has_the_files_it_speaks_of():
    page = PAGE.read_text()
    paths = [block["path"] for block in FILE_BLOCK.finditer(page)]
    folder = "torchtitan_ext/methods/two_ahead"
    assert {f"{folder}/{n}.py" for n in ("config", "model", "objective", "decode", "__init__")} <= set(paths)
    assert len(list(LINE_BLOCK.finditer(page))) == 1, (
        "one line in the registry, and nothing else of the package"
    )
    assert [int(n) for n in re.findall(r"^\*\*(\d+)\. ", page, re.M)] == list(range(1, 11))
    outside = [p for p in paths if not p.startswith((folder, "train_configs/two_ahead", "tests/unit/"))]
    assert not outside


def test_every_command_of_the_page_succeeds(copy):
    codes = outcome(copy)["codes"]
    assert list(codes) == commands() and len(codes) == 6
    assert set(codes.values()) == {0}, (codes, (copy / "log.txt").read_text()[-6000:])


def test_the_method_trains_on_both_targets(copy):
    log = re.sub(r"\x1b\[[0-9;]*m", "", (copy / "log.txt").read_text())
    losses = [float(x) for x in re.findall(r"step:\s+\d+\s+loss:\s+([\d.]+)", log)]
    assert len(losses) == 8 and losses[-1] < losses[0]
    assert re.search(r"two_ahead/next_loss: +[\d.]+", log) and re.search(
        r"two_ahead/ahead_loss: +[\d.]+", log
    )


def test_export_and_reload_keep_every_weight(copy):
    from safetensors import safe_open

    (file,) = (copy / "outputs" / "two_ahead_hf").glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        assert weights.get_tensor("ahead.weight").abs().max() > 0
    assert "16 tokens in" in (copy / "log.txt").read_text()


def test_an_export_without_modelling_code_says_so(copy):
    log = (copy / "log.txt").read_text()
    assert log.count("does not compute method 'two_ahead'") == 1
    values = json.loads((copy / "outputs" / "two_ahead_hf" / "config.json").read_text())
    assert values["torchtitan_ext"]["name"] == "two_ahead" and "auto_map" not in values
    assert not list((copy / "outputs" / "two_ahead_hf").glob("*.py"))


def test_deleting_a_method_is_one_folder_and_one_line(copy):
    told = outcome(copy)
    assert told["methods"] == ["ar", "two_ahead"]
    assert "train_configs/ar/debug.toml" in told["parsed"]
    assert "train_configs/two_ahead/debug.toml" in told["parsed"]
    ours = {p.relative_to(copy).with_suffix("") for p in (copy / "torchtitan_ext").rglob("*.py")}
    names = {".".join(p.parts).removesuffix(".__init__") for p in ours}
    scripts = {n for n in names if ".remote." in n or ".lm_eval_tasks" in n} | {"torchtitan_ext"}
    assert names - scripts == set(told["imported"])


def test_house_rules_hold_in_the_copy(copy):
    """Rooms do not import methods, whatever methods there are."""
    from tests.unit import test_house

    for path in (copy / "torchtitan_ext").rglob("*.py"):
        own = test_house.method_of(".".join(path.relative_to(copy).parts))
        others = {test_house.method_of(name) for name in test_house.imports(path)} - {None, own}
        assert not others, f"{path.relative_to(copy)} imports {others}"


def test_commands_are_python(copy):
    assert all(shlex.split(command)[0] == "python" for command in commands())
