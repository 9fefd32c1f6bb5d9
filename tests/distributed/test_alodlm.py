"""WeDLM and ALoDLM on several processes: the losses, gradients and weights of one."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import alodlm_jobs as jobs
from tests.distributed.harness import run

BASE = {
    "wedlm": [*("--model.name", "wedlm", "--wedlm.block_size", "8")],
    "alodlm": [
        *("--model.name", "alodlm", "--alodlm.start", "1", "--alodlm.end", "3"),
        *("--alodlm.block_size", "8", "--alodlm.passes", "3"),
    ],
}
HALF = ["--training.local_batch_size", "4"]
TENSOR = ["--parallelism.tensor_parallel_degree", "2"]
LAYOUTS = {
    "fsdp2": (2, HALF),
    "tp2": (2, TENSOR),
    "tp2_no_sp": (2, [*TENSOR, "--parallelism.enable_sequence_parallel", "false"]),
    "fsdp2_chunks": (2, [*HALF, "--loss.num_chunks", "4"]),
}
ONLY_ALODLM = {
    "fsdp2_layer": (2, [*HALF, "--alodlm.core_sharding", "layer"]),
    "fsdp2_checkpointed": (
        2,
        [*HALF, "--alodlm.checkpoint_core", "2", "--activation_checkpoint.mode", "selective"],
    ),
}
CARRY = ["--alodlm.carry_norm", "true", "--alodlm.feedback", "one_shot"]


def single_gradients(tmp_path_factory, args):
    return run(jobs.gradients, world=1, folder=str(tmp_path_factory.mktemp("single")), args=args)[0]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return {name: single_gradients(tmp_path_factory, args) for name, args in BASE.items()}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], atol=2e-5, rtol=2e-3, msg=name)


FAST = [("wedlm", "fsdp2"), ("alodlm", "fsdp2"), ("alodlm", "tp2"), ("alodlm", "tp2_no_sp")]
SLOW = [("wedlm", "tp2"), ("wedlm", "tp2_no_sp"), ("wedlm", "fsdp2_chunks"), ("alodlm", "fsdp2_chunks")]
SLOW += [("alodlm", layout) for layout in sorted(ONLY_ALODLM)]


@pytest.mark.parametrize(
    ("method", "layout"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_gradients_are_those_of_one_process(method, layout, single, tmp_path):
    """Every parameter, the gate too; the ranks hold unequal numbers of masked tokens."""
    world, args = {**LAYOUTS, **ONLY_ALODLM}[layout]
    got = run(jobs.gradients, world=world, folder=str(tmp_path), args=[*BASE[method], *args])[0]
    assert_same(got, single[method])
    if method == "alodlm":
        assert got["core.gate.weight"].norm() > 1e-3 and got["core.gate.depth_bias"][:-1].norm() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2_no_sp"])
def test_a_normed_carry_under_tensor_parallel(layout, tmp_path, tmp_path_factory):
    world, args = LAYOUTS[layout]
    expected = single_gradients(tmp_path_factory, [*BASE["alodlm"], *CARRY])
    got = run(jobs.gradients, world=world, folder=str(tmp_path), args=[*BASE["alodlm"], *CARRY, *args])[0]
    assert_same(got, expected)


@pytest.mark.slow
def test_fsdp2_with_tensor_parallel_on_four(single, tmp_path):
    got = run(jobs.gradients, world=4, folder=str(tmp_path), args=[*BASE["alodlm"], *HALF, *TENSOR])[0]
    assert_same(got, single["alodlm"])


def test_steps_are_those_of_one_process(tmp_path):
    """Several steps with accumulation: the loss and the gate's reported gradient norm."""
    results = {}
    for name, world, batch in (("one", 1, "8"), ("two", 2, "4")):
        (tmp_path / name).mkdir()
        args = [*BASE["alodlm"], "--training.local_batch_size", batch, "--training.steps", "3"]
        results[name] = run(jobs.row_keyed_training, world=world, folder=str(tmp_path / name), args=args)[0]
    one, two = results["one"], results["two"]
    for step, loss in one["loss"].items():
        assert two["loss"][step] == pytest.approx(loss, abs=2e-4)
    key = "alodlm/gate_grad_norm/mean"
    norms = [[row[key] for _, row in r["rows"] if key in row] for r in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-3) and min(norms[0]) > 0


CHUNKS = ["--loss.num_chunks", "2"]


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("alodlm", []),
        *(pytest.param(method, CHUNKS, marks=pytest.mark.slow) for method in ("alodlm", "wedlm")),
    ],
)
def test_validation_leaves_the_steps_that_follow_as_they_were(method, args, tmp_path):
    """Whatever a forward without a backward leaves in FSDP's groups, such as the norm's and the head's."""
    args = [*BASE[method], *args, *HALF, "--training.steps", "3"]
    validate = ["--validation.enable", "--validation.freq", "1", "--validation.steps", "2"]
    results = {}
    for name, more in (("plain", []), ("validated", validate)):
        (tmp_path / name).mkdir()
        results[name] = run(jobs.training, world=2, folder=str(tmp_path / name), args=[*args, *more])[0]
    plain, validated = results["plain"], results["validated"]
    assert validated["loss"] == plain["loss"] and validated["grad_norm"] == plain["grad_norm"]
    for name, weight in validated["weights"].items():
        assert torch.equal(weight, plain["weights"][name]), name
    assert any("validation" in key for _, row in validated["rows"] for key in row)


@pytest.mark.parametrize("method", sorted(BASE))
def test_resumes_bit_for_bit(method, tmp_path):
    """Corruption and exits included: they are functions of seed, step and rank."""
    save = ["--checkpoint.enable", "--checkpoint.interval", "2", "--lr_scheduler.total_steps", "4"]
    args = [*BASE[method], *save, *HALF, "--training.steps"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = run(jobs.training, world=2, folder=str(tmp_path / "a"), args=[*args, "4"])[0]
    first = run(jobs.training, world=2, folder=str(tmp_path / "b"), args=[*args, "2"])[0]
    second = run(jobs.training, world=2, folder=str(tmp_path / "b"), args=[*args, "4"])[0]
    assert first["loss"] | second["loss"] == whole["loss"]
    for name, weight in second["weights"].items():
        assert torch.equal(weight, whole["weights"][name]), name
    if method == "alodlm":
        depths = [row["alodlm/depth"] for _, row in whole["rows"] if "alodlm/depth" in row]
        assert len(set(depths)) > 1 and all(1 < depth < 3 for depth in depths)


@pytest.mark.parametrize("method", sorted(BASE))
def test_a_batch_without_masked_tokens_trains_on(method, tmp_path):
    args = [*BASE[method], *HALF, "--training.steps", "2"]
    got = run(jobs.training_without_masks, world=2, folder=str(tmp_path), args=args, ranks=(0, 1))[0]
    assert set(got["loss"].values()) == {0.0} and set(got["grad_norm"].values()) == {0.0}


def test_one_rank_without_masked_tokens_trains_on(tmp_path):
    """The other rank's tokens are then the whole batch."""
    args = [*BASE["alodlm"], *HALF, "--training.steps", "2"]
    first, second = run(jobs.training_without_masks, world=2, folder=str(tmp_path), args=args, ranks=(1,))
    assert first["loss"] == second["loss"] and first["grad_norm"] == second["grad_norm"]
    assert all(0 < norm < 100 for norm in first["grad_norm"].values())
    shares = [
        sum(row[f"alodlm/exit_{s}"] for s in (1, 2, 3)) for _, row in first["rows"] if "alodlm/exit_1" in row
    ]
    assert shares == pytest.approx([1.0, 1.0])


def test_the_core_is_gathered_once_a_step_however_many_passes(tmp_path):
    counts = {}
    for passes in ("2", "6"):
        (tmp_path / passes).mkdir()
        args = [*BASE["alodlm"], "--alodlm.passes", passes, *HALF]
        counts[passes] = run(jobs.count_collectives, world=2, folder=str(tmp_path / passes), args=args)[0]
    assert counts["2"] == counts["6"]
    # The embedding twice (tokens and gold), the prelude's block, core and coda, the head: each for the
    # forward and again for the backward.
    assert counts["6"]["all_gather"] <= 12
