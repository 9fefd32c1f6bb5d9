"""Errors in the input: one clear line, before the first step, nothing half-written left."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.distributed import jobs
from tests.distributed.harness import run
from tests.paths import ROOT

CASES = {
    "unknown method": (["--model.name", "arr"], ["[model] name", "'arr'", "did you mean 'ar'"]),
    "unknown flavor": (["--model.flavor", "smollm2-135"], ["smollm2-135", "did you mean 'smollm2-135M'"]),
    "unknown torchtitan flavor": (
        ["--model.name", "llama3", "--model.flavor", "debugmodl"],
        ["debugmodl", "did you mean 'debugmodel'"],
    ),
    "unknown dataset": (["--dataloader.dataset", "stdlb"], ["stdlb", "did you mean 'stdlib'"]),
    "unknown key": (["--training.stepss", "3"], ["training.stepss", "did you mean 'training.steps'"]),
    "wrong type": (["--training.steps", "eleven"], ["training.steps", "eleven", "int"]),
    "batch that does not divide": (
        ["--training.global_batch_size", "12"],
        ["global_batch_size = 12", "multiple", "8"],
    ),
    "degrees that do not multiply": (
        ["--parallelism.tensor_parallel_degree", "3"],
        ["tensor 3", "got 1 processes"],
    ),
    "empty sequence": (["--training.seq_len", "0"], ["training.seq_len", "at least 1", "0"]),
    "sequence longer than the context": (
        ["--training.seq_len", "4096"],
        ["4096", "2048"],
    ),
    "attention that needs a GPU": (["--model.attention", "flex"], ["'flex'", "needs a GPU", "dense"]),
    "missing data file": (
        ["--dataloader.dataset", "text", "--dataloader.dataset_path", "/nowhere/x.txt"],
        ["/nowhere/x.txt"],
    ),
    "missing initial weights": (
        ["--checkpoint.enable", "--checkpoint.initial_load_path", "/nowhere/step-1"],
        ["initial_load_path", "/nowhere/step-1", "not a folder"],
    ),
    "missing checkpoint step": (
        ["--checkpoint.enable", "--checkpoint.load_step", "7"],
        ["step", "7"],
    ),
    "chunks that do not divide": (["--loss.num_chunks", "5"], ["num_chunks = 5", "64"]),
    "negative learning rate": (["--optimizer.lr", "-1"], ["optimizer.lr", "-1"]),
    "unknown optimizer": (["--optimizer.name", "SGD"], ["optimizer.name", "SGD", "AdamW"]),
    "bidirectional backbone": (["--model.flavor", "llada-debug"], ["'ar'", "causal", "llada-debug"]),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_refused_with_one_line(case, tmp_path):
    args, words = CASES[case]
    (result,) = run(jobs.refusal, world=1, folder=str(tmp_path), args=args)
    message = result["error"]
    assert message, "the run was not refused"
    assert "\n" not in message and len(message) < 500
    for word in words:
        assert word in message, message
    assert not [name for name in result["left"] if "step-" in name or name == "config.toml"]


def test_parallelism_that_torchtitan_refuses(tmp_path):
    pipeline = ["--parallelism.pipeline_parallel_degree", "2"]
    for result in run(jobs.refusal, world=2, folder=str(tmp_path), args=pipeline):
        assert "tying" in result["error"]
    heads = ["--model.flavor", "qwen2_5-debug", "--parallelism.tensor_parallel_degree", "4"]
    for result in run(jobs.refusal, world=4, folder=str(tmp_path), args=heads):
        assert "tensor_parallel_degree (4)" in result["error"] and "n_kv_heads (2)" in result["error"]
    context = ["--parallelism.context_parallel_degree", "2"]
    for result in run(jobs.refusal, world=2, folder=str(tmp_path), args=context):
        assert "context_parallel_degree = 2 is not supported" in result["error"]


def test_empty_data_set(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    args = ["--dataloader.dataset", "text", "--dataloader.dataset_path", str(tmp_path / "empty.txt")]
    (result,) = run(jobs.refusal, world=1, folder=str(tmp_path), args=args)
    assert "empty" in result["error"] or "no documents" in result["error"]


def test_weights_of_another_vocabulary(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save = ["--checkpoint.enable", "--training.steps", "1"]
    run(jobs.train, world=1, folder=str(tmp_path / "a"), args=[*save, "--model.flavor", "qwen3-debug"])
    path = tmp_path / "a" / "out" / "checkpoint" / "step-1"
    (result,) = run(
        jobs.refusal,
        world=1,
        folder=str(tmp_path / "b"),
        args=["--checkpoint.enable", "--checkpoint.initial_load_path", str(path)],
    )
    assert "does not fit the model" in result["error"] or "lacks" in result["error"]
    assert str(path) in result["error"]


def test_a_folder_of_assets_that_is_not_there(tmp_path):
    """A typo, or a start in another folder, must not train on bytes."""
    args = ["--model.hf_assets_path", "assets/typo", "--training.steps", "1"]
    (result,) = run(jobs.refusal, world=1, folder=str(tmp_path), args=args)
    assert "[model] hf_assets_path = 'assets/typo' is not there, seen from" in result["error"]
    (bytes_are_meant,) = run(
        jobs.refusal, world=1, folder=str(tmp_path), args=[*args, "--tokenizer.kind", "byte"]
    )
    assert bytes_are_meant["error"] is None


def test_no_free_disk_for_a_checkpoint(tmp_path):
    (result,) = run(jobs.refusal_without_disk, world=1, folder=str(tmp_path), args=["--checkpoint.enable"])
    assert "no disk space for a checkpoint" in result["error"] and "GiB" in result["error"]
    assert not [name for name in result["left"] if "step-" in name]


def test_a_disk_that_is_full_for_what_is_no_checkpoint(tmp_path):
    (result,) = run(jobs.refusal_where_notes_find_no_room, world=1, folder=str(tmp_path), args=[])
    path = tmp_path / "out" / "config.toml"
    assert result["error"] == (
        f"[job] dump_folder = '{tmp_path / 'out'}' cannot be written: No space left on device: {path}"
    )


def test_a_note_that_cannot_be_written_fails_no_run_that_went_well(tmp_path):
    (tmp_path / "out" / "run.json").mkdir(parents=True)
    (result,) = run(jobs.train_logged, world=1, folder=str(tmp_path), args=["--training.steps", "1"])
    assert list(result["loss"]) == [1] and "run.json cannot be written: Is a directory" in result["log"]


def test_exit_code_and_no_traceback(tmp_path):
    config = tmp_path / "bad.toml"
    config.write_text("[training]\nsteps = 'eleven'\n")
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_ext.train", "--job.config_file", str(config)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "bad.toml" in lines[0] and "training.steps" in lines[0] and "eleven" in lines[0]


def test_missing_config_file(tmp_path):
    (result,) = run(
        jobs.refusal, world=1, folder=str(tmp_path), args=["--job.config_file", "/nowhere/x.toml"]
    )
    assert "/nowhere/x.toml" in result["error"]


@pytest.mark.slow
def test_launcher_prints_the_line_once_and_no_traceback(tmp_path):
    config = tmp_path / "bad.toml"
    config.write_text("[training]\nstep = 3\n")
    done = subprocess.run(
        [str(ROOT / "launch" / "run_train.sh")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "NGPU": "2",
            "CONFIG_FILE": str(config),
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        },
        timeout=180,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 2
    assert text.count("error:") == 1 and "did you mean" in text
    assert "Traceback" not in text
