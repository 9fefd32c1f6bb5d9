"""The planner as a command: tables, JSON, and input that is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.paths import ROOT
from torchtitan_ext.errors import UserError, run_cli
from torchtitan_ext.planning import hardware, report
from torchtitan_ext.planning.command import split

DEBUG = str(ROOT / "train_configs" / "ar" / "debug.toml")
GIVEN = ["--job.config_file", DEBUG, "--nodes", "1", "--gpu", "h100", "--gpus-per-node", "2"]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("plan_tool", ROOT / "tools" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_tool"] = module
    spec.loader.exec_module(module)
    return module


def test_prints_tables_and_the_same_numbers_as_json(tool, capsys):
    tool.main([*GIVEN, "--training.seq_len", "32", "--training.local_batch_size", "2"])
    text = capsys.readouterr().out
    for word in (
        "parameters",
        "memory of a GPU",
        "reduce-scatter",
        "NVLink",
        "MFU",
        "data sheet",
        "limited by",
    ):
        assert word in text
    tool.main(["run", *GIVEN, "--json", "--training.seq_len", "32", "--training.local_batch_size", "2"])
    data = json.loads(capsys.readouterr().out)
    assert f"{data['parameters_total']:,}" in text
    assert data["memory_total"] == sum(data["memory"].values())
    assert data["flops_total"] == sum(data["flops"].values()) and data["fits"] is True
    assert data["step_tokens"] == 2 * 2 * 32 and data["tokens"] == data["steps"] * data["step_tokens"]
    assert data["gpu"]["name"] == "h100" and data["gpu"]["bf16"] == 989.5e12
    by_kind = {(e["kind"], e["axis"]): e for e in data["exchanges"]}
    gathered = by_kind["all_gather", "dp_shard"]
    # Four blocks, gathered for the forward and for the backward; the tied embedding stays.
    assert gathered["calls"] == 9 and gathered["wire_bytes"] * 2 == gathered["nbytes"]


WRONG = {
    "unknown_gpu": (["--gpu", "h10"], ["--gpu", "'h10'", "did you mean 'h100'"]),
    "no_nodes": (["--nodes", "0"], ["--nodes", "at least 1", "'0'"]),
    "fewer_nodes": (["--nodes", "-2"], ["--nodes", "at least 1", "'-2'"]),
    "nodes_in_words": (["--nodes", "two"], ["--nodes", "'two'"]),
    "no_gpus": (["--gpus-per-node", "0"], ["--gpus-per-node", "at least 1"]),
    "mesh": (["--parallelism.tensor_parallel_degree", "3"], ["[parallelism]", "tensor 3", "got 2 processes"]),
    "replicas": (["--parallelism.data_parallel_replicate_degree", "5"], ["replicate 5", "got 2 processes"]),
    "batch": (["--training.global_batch_size", "7"], ["global_batch_size = 7", "multiple"]),
    "unknown_key": (["--training.local_batchsize", "7"], ["local_batchsize", "local_batch_size"]),
    "unknown_assumption": (["--assume", "matmull=0.5"], ["matmull", "did you mean 'matmul'"]),
    "assumption_no_number": (["--assume", "matmul=x"], ["--assume matmul=x", "not a number"]),
    "assumption_too_large": (["--assume", "matmul=1.5"], ["at most 1"]),
    "pipeline": (
        ["--parallelism.pipeline_parallel_degree", "2"],
        ["pipeline_parallel_degree = 2", "not planned"],
    ),
    "offload": (["--training.enable_cpu_offload"], ["enable_cpu_offload", "not planned"]),
    "compiler": (
        ["--activation_checkpoint.mode", "memory_budget", "--compile.enable"],
        ["memory_budget", "not planned"],
    ),
    "sequence": (
        ["--parallelism.tensor_parallel_degree", "2", "--training.seq_len", "31"],
        ["seq_len = 31", "multiple", "2"],
    ),
    "missing_file": (["--job.config_file", "nowhere.toml"], ["nowhere.toml", "no such file"]),
    "no_value": (["--nodes"], ["--nodes", "needs a value"]),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_wrong_input_is_one_line_and_exit_2(case, tool, capsys):
    extra, words = WRONG[case]
    with pytest.raises(SystemExit) as stopped:
        run_cli(lambda: tool.main([*GIVEN, *extra]))
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error:")]
    for word in words:
        assert word in line


@pytest.mark.parametrize("left_out", ["--nodes", "--gpu"])
def test_what_must_be_given(left_out, tool):
    at = GIVEN.index(left_out)
    with pytest.raises(UserError, match=f"{left_out} must be given"):
        tool.main([*GIVEN[:at], *GIVEN[at + 2 :]])


def test_flags_are_taken_out_of_the_configs():
    options = split(
        ["--nodes=2", "--a.b", "c", "--gpus_per_node", "4", "--assume", "matmul=0.5,overlap=1", "--json"]
    )
    assert (options.nodes, options.gpus_per_node, options.json) == ("2", "4", True)
    assert options.rest == ["--a.b", "c"] and options.assume == ["matmul=0.5", "overlap=1"]
    changed = hardware.assumed(options.assume)
    assert (changed.matmul, changed.overlap, changed.memory) == (0.5, 1.0, hardware.Assumptions().memory)


def test_table_lines_up():
    assert report.table(("a", "b"), [("long", "1"), ("x", "22")]) == "a      b\nlong   1\nx     22"
