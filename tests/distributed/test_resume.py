"""Stop and resume: bit-identical, from the newest whole checkpoint, on another number of ranks too."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import jobs
from tests.distributed.harness import run, start

CHECKPOINT = ["--checkpoint.enable", "--checkpoint.interval", "5", "--lr_scheduler.total_steps", "10"]


def steps(count: int) -> list[str]:
    return [*CHECKPOINT, "--training.steps", str(count)]


@pytest.mark.parametrize("world", [1, 2])
def test_resumed_losses_are_bit_identical(world, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    batch = ["--training.local_batch_size", "4"]
    whole = run(jobs.train, world=world, folder=str(tmp_path / "whole"), args=[*steps(10), *batch])[0]
    first = run(jobs.train, world=world, folder=str(tmp_path / "parts"), args=[*steps(5), *batch])[0]
    second = run(jobs.train, world=world, folder=str(tmp_path / "parts"), args=[*steps(10), *batch])[0]
    assert list(first["loss"]) == [1, 2, 3, 4, 5]
    assert list(second["loss"]) == [6, 7, 8, 9, 10]
    assert first["loss"] | second["loss"] == whole["loss"]
    assert first["grad_norm"] | second["grad_norm"] == whole["grad_norm"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resume_on_another_number_of_ranks(before, after, tmp_path):
    """The same global batches follow: nothing is repeated, nothing skipped."""

    def args(world: int, count: int) -> list[str]:
        return [*steps(count), "--training.local_batch_size", str(8 // world)]

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    (whole,) = run(jobs.train, world=1, folder=str(tmp_path / "whole"), args=args(1, 10))
    first = run(jobs.train, world=before, folder=str(tmp_path / "parts"), args=args(before, 5))[0]
    second = run(jobs.train, world=after, folder=str(tmp_path / "parts"), args=args(after, 10))[0]
    got = first["loss"] | second["loss"]
    assert list(got) == list(whole["loss"])
    for step, loss in whole["loss"].items():
        assert got[step] == pytest.approx(loss, abs=1e-4), f"step {step}"


def test_a_resume_trains_with_the_optimizer_of_the_config(tmp_path):
    """What the command says of the optimizer holds from the first step on; moments are the checkpoint's."""
    run(jobs.train, world=1, folder=str(tmp_path), args=steps(5))
    changed = {
        "lr": "0.1",
        "weight_decay": "0",
        "beta2": "0.5",
        "no_weight_decay": "norm",
        "implementation": "for-loop",
    }
    args = [*steps(6), *(word for key, value in changed.items() for word in (f"--optimizer.{key}", value))]
    args += ["--lr_scheduler.total_steps", "8", "--lr_scheduler.warmup_steps", "0"]
    (groups,) = run(jobs.first_optimizer_groups, world=1, folder=str(tmp_path), args=args)
    assert len(groups) == 2  # with and without weight decay
    for group in groups:
        assert group["lr"] == pytest.approx(0.1 * (1 - 5 / 8))  # of step 6 of 8
        assert (group["betas"], group["weight_decay"], group["fused"]) == ((0.9, 0.5), 0, False)


def test_the_same_command_goes_on_whatever_it_says_of_loading(tmp_path):
    """A start by the queue repeats nothing; another command is followed to the letter."""
    run(jobs.train, world=1, folder=str(tmp_path), args=steps(7))
    loading = ["--checkpoint.load_step", "5", "--checkpoint.exclude_from_loading", "dataloader"]

    def start_again(count: int) -> dict[str, Any]:
        return run(jobs.train_logged, world=1, folder=str(tmp_path), args=[*steps(count), *loading])[0]

    first = start_again(12)
    shutil.rmtree(tmp_path / "out" / "checkpoint" / "step-12")
    second, other = start_again(12), start_again(13)
    assert list(first["loss"]) == [*range(6, 13)] and list(other["loss"]) == [*range(6, 14)]
    assert {step: first["loss"][step] for step in (11, 12)} == second["loss"]
    for key in ("load_step = 5", "exclude_from_loading"):
        assert [f"{key} was followed before" in r["log"] for r in (first, second, other)] == [
            False,
            True,
            False,
        ]
    assert ["newer checkpoints stay" in r["log"] for r in (first, second, other)] == [True, False, True]


def test_resume_with_tensor_parallel_and_back(tmp_path):
    tp = ["--parallelism.tensor_parallel_degree", "2"]
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    (whole,) = run(jobs.train, world=1, folder=str(tmp_path / "whole"), args=steps(10))
    first = run(jobs.train, world=2, folder=str(tmp_path / "parts"), args=[*steps(5), *tp])[0]
    (second,) = run(jobs.train, world=1, folder=str(tmp_path / "parts"), args=steps(10))
    got = first["loss"] | second["loss"]
    for step, loss in whole["loss"].items():
        assert got[step] == pytest.approx(loss, abs=1e-4), f"step {step}"


def test_killed_in_the_middle_of_a_save(tmp_path):
    """SIGKILL while step 10 is written: the next start uses step 5, says so, and goes on."""
    run(jobs.train, world=1, folder=str(tmp_path), args=steps(5))
    processes, _ = start(jobs.train_with_slow_save, world=1, folder=str(tmp_path), args=steps(10))
    folder = tmp_path / "out" / "checkpoint" / "step-10"
    deadline = time.monotonic() + 120
    while not list(folder.glob("__*.distcp")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(processes[0].pid, signal.SIGKILL)
    processes[0].join(10)
    assert folder.is_dir() and not (folder / ".metadata").exists()
    (result,) = run(jobs.train_logged, world=1, folder=str(tmp_path), args=steps(10))
    assert list(result["loss"]) == [6, 7, 8, 9, 10]
    assert "step-10 is damaged: it has no .metadata" in result["log"]
    assert "using step-5" in result["log"]
    assert (folder / ".metadata").exists()


@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata"])
def test_truncated_checkpoint_is_passed_over(victim, tmp_path):
    run(jobs.train, world=1, folder=str(tmp_path), args=steps(10))
    path: Path = tmp_path / "out" / "checkpoint" / "step-10" / victim
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (result,) = run(jobs.train_logged, world=1, folder=str(tmp_path), args=steps(10))
    assert list(result["loss"]) == [6, 7, 8, 9, 10]
    assert "step-10 is damaged" in result["log"] and victim in result["log"]
    assert "using step-5" in result["log"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_disk_full_during_a_save_leaves_nothing_half_written(mode, tmp_path):
    run(jobs.train, world=1, folder=str(tmp_path), args=steps(5))
    full = [*steps(15), "--checkpoint.async_mode", mode]
    (message,) = run(jobs.train_on_full_disk, world=1, folder=str(tmp_path), args=full)
    assert "no disk space left" in message and "\n" not in message
    checkpoints = tmp_path / "out" / "checkpoint"
    assert [p.name for p in checkpoints.iterdir()] == ["step-5"]
    (result,) = run(jobs.train, world=1, folder=str(tmp_path), args=steps(10))
    assert list(result["loss"]) == [6, 7, 8, 9, 10]


def test_config_lies_beside_every_checkpoint(tmp_path):
    run(jobs.train, world=1, folder=str(tmp_path), args=steps(10))
    for step in (5, 10):
        text = (tmp_path / "out" / "checkpoint" / f"step-{step}" / "config.toml").read_text()
        assert 'flavor = "smollm2-debug"' in text and "lr = 0.003" in text


def test_initial_path_is_not_used_when_a_checkpoint_exists(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "out" / "checkpoint").mkdir(parents=True)  # exists but is empty
    run(jobs.train, world=1, folder=str(tmp_path / "source"), args=steps(10))
    source = tmp_path / "source" / "out" / "checkpoint" / "step-10"
    initial = ["--checkpoint.initial_load_path", str(source)]
    (begun,) = run(jobs.train_logged, world=1, folder=str(tmp_path / "target"), args=[*steps(5), *initial])
    (resumed,) = run(jobs.train_logged, world=1, folder=str(tmp_path / "target"), args=[*steps(10), *initial])
    (scratch,) = run(jobs.train, world=1, folder=str(tmp_path / "source"), args=["--training.steps", "1"])
    assert begun["loss"][1] < scratch["loss"][1] - 0.5  # trained weights came in
    assert list(begun["loss"]) == [1, 2, 3, 4, 5]
    assert "was not used" not in begun["log"]
    assert list(resumed["loss"]) == [6, 7, 8, 9, 10]
    assert "initial_load_path" in resumed["log"] and "was not used" in resumed["log"]
