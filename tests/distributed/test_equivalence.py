"""The same run on one process and on several: weights, losses and gradients agree."""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run

LAYOUTS = {
    "fsdp2": (2, ["--training.local_batch_size", "4"]),
    "tp2": (2, ["--parallelism.tensor_parallel_degree", "2"]),
    "tp2_no_sp": (
        2,
        ["--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_sequence_parallel", "false"],
    ),
    "hsdp2x2": (
        4,
        ["--parallelism.data_parallel_replicate_degree", "2", "--training.local_batch_size", "2"],
    ),
    "fsdp2_tp2": (
        4,
        ["--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "4"],
    ),
}


def launch(job, world, args, **kwargs):
    with tempfile.TemporaryDirectory() as folder:
        return run(job, world=world, folder=folder, args=args, **kwargs)


@functools.cache
def single(flavor: str = "smollm2-debug"):
    """The reference run on one process."""
    (result,) = launch(jobs.train, 1, ["--model.flavor", flavor], with_weights=True)
    return result


@functools.cache
def single_initial(flavor: str = "smollm2-debug"):
    (weights,) = launch(jobs.initial_weights, 1, ["--model.flavor", flavor])
    return weights


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "fsdp2_tp2"])
@pytest.mark.parametrize("flavor", ["smollm2-debug", "qwen2_5-debug"])
def test_initial_weights_do_not_depend_on_the_layout(layout, flavor):
    if layout == "fsdp2_tp2" and flavor != "smollm2-debug":
        pytest.skip("four processes once are enough")
    world, args = LAYOUTS[layout]
    expected = single_initial(flavor)
    for got in launch(jobs.initial_weights, world, [*args, "--model.flavor", flavor]):
        assert got.keys() == expected.keys()
        for name, tensor in got.items():
            assert torch.equal(tensor, expected[name]), name


def test_no_two_rows_of_an_embedding_start_equal():
    """On gloo the ready-made way draws the same numbers into every rank's shard."""
    weights = launch(jobs.initial_weights, 2, LAYOUTS["fsdp2"][1])[0]
    rows = weights["tok_embeddings.weight"]
    assert rows.unique(dim=0).shape[0] == rows.shape[0]
    assert rows.std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_losses_are_those_of_one_process(layout):
    world, args = LAYOUTS[layout]
    results = launch(jobs.train, world, args, with_weights=True)
    expected = single()
    assert list(expected["loss"]) == [1, 2, 3, 4, 5]
    for got in results:
        for step, loss in expected["loss"].items():
            assert got["loss"][step] == pytest.approx(loss, abs=1e-4), f"step {step}"
            assert got["grad_norm"][step] == pytest.approx(expected["grad_norm"][step], rel=1e-3)
    for name, tensor in results[0]["weights"].items():
        torch.testing.assert_close(tensor, expected["weights"][name], atol=2e-4, rtol=1e-3, msg=name)
    assert expected["loss"][5] < expected["loss"][1]


@pytest.mark.parametrize("flavor", ["qwen2_5-debug", "qwen3-debug"])
@pytest.mark.parametrize("layout", ["tp2", "tp2_no_sp"])
def test_biases_and_head_norms_under_tensor_parallel(flavor, layout):
    """A wrong placement of a small parameter trains on with a wrong gradient, so compare every one."""
    args = ["--model.flavor", flavor]
    (expected,) = launch(jobs.gradients, 1, args)
    got = launch(jobs.gradients, 2, [*args, *LAYOUTS[layout][1]])[0]
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3, msg=name)


def test_one_batch_equals_accumulated_microbatches_and_two_ranks():
    """Documents of unequal length: every term is divided by the count of the whole global batch."""
    base = ["--dataloader.packing", "whole", "--training.seq_len", "96"]
    (whole,) = launch(jobs.gradients, 1, [*base, "--training.local_batch_size", "8"])
    (accumulated,) = launch(
        jobs.gradients,
        1,
        [*base, "--training.local_batch_size", "1", "--training.global_batch_size", "8"],
    )
    ranks = launch(
        jobs.gradients,
        2,
        [*base, "--training.local_batch_size", "2", "--training.global_batch_size", "8"],
    )[0]
    for name, gradient in whole.items():
        torch.testing.assert_close(accumulated[name], gradient, atol=2e-6, rtol=1e-4, msg=name)
        torch.testing.assert_close(ranks[name], gradient, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_nothing(mode):
    got = launch(jobs.train, 2, [*LAYOUTS["fsdp2"][1], "--activation_checkpoint.mode", mode])[0]
    for step, loss in single()["loss"].items():
        assert got["loss"][step] == pytest.approx(loss, abs=1e-5)


def test_chunked_loss_changes_nothing():
    for world, args in ((1, []), LAYOUTS["fsdp2"], LAYOUTS["tp2"]):
        got = launch(jobs.train, world, [*args, "--loss.num_chunks", "4"])[0]
        for step, loss in single()["loss"].items():
            assert got["loss"][step] == pytest.approx(loss, abs=1e-4)
