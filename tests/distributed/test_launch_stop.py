"""A stop signal to one of two gloo ranks: both stop after the same step, no step is lost or repeated."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.distributed import jobs, launch_jobs
from tests.distributed.harness import run
from torchtitan_ext.config.sections import TrainingSection
from torchtitan_ext.stopping import STOPPED, STOPPED_UNSAVED

BASE = ["--training.local_batch_size", "4", "--training.steps", "10", "--lr_scheduler.total_steps", "10"]
SAVE = ["--checkpoint.enable", "--checkpoint.interval", "5", "--checkpoint.keep_latest_k", "0"]
VALIDATE = ["--validation.enable", "--validation.freq", "5", "--validation.steps", "2"]


def stopped(folder, args: list[str], *, world: int = 2, **signalled: Any) -> dict[str, Any]:
    """What rank 0 saw of a run in which a rank got a signal; all ranks made the same steps."""
    folder.mkdir(exist_ok=True)
    results = run(launch_jobs.train_until_stopped, world=world, folder=str(folder), args=args, **signalled)
    assert len({result["code"] for result in results}) == 1
    assert len({tuple(result["loss"].items()) for result in results}) == 1
    return results[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    return run(jobs.train, world=2, folder=str(folder), args=[*BASE, *SAVE])[0]


def test_stops_in_a_step_in_a_save_and_in_validation_lose_nothing(whole, tmp_path):
    args = [*BASE, *SAVE, *VALIDATE]
    folder = tmp_path / "run"
    # The signal reaches one rank alone; the other must stop after the same step.
    first = stopped(folder, args, moment="step 3", rank=1)
    assert first["code"] == STOPPED and list(first["loss"]) == [1, 2, 3]
    assert first["left"] == ["step-3"]
    assert any("step-3 is written and the next start goes on from it" in line for line in first["lines"])
    second = stopped(
        folder, [*args, "--checkpoint.async_mode", "async"], moment="save 5", rank=0, number=signal.SIGUSR1
    )
    assert second["code"] == STOPPED and list(second["loss"]) == [4, 5]
    assert second["left"] == ["step-3", "step-5"]  # that the loop saved, whole
    third = stopped(folder, args, moment="step 8", rank=0)
    assert third["code"] == STOPPED and list(third["loss"]) == [6, 7, 8]
    # In the validation of the last step: the run is done.
    last = stopped(folder, args, moment="validation 10", rank=1)
    assert last["code"] == 0 and list(last["loss"]) == [9, 10] and last["lines"] == []
    assert len(last["given_up"]) == 1 and last["validated"] == [], "both ranks left it at the next batch"
    assert first["loss"] | second["loss"] | third["loss"] | last["loss"] == whole["loss"]


def test_a_stop_in_validation_that_is_not_the_last(tmp_path):
    result = stopped(tmp_path / "run", [*BASE, *SAVE, *VALIDATE], world=1, moment="validation 5")
    assert result["code"] == STOPPED and list(result["loss"]) == [1, 2, 3, 4, 5]
    assert result["left"] == ["step-5"]
    assert len(result["given_up"]) == 1 and "of step 5 is given up" in result["given_up"][0]
    assert result["validated"] == [1], "that of the first step"


def test_the_checkpoint_of_a_stop_is_a_full_one(tmp_path):
    """Where the last checkpoint would hold the model alone, that of a stop must be resumed from."""
    args = [*BASE, *SAVE, "--checkpoint.last_save_model_only"]
    first = stopped(tmp_path / "run", args, world=1, moment="step 2")
    rest = stopped(tmp_path / "run", args, world=1)
    assert first["code"] == STOPPED and list(rest["loss"]) == [3, 4, 5, 6, 7, 8, 9, 10]


def test_a_stop_before_the_first_step(tmp_path):
    result = stopped(tmp_path / "run", [*BASE, *SAVE], moment="before", rank=1)
    assert result["code"] == STOPPED and not result["loss"] and result["left"] == []
    assert any("before the first step (step 1)" in line for line in result["lines"])


def test_without_checkpoints_a_stop_says_that_nothing_was_saved(tmp_path):
    result = stopped(tmp_path / "run", BASE, world=1, moment="step 2")
    assert result["code"] == STOPPED_UNSAVED and list(result["loss"]) == [1, 2]
    assert any("nothing was saved, because [checkpoint] enable = false" in line for line in result["lines"])


# --- what the ranks check together at the start -----------------------------------------------


def test_ranks_that_agree_are_let_through_and_leave_nothing(tmp_path):
    for result in run(launch_jobs.meeting, world=2, folder=str(tmp_path), args=[], by_rank={}):
        assert result["error"] == ""
    assert list(tmp_path.iterdir()) == []


def test_the_rank_that_serves_the_store_waits_for_slow_readers(tmp_path):
    for result in run(launch_jobs.meeting_slowly, world=3, folder=str(tmp_path), args=[]):
        assert result["error"] == ""


def test_another_version_and_another_config_are_refused_on_all_ranks_with_the_same_line(tmp_path):
    results = run(
        launch_jobs.meeting,
        world=3,
        folder=str(tmp_path),
        args=[],
        by_rank={1: ["--training.steps", "7"]},
        torch_version="2.99.0",
    )
    assert len({result["error"] for result in results}) == 1
    assert {result["kind"] for result in results} == {"SharedError"}
    text = results[0]["error"]
    assert "on ranks 0-1 (" in text and "2.99.0 on rank 2 (" in text
    assert (
        f"[training] steps is {TrainingSection().steps} on ranks 0, 2 (" in text and ", 7 on rank 1 (" in text
    )
    assert "\n" not in text


def test_a_dump_folder_that_cannot_be_written_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = ["--job.dump_folder", str(tmp_path / "file" / "out")]
    results = run(launch_jobs.meeting, world=2, folder=str(tmp_path), args=blocked, by_rank={})
    assert len({result["error"] for result in results}) == 1
    assert "cannot be written" in results[0]["error"] and "Not a directory" in results[0]["error"]


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path):
    args = ["--comm.init_timeout_seconds", "2"]
    (result,) = run(launch_jobs.meeting_alone, world=1, folder=str(tmp_path), args=args)
    assert "only 1 of 2 ranks started within 2 s" in result["error"] and "rank 1 did not" in result["error"]


@pytest.mark.slow  # a time, which other processes on the machine would change
def test_the_question_between_two_steps_is_cheap():
    """A bound that a device synchronisation or a new group a step would break; the figure is far below."""
    assert max(run(launch_jobs.flag_cost, world=2)) < 20_000


# --- one dump folder for all hosts -------------------------------------------------------


def on_hosts(tmp_path, hosts: list[str], *args: str) -> list[dict[str, str]]:
    for host in hosts:
        (tmp_path / host).mkdir(exist_ok=True)
    return run(
        launch_jobs.meeting_on_hosts, world=len(hosts), folder=str(tmp_path), args=list(args), hosts=hosts
    )


def test_hosts_with_folders_of_their_own_are_named_and_nothing_is_left(tmp_path):
    (tmp_path / "c" / "out").mkdir(parents=True)
    results = on_hosts(tmp_path, ["a", "b", "a", "c"], "--checkpoint.enable")
    (error,) = {result["error"] for result in results}
    assert {result["kind"] for result in results} == {"SharedError"}
    assert error.startswith("[job] dump_folder must be on a file system that all hosts share")
    assert "rank 0 on node0 wrote into ./out/checkpoint is not there on node1, node3" in error
    assert "\n" not in error
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["a", "b", "c", "c/out"]


def test_hosts_that_share_the_folder_and_runs_that_need_not(tmp_path):
    shared = on_hosts(tmp_path, ["a", "a"], "--checkpoint.enable")
    assert [result["error"] for result in shared] == ["", ""]
    assert [p.name for p in (tmp_path / "a").rglob("*")] == ["out", "checkpoint"]
    # Without checkpoints only rank 0 writes what lasts.
    assert [result["error"] for result in on_hosts(tmp_path, ["a", "b"])] == ["", ""]
