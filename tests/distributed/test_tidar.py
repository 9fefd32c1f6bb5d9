"""TiDAR and block diffusion on several processes: the losses and gradients of one."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run

BASE = ["--model.name", "tidar", "--tidar.block_size", "4", "--training.seq_len", "48"]
LAYOUTS = {
    # Rows of unequal documents are spread over ranks and microbatches: each term keeps its own count.
    "accumulated": (1, ["--training.local_batch_size", "2", "--training.global_batch_size", "8"]),
    "fsdp2": (2, ["--training.local_batch_size", "4"]),
    "hsdp": (
        4,
        [
            *("--training.local_batch_size", "2", "--parallelism.data_parallel_replicate_degree", "2"),
            *("--parallelism.data_parallel_shard_degree", "2"),
        ],
    ),
    "tp2": (2, ["--parallelism.tensor_parallel_degree", "2"]),
    "tp2_no_sp": (
        2,
        ["--parallelism.tensor_parallel_degree", "2", "--parallelism.enable_sequence_parallel", "false"],
    ),
    "tp2_chunked": (2, ["--parallelism.tensor_parallel_degree", "2", "--loss.num_chunks", "4"]),
    "fsdp2_chunked": (2, ["--training.local_batch_size", "4", "--loss.num_chunks", "4"]),
    "fsdp2_selective": (
        2,
        ["--training.local_batch_size", "4", "--activation_checkpoint.mode", "selective"],
    ),
    "fsdp2_full": (2, ["--training.local_batch_size", "4", "--activation_checkpoint.mode", "full"]),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    (gradients,) = run(jobs.gradients, world=1, folder=str(tmp_path_factory.mktemp("single")), args=BASE)
    return gradients


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_gradients_are_those_of_one_process(layout, single, tmp_path):
    world, args = LAYOUTS[layout]
    got = run(jobs.gradients, world=world, folder=str(tmp_path), args=[*BASE, *args])[0]
    assert got.keys() == single.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, single[name], atol=2e-5, rtol=2e-3, msg=name)


@pytest.mark.parametrize(
    "args",
    [
        [*BASE, "--tidar.corruption", "random"],
        [
            *("--model.name", "block_diffusion", "--block_diffusion.block_size", "4"),
            *("--training.seq_len", "48"),
        ],
    ],
    ids=["tidar_random", "block_diffusion"],
)
def test_resume_is_bit_exact_corruption_included(args, tmp_path):
    save = ["--checkpoint.enable", "--checkpoint.interval", "3", "--lr_scheduler.total_steps", "6"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    args = [*args, *save, "--training.local_batch_size", "4"]
    whole = run(jobs.train, world=2, folder=folders[0], args=[*args, "--training.steps", "6"])[0]
    first = run(jobs.train, world=2, folder=folders[1], args=[*args, "--training.steps", "3"])[0]
    second = run(jobs.train, world=2, folder=folders[1], args=[*args, "--training.steps", "6"])[0]
    assert first["loss"] | second["loss"] == whole["loss"]


def test_logs_both_terms_and_counts_each_data_token_once(tmp_path):
    result = run(jobs.train, world=2, folder=str(tmp_path), args=[*BASE, "--training.local_batch_size", "4"])[
        0
    ]
    for _, row in result["rows"]:
        if "tidar/ar_loss" in row:
            mean = (row["tidar/ar_loss"] + row["tidar/diffusion_loss"]) / 2
            assert row["loss_metrics/global_avg_loss"] == pytest.approx(mean, rel=1e-5)
    steps = [(step, row["n_tokens_seen"]) for step, row in result["rows"] if "n_tokens_seen" in row]
    assert steps and all(seen == step * 8 * 48 for step, seen in steps)


def test_validation_logs_both_terms_the_same_on_any_number_of_ranks(tmp_path):
    results = {}
    for world, batch in ((1, "8"), (2, "4")):
        folder = tmp_path / str(world)
        folder.mkdir()
        args = [
            *(*BASE, "--training.steps", "1", "--training.local_batch_size", batch),
            *("--validator.enable", "--validator.freq", "1", "--validator.steps", "2"),
        ]
        rows = run(jobs.train, world=world, folder=str(folder), args=args)[0]["rows"]
        results[world] = {
            name: value
            for _, row in rows
            for name, value in row.items()
            if name.startswith("validation_metrics/") and "loss" in name
        }
    one = results[1]
    terms = [one[f"validation_metrics/tidar/{term}_loss"] for term in ("ar", "diffusion")]
    assert one["validation_metrics/loss"] == pytest.approx(sum(terms) / 2, rel=1e-5)
    assert results[2] == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_compile_changes_nothing(tmp_path):
    results = {}
    for name, extra in (("eager", []), ("compiled", ["--compile.enable"])):
        folder = tmp_path / name
        folder.mkdir()
        args = [*BASE, *extra, "--training.local_batch_size", "4"]
        results[name] = run(jobs.train, world=2, folder=str(folder), args=args, timeout=500)[0]
    for step, loss in results["eager"]["loss"].items():
        assert results["compiled"]["loss"][step] == pytest.approx(loss, abs=1e-4)


def refused(folder, args) -> str:
    result = run(jobs.refusal, world=1, folder=str(folder), args=args)[0]
    assert result["left"] == []
    return result["error"] or ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["--tidar.mask_token_id", "65"],
            ["[tidar] mask_token_id = 65", "'<0x41>'", "nearest free id is 260"],
        ),
        (["--tidar.mask_token_id", "264"], ["264", "vocabulary", "0 to 263"]),
        (["--tidar.block_size", "0"], ["tidar.block_size", "at least 1", "0"]),
        (["--tidar.alpha", "-1"], ["tidar.alpha", "at least 0", "-1"]),
        (["--tidar.alpha", "nan"], ["tidar.alpha", "finite", "nan"]),
        (["--tidar.mask_layout", "blok"], ["mask_layout", "blok", "last_block"]),
        (["--model.flavor", "llada-debug"], ["causal", "llada-debug"]),
    ],
    ids=lambda value: "_".join(value)[:40] if isinstance(value, list) else None,
)
def test_bad_input_is_refused_with_one_line(args, words, tmp_path):
    error = refused(tmp_path, [*BASE, *args])
    assert "\n" not in error
    for word in words:
        assert word in error, error


def test_pipeline_and_context_parallel_are_refused(tmp_path):
    for name, key in (("pp", "pipeline_parallel_degree"), ("cp", "context_parallel_degree")):
        folder = tmp_path / name
        folder.mkdir()
        result = run(jobs.refusal, world=2, folder=str(folder), args=[*BASE, f"--parallelism.{key}", "2"])[0]
        assert key in result["error"] and "allowed: 1" in result["error"]
