"""Kills at any moment, and what is left in the folder of checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.distributed import faults_jobs
from tests.distributed.harness import run, start
from torchtitan_ext.checkpoint import whole

KEEP = ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"]


def steps(count: int) -> list[str]:
    return ["--training.steps", str(count)]


def newest(folder: Path) -> int:
    return whole.newest_whole(folder)[0]


def kill_around_a_save(folder: Path, args: list[str], *, world: int, dice: random.Random) -> bool:
    """Start the run and kill all its processes at a random moment; whether it had not ended by itself."""
    checkpoints = folder / "out" / "checkpoint"
    before = max(whole.steps(checkpoints), default=0)
    processes, results = start(faults_jobs.run_and_say, world=world, folder=str(folder), args=args)
    wanted = before + dice.randint(1, 3)
    deadline = time.monotonic() + 120
    try:
        # A step's folder appears with the beginning of its save.
        while max(whole.steps(checkpoints), default=0) < wanted and time.monotonic() < deadline:
            if not results.empty():  # it came to its end, or failed
                break
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.12))
    finally:
        ended = not results.empty()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join(20)
    assert ended or max(whole.steps(checkpoints), default=0) >= wanted, "the run came to nothing"
    return not ended


def killed_again_and_again(folder: Path, *, kills: int, world: int, count: int, seed: int) -> None:
    dice = random.Random(seed)
    (folder / "whole").mkdir()
    (folder / "parts").mkdir()
    args = [*KEEP, *steps(count)]
    undisturbed = run(faults_jobs.run_to_end, world=world, folder=str(folder / "whole"), args=args)[0]
    checkpoints = folder / "parts" / "out" / "checkpoint"
    reached, done = -1, 0
    for kill in range(kills):
        errors = list((folder / "parts").glob("error-*"))
        assert not errors, f"a start failed: {errors[0].read_text()}"
        mode = ["--checkpoint.async_mode", ("disabled", "async")[kill % 2]]
        done += kill_around_a_save(folder / "parts", [*args, *mode], world=world, dice=dice)
        assert newest(checkpoints) >= reached, "a whole checkpoint was lost"
        reached = newest(checkpoints)
    assert done >= kills - 2, "the run ended before it was killed often enough: give it more steps"
    last = run(faults_jobs.run_to_end, world=world, folder=str(folder / "parts"), args=args)[0]
    assert last["error"] is None and list(last["loss"]) == list(range(max(reached, 0) + 1, count + 1))
    assert last["loss"][count] == undisturbed["loss"][count]
    assert {n: w.tolist() for n, w in last["weights"].items()} == {
        n: w.tolist() for n, w in undisturbed["weights"].items()
    }
    # Nothing is left of the attempts that were killed.
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left == [f"step-{count - 1}", f"step-{count}"]


def test_three_kills(tmp_path):
    killed_again_and_again(tmp_path, kills=3, world=1, count=20, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "world", "count"), [(20, 1, 70), (5, 2, 24)])
def test_many_kills(kills, world, count, tmp_path):
    killed_again_and_again(tmp_path, kills=kills, world=world, count=count, seed=1)


def test_retention_counts_whole_checkpoints_while_others_are_written(tmp_path):
    """Asynchronous saves take longer than steps; a cut checkpoint and a left-over lie in the folder."""
    folder = tmp_path / "out" / "checkpoint"
    args = [*KEEP, "--checkpoint.async_mode", "async"]
    run(faults_jobs.run_to_end, world=1, folder=str(tmp_path), args=[*KEEP, *steps(2)])
    (folder / "step-9").mkdir()
    (folder / "step-9" / "__0_0.distcp").write_bytes(b"a left-over")
    data = folder / "step-2" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:1000])
    (result,) = run(
        faults_jobs.whole_at_each_step, world=1, folder=str(tmp_path), args=[*args, *steps(7)], seconds=0.3
    )
    assert list(result["loss"]) == [2, 3, 4, 5, 6, 7]
    # In step n the save of n - 1 is under way, and step 1 is what the run resumed from.
    assert result["whole"] == [[1], [1], [2, 1], [3, 2], [4, 3], [5, 4]]
    assert sorted(path.name for path in folder.iterdir()) == ["step-6", "step-7"]


@pytest.mark.slow
def test_an_asynchronous_save_holds_its_own_step(tmp_path):
    args = ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.async_mode", "async"]
    (saved,) = run(faults_jobs.asynchronous_kept, world=1, folder=str(tmp_path), args=[*args, *steps(2)])
    back = [*args, *steps(2), "--checkpoint.load_step", "1"]
    (loaded,) = run(faults_jobs.resumed_weights, world=1, folder=str(tmp_path), args=back)
    assert loaded.keys() == saved["kept"].keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved["kept"].items())


@pytest.mark.slow
def test_killed_in_the_last_save_in_hugging_face_form(tmp_path):
    """Two ranks: the export is passed over, and made anew by the next start."""
    export = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    args = ["--checkpoint.enable", "--checkpoint.interval", "2", *steps(3), *export]
    processes, _ = start(faults_jobs.stopped_in_export, world=2, folder=str(tmp_path), args=args)
    folder = tmp_path / "out" / "checkpoint" / "step-3"
    deadline = time.monotonic() + 120
    while not (folder / whole.HF_INDEX).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        process.kill()
        process.join(20)
    (folder / "stale").touch()
    assert "index.json cannot be read" in (whole.damage(folder) or "")
    results = run(faults_jobs.run_to_end, world=2, folder=str(tmp_path), args=args)
    assert list(results[0]["loss"]) == [3]
    assert whole.damage(folder) is None and not (folder / "stale").exists()
    # Weights alone are no place to go on from; one line says so.
    for again in run(faults_jobs.run_to_end, world=2, folder=str(tmp_path), args=args):
        assert "holds only model weights" in again["error"]
