"""Faults in the middle of a run: what is not finite, a hung collective, a refused write."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import faults_jobs, jobs
from tests.distributed.harness import run, start
from tests.paths import ROOT

SAVE = ["--checkpoint.enable", "--checkpoint.interval", "2"]
REPLICATE = (
    "--parallelism.data_parallel_replicate_degree",
    "2",
    "--parallelism.data_parallel_shard_degree",
    "1",
)
SKIP = ["--faults.non_finite", "skip"]
SKIPPED = "faults/skipped_steps"


def steps(count: int) -> list[str]:
    return ["--training.steps", str(count), "--lr_scheduler.total_steps", "8"]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out" / "checkpoint").iterdir())


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_not_finite_on_one_rank_stops_all(tmp_path):
    results = run(
        faults_jobs.poisoned, world=2, folder=str(tmp_path), args=[*SAVE, *steps(6)], steps=(4,), rank=1
    )
    for result in results:
        assert result["code"] == 3 and result["step"] == 4
        assert "step 4: not finite: loss nan on rank 1, finite on 1; gradient norm nan" in result["error"]
        assert result["error"].endswith(f"last good checkpoint: {tmp_path}/out/checkpoint/step-2")
        assert "\n" not in result["error"]
    assert results[0]["error"] == results[1]["error"]
    assert saved(tmp_path) == ["step-2"]


def test_skipped_batches_change_nothing_and_a_resumed_run_goes_on_the_same(tmp_path):
    """The gradient of step 3 is infinite where its loss is not."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    bad = {"steps": (3,), "rank": 0, "kind": "gradient"}
    args = [*SAVE, *SKIP]
    (whole,) = run(
        faults_jobs.poisoned, world=1, folder=str(tmp_path / "whole"), args=[*args, *steps(6)], **bad
    )
    (first,) = run(
        faults_jobs.poisoned, world=1, folder=str(tmp_path / "parts"), args=[*args, *steps(4)], **bad
    )
    (second,) = run(faults_jobs.run_to_end, world=1, folder=str(tmp_path / "parts"), args=[*args, *steps(6)])
    assert [r["error"] for r in (whole, first, second)] == [None] * 3
    assert equal(whole["weights"], second["weights"])
    assert whole["learning_rate"] == second["learning_rate"]
    assert first["loss"] | second["loss"] == whole["loss"]
    skipped = {step: row[SKIPPED] for step, row in whole["rows"] if SKIPPED in row}
    assert skipped == {1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 1}
    (warning,) = [line for line in whole["warnings"] if "skipped" in line]
    assert "step 3: not finite" in warning and "1 in a row, at most 10" in warning


def test_too_many_skipped_batches_end_the_run(tmp_path):
    (result,) = run(
        faults_jobs.poisoned,
        world=1,
        folder=str(tmp_path),
        args=[*SAVE, *SKIP, *steps(8), "--faults.max_skipped", "2"],
        steps=(2, 4, 5, 6),
        kind="inf",
    )
    assert result["code"] == 3 and result["step"] == 6
    assert "3 batches in a row, [faults] max_skipped = 2" in result["error"]
    assert [step for step in (2, 4, 5) if any(f"step {step}: not finite" in w for w in result["warnings"])]
    # torchtitan logs no line for a step whose loss is not finite; the counter is logged all the same.
    assert list(result["loss"]) == [1, 3]
    assert [row for step, row in result["rows"] if step == 5] == [{SKIPPED: 3.0}]
    assert saved(tmp_path) == ["step-2", "step-4"]


@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("--parallelism.tensor_parallel_degree", "2"),
        pytest.param(REPLICATE, marks=pytest.mark.slow),
    ],
    ids=["fsdp", "tensor", "replicate"],
)
def test_what_is_measured_is_what_is_logged(layout, tmp_path):
    result = run(faults_jobs.measured, world=2, folder=str(tmp_path), args=[*layout, *steps(3)])[0]
    for name, logged in result["logged"].items():
        assert list(logged) == [1, 2, 3]
        assert result["measured"][name] == pytest.approx(logged, rel=1e-5)


def test_a_rank_that_hangs_is_reported_by_the_other(tmp_path):
    comm = ["--comm.train_timeout_seconds", "3", "--comm.init_timeout_seconds", "60"]
    processes, results = start(
        faults_jobs.asleep, world=2, folder=str(tmp_path), args=[*comm, *steps(6)], step=3
    )
    try:
        rank, value, error = results.get(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.join(20)
    assert error is None and rank == 0
    waiting = pickle.loads(value)
    assert waiting["code"] == 4
    assert waiting["error"].startswith("step 3, rank 0 of 2: a collective timed out after 3 s")
    assert "gloo writes no flight recorder traces" in waiting["error"] and "\n" not in waiting["error"]


@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.slow), "async"])
def test_a_write_refused_on_another_rank_leaves_the_last_checkpoint(mode, tmp_path):
    results = run(
        faults_jobs.with_small_files,
        world=2,
        folder=str(tmp_path),
        args=[*SAVE, *steps(8), "--checkpoint.async_mode", mode],
        rank=1,
        step=3,
        limit=50_000,
    )
    for result in results:
        assert result["code"] == 2
        assert "step-4 could not be written: " in result["error"] and "on rank 1; earlier" in result["error"]
        assert "\n" not in result["error"]
    assert saved(tmp_path) == ["step-2"]


def test_a_save_that_cannot_begin_ends_all_ranks(tmp_path):
    """Rank 0 alone meets the error; the other would wait for it until the time-out."""
    (tmp_path / "blocked").touch()
    args = [*SAVE, *steps(8), "--checkpoint.folder", str(tmp_path / "blocked")]
    results = run(faults_jobs.run_to_end, world=2, folder=str(tmp_path), args=args)
    for result in results:
        assert result["code"] == 2 and result["step"] == 2
        assert "step-2 could not be written: Not a directory; earlier" in result["error"]


def mountable(folder: Path) -> bool:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        return False
    subprocess.run(["umount", str(folder)], check=True)
    return True


def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mountable(disk):
        pytest.skip("mounting a small disk is not permitted")
    (result,) = run(
        faults_jobs.on_small_disk,
        world=1,
        folder=str(tmp_path),
        args=[*SAVE, *steps(8)],
        mount=str(disk),
        megabytes=4,
    )
    assert "no disk space left on rank 0; earlier checkpoints are untouched" in result["error"]
    assert result["left"] == ["step-2"]


@pytest.mark.slow
def test_the_launcher_ends_with_the_code_and_one_line(tmp_path):
    """A learning rate that makes the weights infinite: nothing is saved and nothing restarted."""
    config = tmp_path / "config.toml"
    config.write_text(jobs.CONFIG.replace("lr = 3e-3", "lr = 1e38"))
    args = ["--job.dump_folder", str(tmp_path / "out"), *SAVE, "--checkpoint.interval", "1"]
    done = subprocess.run(
        [str(ROOT / "launch" / "run_train.sh"), *args],
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
        timeout=300,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 3, text
    assert text.count("error: step 1: weights are not finite, and are not saved") == 1
    assert "Traceback" not in text
    assert not list((tmp_path / "out").glob("checkpoint/step-*"))
