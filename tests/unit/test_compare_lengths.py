"""tools/compare.py lengths: the table, the CSV file and the picture of runs under names of any kind."""

from __future__ import annotations

import csv
import shutil

import pytest

pytest.importorskip("matplotlib")

from tests.unit import lm_eval_models
from tools import compare
from torchtitan_ext.errors import UserError

OPTIONS = ["--task", "group_retrieval", "--lengths", "1:2", "--at", "2", "--samples", "2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with one name, and names that mean something to CSV files and to matplotlib."""
    home = tmp_path_factory.mktemp("runs")
    names = ["a/step-2", "b/step-2", 'x,"y"', r"_$\frac{1}$"]
    lm_eval_models.write(home / names[0], "ar")
    for name in names[1:]:
        shutil.copytree(home / names[0], home / name)
    return [str(home / name) for name in names]


def test_runs_under_names_of_any_kind(runs, tmp_path, capsys):
    files = ["--csv", str(tmp_path / "out.csv"), "--png", str(tmp_path / "out.png")]
    compare.main(["lengths", *runs[1:], *OPTIONS, *files])
    lines = capsys.readouterr().out.splitlines()
    names = ["step-2", 'x,"y"', r"_$\frac{1}$"]
    assert [line.split("|")[1].strip() for line in lines] == ["run", "-" * 11, *names]
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["length"]) for row in rows] == [(name, n) for name in names for n in "12"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_are_told_apart(runs, capsys):
    compare.main(["lengths", *runs[:2], *OPTIONS])
    out = capsys.readouterr().out
    assert "| a/step-2 |" in out and "| b/step-2 |" in out
    with pytest.raises(UserError, match="the run .*step-2/ is given twice"):
        compare.main(["lengths", runs[0], f"{runs[0]}/", *OPTIONS])
