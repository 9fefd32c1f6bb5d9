"""Retrofit: any causal backbone in, the recurrent parameters fresh, logits identical; and back."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run
from tests.paths import ROOT
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.errors import UserError

BAND = {"start": 2, "end": 3, "forward_depth": 4, "backward_depth": 2}
ARGS = [*("--model.name", "t2mlr", "--t2mlr.start", "2", "--t2mlr.end", "3")]
ARGS += ["--t2mlr.forward_depth", "4", "--t2mlr.backward_depth", "2"]


@pytest.fixture(scope="module", params=["smollm2-debug", "qwen2_5-debug", "qwen3-debug"])
def backbone(request, tmp_path_factory):
    """A trained baseline as a checkpoint and as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("backbone")
    args = ["--checkpoint.enable", "--training.steps", "2", "--model.flavor", request.param]
    run(jobs.train, world=1, folder=str(folder), args=args)
    checkpoint = folder / "out" / "checkpoint" / "step-2"
    convert_to_hf(checkpoint, folder / "hf")
    return request.param, checkpoint, folder / "hf"


def logits(path) -> torch.Tensor:
    loaded = load_model(path)
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).expand(2, -1)
    with torch.no_grad():
        return loaded.model(tokens, positions, loaded.model.get_attention_masks(positions))


def test_a_retrofitted_model_starts_as_its_backbone(backbone, tmp_path):
    _, _, hf = backbone
    convert_from_hf(hf, tmp_path / "t2mlr", name="t2mlr", section=BAND)
    assert load_model(tmp_path / "t2mlr").method == "t2mlr"
    assert torch.equal(logits(tmp_path / "t2mlr"), logits(hf))


def test_recurrent_parameters_survive_the_way_to_a_folder_and_back(backbone, tmp_path):
    flavor, _, hf = backbone
    args = [*ARGS, "--model.flavor", flavor, "--checkpoint.enable", "--training.steps", "2"]
    run(jobs.train, world=1, folder=str(tmp_path), args=args)
    trained = tmp_path / "out" / "checkpoint" / "step-2"
    convert_to_hf(trained, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["torchtitan_ext"]["name"] == "t2mlr"
    assert config["torchtitan_ext"]["section"]["end"] == 3
    tensors = hf_folder.read_tensors(tmp_path / "hf")
    added = {name for name in tensors if name not in hf_folder.read_tensors(hf)}
    assert added == {
        f"core.fusion.{name}"
        for name in (
            "f_current.weight",
            "f_current.bias",
            "f_recurrent.weight",
            "f_recurrent.bias",
            "w_recurrent.weight",
            "g_current",
            "g_recurrent",
        )
    }
    convert_from_hf(tmp_path / "hf", tmp_path / "back")
    expected = logits(trained)
    assert torch.equal(logits(tmp_path / "hf"), expected)
    assert torch.equal(logits(tmp_path / "back"), expected)
    assert load_model(tmp_path / "back").model.core.fusion.g_recurrent.item() != 0


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_retrofits_from_a_folder_or_from_a_baselines_checkpoint(world, backbone, tmp_path):
    """The first loss is the baseline's; the parameters that start fresh are named in the log."""
    flavor, checkpoint, hf = backbone
    batch = ["--training.local_batch_size", str(8 // world), "--training.steps", "1"]
    start = ["--model.flavor", flavor, "--checkpoint.enable", *batch, "--checkpoint.initial_load_path"]
    results = {}
    for name, args in {
        "baseline": [*start, str(checkpoint)],
        "checkpoint": [*ARGS, *start, str(checkpoint)],
        "folder": [*ARGS, *start, str(hf), "--checkpoint.initial_load_in_hf"],
    }.items():
        (tmp_path / name).mkdir()
        results[name] = run(jobs.train_logged, world=world, folder=str(tmp_path / name), args=args)[0]
    assert results["checkpoint"]["loss"] == results["folder"]["loss"] == results["baseline"]["loss"]
    assert "start fresh" in results["checkpoint"]["log"] and "g_recurrent" in results["checkpoint"]["log"]


def test_the_tool_takes_the_methods_section(backbone, tmp_path, capsys):
    sys.path.insert(0, str(ROOT / "tools"))
    import convert_from_hf as tool

    _, _, hf = backbone
    band = ["--t2mlr.start", "1", "--t2mlr.end", "4"]
    tool.main([str(hf), str(tmp_path / "out"), "--model.name", "t2mlr", *band])
    assert load_model(tmp_path / "out").model.start == 0
    with pytest.raises(UserError, match=r"\[t2mlr\] start = 0"):
        tool.main([str(hf), str(tmp_path / "none"), "--model.name", "t2mlr"])
    with pytest.raises(UserError, match=r"t2mlr\.strat"):
        tool.main([str(hf), str(tmp_path / "none"), "--model.name", "t2mlr", "--t2mlr.strat", "1"])
    with pytest.raises(UserError, match="unknown option --training.steps"):
        tool.main([str(hf), str(tmp_path / "none"), "--model.name", "t2mlr", "--training.steps", "1"])
    assert not (tmp_path / "none").exists()
