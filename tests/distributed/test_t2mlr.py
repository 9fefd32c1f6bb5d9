"""T2MLR on several processes: the same losses, gradients and weights as one."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run

BASE = [
    *("--model.name", "t2mlr", "--t2mlr.start", "2", "--t2mlr.end", "3"),
    *("--t2mlr.forward_depth", "6", "--t2mlr.backward_depth", "2"),
]
# Without the temporal residual the iterates of an untrained model settle soon.
EARLY = [
    *("--t2mlr.forward_depth", "64", "--t2mlr.convergence_tol", "1e-3", "--t2mlr.temporal_residual", "false")
]
LAYOUTS = {
    "fsdp2": (2, ["--training.local_batch_size", "4"]),
    "tp2": (2, ["--parallelism.tensor_parallel_degree", "2"]),
    "tp2_no_sp": (
        2,
        ["--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_sequence_parallel", "false"],
    ),
    "fsdp2_tp2": (
        4,
        ["--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "4"],
    ),
    "fsdp2_layer": (2, ["--training.local_batch_size", "4", "--t2mlr.core_sharding", "layer"]),
    "fsdp2_selective": (
        2,
        ["--training.local_batch_size", "4", "--activation_checkpoint.mode", "selective"],
    ),
    "fsdp2_full": (2, ["--training.local_batch_size", "4", "--activation_checkpoint.mode", "full"]),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    (gradients,) = run(jobs.t2mlr_gradients, world=1, folder=str(folder), args=BASE)
    return gradients


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_gradients_are_those_of_one_process(layout, single, tmp_path):
    """With open gates, so that the recurrence matters; every parameter, the small ones too."""
    world, args = LAYOUTS[layout]
    got = run(jobs.t2mlr_gradients, world=world, folder=str(tmp_path), args=[*BASE, *args])[0]
    assert got.keys() == single.keys()
    assert any("fusion.w_recurrent" in name for name in got)
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, single[name], atol=2e-5, rtol=2e-3, msg=name)


def test_starts_from_the_baselines_weights(tmp_path):
    """Same seed: the twin's weights, and with closed gates its losses at the first step."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one_step = ["--training.steps", "1"]
    (twin,) = run(jobs.train, world=1, folder=str(tmp_path / "a"), args=one_step)
    (ours,) = run(jobs.train, world=1, folder=str(tmp_path / "b"), args=[*BASE, *one_step])
    assert ours["loss"][1] == twin["loss"][1]


def test_trains_logs_its_metrics_and_resumes(tmp_path):
    save = ["--checkpoint.enable", "--checkpoint.interval", "3", "--lr_scheduler.total_steps", "6"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    args = [*BASE, *save, "--training.local_batch_size", "4"]
    whole = run(jobs.train, world=2, folder=folders[0], args=[*args, "--training.steps", "6"])[0]
    first = run(jobs.train, world=2, folder=folders[1], args=[*args, "--training.steps", "3"])[0]
    second = run(jobs.train, world=2, folder=folders[1], args=[*args, "--training.steps", "6"])[0]
    assert first["loss"] | second["loss"] == whole["loss"]
    rows = [row for _, row in whole["rows"] if "t2mlr/iterates/mean" in row]
    assert [row["t2mlr/iterates/mean"] for row in rows] == [6.0] * 6
    assert rows[0]["t2mlr/gate_recurrent/mean"] == 0.0 != rows[-1]["t2mlr/gate_recurrent/mean"]
    assert 0 < rows[-1]["t2mlr/residual/max"] < 2


def test_ranks_that_leave_the_loop_on_their_own_agree_with_one(tmp_path):
    """One FSDP unit: no collective inside the loop, so each rank may stop early by itself."""
    results = {}
    for name, world, batch in (("one", 1, "8"), ("two", 2, "4")):
        folder = tmp_path / name
        folder.mkdir()
        args = [*BASE, *EARLY, "--training.local_batch_size", batch]
        results[name] = run(jobs.t2mlr_training, world=world, folder=str(folder), args=args, gate=0.3)[0]
    for step, loss in results["one"]["loss"].items():
        # Each rank stops by its own tokens, so the iterates agree to the tolerance, not to rounding.
        assert results["two"]["loss"][step] == pytest.approx(loss, abs=2e-3)
    used = [row["t2mlr/iterates/mean"] for _, row in results["two"]["rows"] if "t2mlr/iterates/mean" in row]
    assert all(2 < n < 64 for n in used)


def test_tensor_parallel_ranks_leave_the_loop_together(tmp_path):
    tensor = ["--parallelism.tensor_parallel_degree", "2"]
    first, second = run(
        jobs.t2mlr_training, world=2, folder=str(tmp_path), args=[*BASE, *EARLY, *tensor], gate=0.02
    )
    assert first["loss"] == second["loss"]


def test_the_core_is_gathered_once_a_step_however_deep_the_loop(tmp_path):
    counts = {}
    for depth in ("2", "12"):
        folder = tmp_path / depth
        folder.mkdir()
        args = [*BASE, "--t2mlr.forward_depth", depth, "--training.local_batch_size", "4"]
        counts[depth] = run(jobs.count_collectives, world=2, folder=str(folder), args=args)[0]
    assert counts["2"] == counts["12"]
    # embedding+norm+head, two outer blocks, the core: gathered for the forward, and all but the
    # first (kept for the head) again for the backward.
    assert counts["12"]["all_gather"] <= 8


@pytest.mark.slow
def test_compile_changes_nothing(tmp_path):
    results = {}
    for name, extra in (("eager", []), ("compiled", ["--compile.enable"])):
        folder = tmp_path / name
        folder.mkdir()
        args = [*BASE, *extra, "--training.local_batch_size", "4"]
        results[name] = run(jobs.t2mlr_training, world=2, folder=str(folder), args=args, timeout=500)[0]
    for step, loss in results["eager"]["loss"].items():
        assert results["compiled"]["loss"][step] == pytest.approx(loss, abs=1e-4)
