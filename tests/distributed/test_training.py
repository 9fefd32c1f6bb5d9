"""What a run does beside the loop: packing, empty batches, validation, compile, torchtitan's models."""

from __future__ import annotations

import math

import pytest

from tests.distributed import jobs
from tests.distributed.harness import run

VALIDATE = ["--validation.enable", "--validation.freq", "5", "--validation.steps", "3"]


def one(job, tmp_path, args, world=1, **kwargs):
    tmp_path.mkdir(exist_ok=True)
    return run(job, world=world, folder=str(tmp_path), args=args, **kwargs)[0]


@pytest.mark.parametrize("flavor", ["smollm2-debug", "qwen3-debug", "llada-debug", "dream-debug"])
def test_packed_documents_equal_the_same_documents_run_separately(flavor, tmp_path):
    (difference,) = run(jobs.packed_against_separate, world=1, folder=str(tmp_path), flavor=flavor)
    assert difference < 1e-5


def test_a_batch_without_supervised_tokens_trains_on(tmp_path):
    result = one(jobs.train_on_empty_batch, tmp_path, [])
    assert result["loss"][1] == 0.0 and result["grad_norm"][1] == 0.0
    assert math.isfinite(result["loss"][2]) and result["loss"][2] > 1


def test_one_rank_without_supervised_tokens(tmp_path):
    """Its maximum loss would be 0 / 0; the step counts the other rank's tokens alone."""
    result = one(jobs.train_on_half_empty_batch, tmp_path, ["--training.local_batch_size", "4"], world=2)
    assert all(math.isfinite(v) for row in result["rows"] for v in row[1].values())


def test_validation_is_a_mean_over_tokens_and_equal_on_two_ranks(tmp_path):
    whole = one(jobs.train, tmp_path / "a", VALIDATE)
    halves = one(jobs.train, tmp_path / "b", [*VALIDATE, "--training.local_batch_size", "4"], world=2)
    single = jobs.validation_series(whole["rows"])
    assert list(single) == [1, 5]
    for step, (loss, perplexity) in jobs.validation_series(halves["rows"]).items():
        assert loss == pytest.approx(single[step][0], abs=1e-4)
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-6)


def test_validation_over_all_of_a_small_split_with_unequal_ranks(tmp_path):
    """Three ranks share rows that do not divide: no rank waits for another, no row is lost."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "held.txt").write_text("\n".join("word " * n for n in range(5, 40)))
    args = [
        *VALIDATE,
        "--validation.steps",
        "-1",
        "--validation.dataloader.dataset",
        "text",
        "--validation.dataloader.split",
        "train",
        "--validation.dataloader.dataset_path",
        str(tmp_path / "held.txt"),
        "--validation.dataloader.txt_documents",
        "line",
        "--training.steps",
        "1",
    ]
    single = one(jobs.train, tmp_path / "a", [*args, "--training.local_batch_size", "6"])
    thirds = one(jobs.train, tmp_path / "b", [*args, "--training.local_batch_size", "2"], world=3)
    expected, got = (jobs.validation_series(r["rows"])[1][0] for r in (single, thirds))
    assert got == pytest.approx(expected, abs=1e-4)


def test_torchtitans_own_llama3_with_dense_attention(tmp_path):
    args = ["--model.name", "llama3", "--model.flavor", "debugmodel", "--training.local_batch_size"]
    short = ["--training.steps", "3"]
    whole = one(jobs.train, tmp_path / "a", [*args, "4", *short])
    halves = one(jobs.train, tmp_path / "b", [*args, "2", *short], world=2)
    tensor = one(
        jobs.train,
        tmp_path / "c",
        [*args, "4", *short, "--parallelism.tensor_parallel_degree", "2"],
        world=2,
    )
    for step, loss in whole["loss"].items():
        assert halves["loss"][step] == pytest.approx(loss, abs=1e-4)
        assert tensor["loss"][step] == pytest.approx(loss, abs=1e-4)
    assert whole["loss"][3] < whole["loss"][1]


def test_pipeline_of_two_stages_equals_one_process(tmp_path):
    args = ["--model.flavor", "qwen3-untied-debug", "--training.steps", "3"]
    pipeline = [
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--parallelism.pipeline_parallel_microbatch_size",
        "2",
    ]
    whole = one(jobs.train, tmp_path / "a", args)
    (tmp_path / "b").mkdir()
    stages = run(jobs.train, world=2, folder=str(tmp_path / "b"), args=[*args, *pipeline])
    for step, loss in whole["loss"].items():
        assert stages[1]["loss"][step] == pytest.approx(loss, abs=1e-4)  # the last stage has the loss


@pytest.mark.slow
def test_compile_changes_nothing(tmp_path):
    eager = one(jobs.train, tmp_path / "a", ["--training.local_batch_size", "4"], world=2)
    compiled = one(
        jobs.train,
        tmp_path / "b",
        ["--training.local_batch_size", "4", "--compile.enable"],
        world=2,
        timeout=500,
    )
    for step, loss in eager["loss"].items():
        assert compiled["loss"][step] == pytest.approx(loss, abs=1e-4)


def test_finite_data_ends_on_every_rank_together_and_is_saved(tmp_path):
    """Ranks that hold unequal numbers of batches stop at the same step; the last step is a checkpoint."""
    (tmp_path / "few.txt").write_text("\n".join("word " * n for n in range(5, 60)))
    args = [
        *("--dataloader.dataset", "text", "--dataloader.dataset_path", str(tmp_path / "few.txt")),
        *("--dataloader.txt_documents", "line", "--dataloader.infinite", "false"),
        *("--dataloader.num_streams", "8", "--training.local_batch_size", "3", "--training.steps", "100"),
        *("--checkpoint.enable", "--checkpoint.interval", "100"),
    ]
    first, second = run(jobs.train, world=2, folder=str(tmp_path), args=args)
    assert 3 < len(first["loss"]) < 100
    assert first["loss"] == second["loss"]
    last = max(first["loss"])
    assert (tmp_path / "out" / "checkpoint" / f"step-{last}" / ".metadata").is_file()


def test_asynchronous_checkpoints_resume(tmp_path):
    base = ["--checkpoint.enable", "--checkpoint.interval", "2", "--lr_scheduler.total_steps", "8"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    batch = ["--training.local_batch_size", "4", "--checkpoint.async_mode", "async"]
    whole = run(
        jobs.train, world=2, folder=str(tmp_path / "a"), args=[*base, *batch, "--training.steps", "8"]
    )
    run(jobs.train, world=2, folder=str(tmp_path / "b"), args=[*base, *batch, "--training.steps", "4"])
    rest = run(jobs.train, world=2, folder=str(tmp_path / "b"), args=[*base, *batch, "--training.steps", "8"])
    assert rest[0]["loss"] == {step: whole[0]["loss"][step] for step in (5, 6, 7, 8)}


def test_last_checkpoint_as_a_hugging_face_folder(tmp_path):
    from torchtitan_ext.checkpoint import hf_folder

    args = [
        *("--checkpoint.enable", "--training.steps", "2"),
        *("--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"),
    ]
    run(jobs.train, world=2, folder=str(tmp_path), args=[*args, "--training.local_batch_size", "4"])
    tensors = hf_folder.read_tensors(tmp_path / "out" / "checkpoint" / "step-2")
    assert "model.embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
    assert len(tensors) == 2 + 9 * 4


def test_a_methods_own_parameters_go_into_its_hugging_face_folder(tmp_path):
    """With a section in config.json, so that the folder alone says what the model is."""
    import torch

    from torchtitan_ext.checkpoint.load import load_model

    args = [
        *("--model.name", "t2mlr", "--t2mlr.start", "2", "--t2mlr.end", "3", "--training.steps", "2"),
        *("--checkpoint.enable", "--checkpoint.last_save_model_only", "--training.local_batch_size", "4"),
    ]
    folders = {}
    for kind, more in (("native", []), ("hf", ["--checkpoint.last_save_in_hf"])):
        (tmp_path / kind).mkdir()
        run(jobs.train, world=2, folder=str(tmp_path / kind), args=[*args, *more])
        folders[kind] = tmp_path / kind / "out" / "checkpoint" / "step-2"
    (folders["hf"] / "config.toml").unlink()
    native, folder = load_model(folders["native"]), load_model(folders["hf"])
    assert folder.method == "t2mlr" and folder.config.t2mlr.end == 3
    for name, tensor in native.model.state_dict().items():
        assert torch.equal(tensor, folder.model.state_dict()[name]), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of five steps and the same weights as a Hugging Face folder."""
    from torchtitan_ext.checkpoint.convert import convert_to_hf

    folder = tmp_path_factory.mktemp("trained")
    run(jobs.train, world=1, folder=str(folder), args=["--checkpoint.enable"])
    checkpoint = folder / "out" / "checkpoint" / "step-5"
    convert_to_hf(checkpoint, folder / "hf")
    return checkpoint, folder / "hf"


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_starts_from_a_hugging_face_folder_as_from_the_checkpoint(world, trained, tmp_path):
    checkpoint, hf = trained
    batch = ["--training.local_batch_size", str(8 // world), "--training.steps", "2", "--checkpoint.enable"]
    losses = []
    for name, initial in (("dcp", [str(checkpoint)]), ("hf", [str(hf), "--checkpoint.initial_load_in_hf"])):
        folder = tmp_path / name
        (folder / "out" / "checkpoint").mkdir(parents=True)  # an empty checkpoint folder is a fresh start
        args = [*batch, "--checkpoint.initial_load_path", *initial]
        losses.append(run(jobs.train, world=world, folder=str(folder), args=args)[0]["loss"])
    assert losses[0] == losses[1]
    assert losses[0][1] < 5  # an untrained model starts at ln(264) = 5.6


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_a_hugging_face_folder_that_does_not_fit_is_refused(fault, trained, tmp_path):
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "hf"
    shutil.copytree(trained[1], folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        name = "model.layers.9.mlp.up_proj.weight"
        tensors[name] = torch.zeros(2)
    else:
        name = "model.embed_tokens.weight"
        tensors[name] = tensors[name][:100].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    args = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path"]
    (result,) = run(jobs.refusal, world=1, folder=str(tmp_path), args=[*args, str(folder)])
    assert result["error"] and "\n" not in result["error"]
    assert name in result["error"] or "vocabulary" in result["error"], result["error"]
