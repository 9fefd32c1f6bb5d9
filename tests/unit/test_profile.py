"""The profiler's table: operators by self time, of a training step and of a decoding."""

from __future__ import annotations

import json

import pytest
import torch

import torchtitan_ext  # noqa: F401 - before torchtitan
from tools import compare
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import bench_cases, profile


def test_operators_are_those_of_the_work_by_self_time(tmp_path):
    a, trace = torch.randn(64, 64), tmp_path / "trace.json"
    result = profile.measure("products", lambda: (a @ a).relu(), repeats=2, shapes=True, trace=trace)
    times = [operator.self_ms for operator in result.operators]
    assert times == sorted(times, reverse=True) and sum(o.share for o in result.operators) == pytest.approx(1)
    product = next(operator for operator in result.operators if operator.name == "aten::mm")
    assert product.calls == 2 and product.shapes == "64x64 64x64"
    assert json.loads(trace.read_text())["traceEvents"] and [p.name for p in tmp_path.iterdir()] == [
        "trace.json"
    ]
    header, *rows = profile.lines(result, top=1)
    assert header == ("operator", "calls", "self ms", "share", "shapes") and len(rows) == 1


@pytest.mark.parametrize("method", bench_cases.methods())
def test_every_methods_decoding_can_be_profiled(method):
    result = profile.profile(method, decode=True, quick=True, repeats=1, threads=1)
    assert result.wall_ms > 0 and any(operator.name == "aten::mm" for operator in result.operators)


@pytest.mark.parametrize("method", ["tidar", "tdlm", "mdlm"])
def test_a_training_step_can_be_profiled(method, capsys):
    compare.main(["profile", method, "--quick", "--repeats", "1", "--threads", "1", "--top", "5"])
    lines = capsys.readouterr().out.split("\n")
    assert len(lines[:7]) == 7 and lines[0].startswith("| operator") and f"train {method}" in lines[8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tida"], r"unknown method 'tida'; did you mean 'tidar'"),
        (["tidar", "--repeats", "0"], r"--repeats must be at least 1, got 0"),
        (["tidar", "--threads", "0"], r"--threads must be at least 1, got 0"),
        (["tidar", "--top", "0"], r"--top must be at least 1, got 0"),
        (["tidar", "--trace", "{tmp}/no/t.json"], r"cannot write .*/no/t\.json: no such folder"),
    ],
)
def test_bad_input(arguments, message, tmp_path):
    with pytest.raises(UserError, match=message):
        compare.main(["profile", *(a.format(tmp=tmp_path) for a in arguments)])
