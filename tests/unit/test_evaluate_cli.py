"""tools/evaluate.py on a tiny checkpoint."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from tests.paths import ROOT
from tests.unit.test_load import random_model, write_checkpoint
from torchtitan_ext import backbones
from torchtitan_ext.errors import UserError, run_cli

TOML = """
[model]
name = "ar"
flavor = "smollm2-debug"

[dataloader]
dataset = "group_retrieval"

[dataloader.task]
group = 3
key_length = 1
max_length = 3
"""


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import evaluate as module
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    dump = tmp_path_factory.mktemp("run")
    folder = write_checkpoint(dump / "checkpoint" / "step-4", random_model(backbones.lookup("smollm2-debug")))
    (folder / "config.toml").write_text(TOML)
    return dump


GROUP = ("--task", "group_retrieval", "--samples", "6")


def test_table_csv_and_picture(tool, run, tmp_path, capsys):
    files = ["--csv", str(tmp_path / "out" / "a.csv")]
    if importlib.util.find_spec("matplotlib") is not None:
        files += ["--png", str(tmp_path / "out" / "a.png")]
    tool.main([str(run), *GROUP, "--lengths", "2:4", *files])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert "step-4: group_retrieval (group 3, key_length 1" in title
    assert header.split() == ["length", "samples", "token", "accuracy", "exact", "match", "range"]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [
        ("2", "trained"), ("3", "trained"), ("4", "beyond"),
    ]  # fmt: skip
    lines = list(csv.DictReader((tmp_path / "out" / "a.csv").open()))
    assert [f"{float(line['token_accuracy']):.2%}" for line in lines] == [row.split()[2] for row in rows]
    assert len(list((tmp_path / "out").iterdir())) == len(files) // 2


def test_json_and_default_lengths(tool, run, capsys):
    tool.main([str(run), *GROUP, "--json", "--batch-size", "4"])
    report = json.loads(capsys.readouterr().out)
    assert [r["length"] for r in report["results"]] == [1, 2, 3]
    assert report["trained_maximum"] == 3 and report["method"] == "ar"
    assert report["knobs"] == {"group": 3, "key_length": 1, "alphabet": 62}
    tool.main([str(run), *GROUP, "--json", "--batch-size", "6"])
    assert json.loads(capsys.readouterr().out) == report


def test_flags_override_the_checkpoint(tool, run, capsys):
    tool.main([str(run), *GROUP, "--json", "--group", "4", "--key-length", "0", "--lengths", "2"])
    report = json.loads(capsys.readouterr().out)
    assert report["knobs"]["group"] == 4 and report["knobs"]["key_length"] == 0
    assert report["trained_maximum"] is None and report["results"][0]["trained"] is None


def test_texts_are_decoded(tool, run, capsys):
    tool.main(
        [str(run), "--task", "variable_assignment", "--samples", "3", "--lengths", "1", "--chains", "2"]
    )
    _, header, row = capsys.readouterr().out.splitlines()
    assert "answer" in header and row.split()[0] == "1" and row.split()[-1] == "-"
    assert header.split()[-3:] == ["tokens/forward", "forwards/sample", "range"]
    assert float(row.split()[-3]) == 1.0  # one token a forward


def test_sums_of_the_library(tool, run, tmp_path, capsys):
    pytest.importorskip("reasoning_gym")
    argv = [str(run), "--task", "chain_sum", "--samples", "3", "--max-digits", "1", "--style", "question"]
    tool.main([*argv, "--json", "--decode-options", "max_len=2000", "--csv", str(tmp_path / "a.csv")])
    report = json.loads(capsys.readouterr().out)
    assert report["knobs"] == {"min_digits": 1, "max_digits": 1, "style": "question"}
    assert report["decode_options"] == {"max_len": 2000}
    assert [r["length"] for r in report["results"]] == [2, 3, 4]
    lines = list(csv.DictReader((tmp_path / "a.csv").open()))
    for line, result in zip(lines, report["results"], strict=True):
        assert result["tokens_per_forward"] == 1.0 and 1 <= result["forwards_per_sample"] <= 5
        assert float(line["forwards_per_sample"]) == result["forwards_per_sample"]
        assert float(line["score"]) == result["score"] >= result["answer_accuracy"]
    tool.main([*argv, "--lengths", "3"])
    title, header, _ = capsys.readouterr().out.splitlines()
    assert title.endswith("chain_sum (min_digits 1, max_digits 1, style question); length in terms")
    assert "score" in header


def test_a_missing_library_is_one_line_before_the_work(tool, run, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "reasoning_gym" else real(n, *a)
    )
    monkeypatch.setattr(tool, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=r'needs reasoning-gym: pip install "torchtitan-ext\[tasks\]"'):
        tool.main([str(run), "--task", "chain_sum"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], r"nothing to evaluate: give --task \(group_retrieval"),
        (["--task", "group_retrievel"], "unknown --task .*did you mean 'group_retrieval'"),
        (["--task", "group_retrieval", "--lengths", "3:1"], "holds no length"),
        (["--task", "group_retrieval", "--lengths", "9000"], "length 9000 needs .* context has 2048"),
        (["--task", "group_retrieval", "--samples", "0"], "--samples must be at least 1, got 0"),
        (["--task", "group_retrieval", "--batch-size", "-1"], "--batch-size must be at least 1"),
        (["--task", "group_retrieval", "--group", "6"], "group is 6, allowed: 3, 4, 5"),
        (["--task", "group_retrieval", "--nodes", "6"], "nodes belongs to another task"),
        (["--task", "variable_assignment", "--lengths", "90"], "there are 52"),
        (["--task", "group_retrieval", "--csv", "."], "--csv . is a folder"),
        (["--task", "group_retrieval", "--dtype", "float31"], "did you mean 'float32'"),
        (["--task", "group_retrieval", "--device", "abacus"], "--device abacus cannot be used"),
        (["--task", "group_retrieval", "--step", "9"], "no step-9"),
        (["--task", "group_retrieval", "--decode-options", "max_len=9"], "which is not decoded"),
        (["--task", "variable_assignment", "--decode-options", "maxlen=9"],
         "unknown key in --decode-options 'maxlen'; did you mean 'max_len'"),
        (["--task", "variable_assignment", "--decode-options", "max_len=x"],
         "max_len is 'x', expected an integer or none"),
        (["--task", "variable_assignment", "--style", "x"], "style is 'x', allowed: plain, question"),
    ],
)  # fmt: skip
def test_refusals(tool, run, argv, message, capsys):
    with pytest.raises(UserError, match=message) as error:
        tool.main([str(run), *argv])
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


def test_a_missing_matplotlib_is_one_line_before_the_work(tool, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "matplotlib" else real(n, *a))
    monkeypatch.setattr(tool, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=r'needs matplotlib: pip install "torchtitan-ext\[eval\]"'):
        tool.main([str(run), *GROUP, "--png", "a.png"])


def test_a_missing_matplotlib_is_not_missed_without_a_picture(tool, run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    tool.main([str(run), *GROUP, "--lengths", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_missing_checkpoint_is_one_line_and_exit_code_2(tool, capsys):
    with pytest.raises(SystemExit) as exit:
        run_cli(lambda: tool.main(["absent", *GROUP]))
    captured = capsys.readouterr()
    assert exit.value.code == 2 and captured.out == "" and captured.err == "error: absent is not there\n"


def test_as_a_command(run, tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "evaluate.py"), str(run)]
    done = subprocess.run(
        [*command, *GROUP, "--lengths", "1", "--json"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["samples"] == 6 and "Traceback" not in done.stderr
