"""Looped, pause-token and LSTM models on several processes: the same losses and gradients as one."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run

KINDS = {
    "middle": ["--looped.start", "2", "--looped.end", "3", "--looped.loops", "3"],
    "full": ["--looped.kind", "full"],
    "pause": ["--looped.kind", "pause"],
    "lstm": ["--looped.kind", "lstm", "--looped.lstm_layers", "2", "--looped.lstm_hidden", "48"],
}
SPLIT = ["--training.local_batch_size", "4"]
TENSOR = ["--parallelism.tensor_parallel_degree", "2"]
NO_SEQUENCE = ["--parallelism.enable_sequence_parallel", "false"]
LAYOUTS = {
    "middle-fsdp2": (2, SPLIT),
    "middle-fsdp2_layer": (2, [*SPLIT, "--looped.core_sharding", "layer"]),
    "middle-tp2": (2, TENSOR),
    "middle-tp2_no_sp": (2, [*TENSOR, *NO_SEQUENCE]),
    "full-fsdp2_selective": (2, [*SPLIT, "--activation_checkpoint.mode", "selective"]),
    "full-tp2": (2, TENSOR),
    "pause-fsdp2_chunks": (2, [*SPLIT, "--loss.num_chunks", "4"]),
    "pause-tp2": (2, TENSOR),
    "pause-tp2_no_sp": (2, [*TENSOR, *NO_SEQUENCE]),
    "lstm-fsdp2": (2, SPLIT),
    "lstm-fsdp2_chunks": (2, [*SPLIT, "--loss.num_chunks", "4"]),
}
MORE_LAYOUTS = {
    "middle-fsdp2_tp2": (4, [*TENSOR, *SPLIT]),
    "full-fsdp2": (2, SPLIT),
    "full-tp2_no_sp": (2, [*TENSOR, *NO_SEQUENCE]),
    "pause-fsdp2": (2, SPLIT),
    "lstm-hsdp2": (2, [*SPLIT, "--parallelism.data_parallel_replicate_degree", "2"]),
}


def arguments(kind: str) -> list[str]:
    return ["--model.name", "looped", *KINDS[kind]]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Gradients of one process, by kind, computed once."""
    found: dict[str, dict[str, torch.Tensor]] = {}

    def of(kind: str) -> dict[str, torch.Tensor]:
        if kind not in found:
            folder = str(tmp_path_factory.mktemp(kind))
            (found[kind],) = run(jobs.gradients, world=1, folder=folder, args=arguments(kind))
        return found[kind]

    return of


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)]
)
def test_gradients_are_those_of_one_process(layout, single, tmp_path):
    kind = layout.partition("-")[0]
    world, args = (LAYOUTS | MORE_LAYOUTS)[layout]
    got = run(jobs.gradients, world=world, folder=str(tmp_path), args=[*arguments(kind), *args])[0]
    expected = single(kind)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert expected[name].abs().max() > 0, name
        torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=2e-3, msg=name)


@pytest.mark.parametrize("kind", ["middle", "lstm"])
def test_losses_of_two_processes_are_those_of_one(kind, tmp_path):
    losses = {}
    for world, extra in ((1, []), (2, SPLIT)):
        folder = tmp_path / str(world)
        folder.mkdir()
        args = [*arguments(kind), *extra]
        losses[world] = run(jobs.train, world=world, folder=str(folder), args=args)[0]["loss"]
    assert losses[1].keys() == losses[2].keys() and len(losses[1]) == 5
    for step, loss in losses[1].items():
        assert losses[2][step] == pytest.approx(loss, abs=1e-4)
    assert losses[1][5] < losses[1][1]


def test_one_loop_trains_as_the_baseline(tmp_path):
    """Same seed, same data, same weights: the twin's losses, step by step."""
    losses = {}
    for name, args in (("ar", []), ("looped", [*arguments("middle"), "--looped.loops", "1"])):
        folder = tmp_path / name
        folder.mkdir()
        losses[name] = run(jobs.train, world=1, folder=str(folder), args=args)[0]["loss"]
    # Once in many runs a process rounds a sum the other way: 1e-7, where other weights give 1e-2.
    assert losses["looped"] == pytest.approx(losses["ar"], rel=1e-6)


def test_pause_tokens_are_not_counted_as_data(tmp_path):
    """Losses are means over data tokens, and neither throughput nor tokens seen doubles."""
    rows = {}
    for name, args in (("ar", []), ("pause", arguments("pause"))):
        folder = tmp_path / name
        folder.mkdir()
        validate = ["--validation.enable", "--validation.freq", "5", "--validation.steps", "2"]
        rows[name] = run(jobs.train, world=1, folder=str(folder), args=[*args, *validate])[0]["rows"]

    def values(name: str, key: str) -> list[float]:
        return [row[key] for _, row in rows[name] if key in row]

    assert values("pause", "n_tokens_seen") == values("ar", "n_tokens_seen")
    # An untrained model is close to the uniform distribution over its 264 tokens.
    assert values("pause", "loss_metrics/global_avg_loss")[0] == pytest.approx(5.58, abs=0.15)
    assert values("pause", "validation_metrics/loss")[-1] < 5.6


@pytest.mark.parametrize("kind", ["pause", "lstm"])
def test_resumes_where_it_stopped(kind, tmp_path):
    save = ["--checkpoint.enable", "--checkpoint.interval", "2", "--lr_scheduler.total_steps", "4"]
    args = [*arguments(kind), *save, *SPLIT]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()

    def steps(folder, count: int) -> dict[int, float]:
        chosen = [*args, "--training.steps", str(count)]
        return run(jobs.train, world=2, folder=str(folder), args=chosen)[0]["loss"]

    whole = steps(folders[0], 4)
    assert steps(folders[1], 2) | steps(folders[1], 4) == whole


def test_the_core_is_gathered_once_a_step_however_often_it_runs(tmp_path):
    counts = {}
    for loops in ("2", "6"):
        folder = tmp_path / loops
        folder.mkdir()
        args = [*arguments("middle"), "--looped.loops", loops, *SPLIT]
        counts[loops] = run(jobs.count_collectives, world=2, folder=str(folder), args=args)[0]
    assert counts["2"] == counts["6"]
    assert counts["6"]["all_gather"] <= 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["middle", "pause", "lstm"])
def test_compile_changes_nothing(kind, tmp_path):
    results = {}
    for name, extra in (("eager", []), ("compiled", ["--compile.enable"])):
        folder = tmp_path / name
        folder.mkdir()
        args = [*arguments(kind), *extra, *SPLIT]
        results[name] = run(jobs.train, world=2, folder=str(folder), args=args, timeout=500)[0]["loss"]
    for step, loss in results["eager"].items():
        assert results["compiled"][step] == pytest.approx(loss, abs=1e-4)
