"""Any causal backbone in, its LM head untied and the gate fresh; and back, with the gate."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.distributed import alodlm_jobs as jobs
from tests.distributed.harness import run
from torchtitan_ext import backbones, initialization
from torchtitan_ext.backbones.adapter import EMBEDDING, HEAD
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.errors import UserError

SECTION: dict[str, Any] = {"start": 1, "end": 3, "passes": 3, "block_size": 4, "mask_token_id": 260}
ARGS = ["--model.name", "alodlm", "--alodlm.start", "1", "--alodlm.end", "3", "--alodlm.passes", "3"]
GATE = ["core.gate.depth_bias", "core.gate.weight"]


def write_folder(folder, flavor: str, *, head: str) -> dict[str, torch.Tensor]:
    """A Hugging Face folder of a random backbone; ``head``: "own", "equal", "other" or "absent"."""
    size = backbones.lookup(flavor)
    config = backbones.build_config(size, attention="dense")
    model = config.build()
    initialization.key_initialisers(model, seed=3)
    model.init_weights()
    tensors = backbones.HFAdapter(config, None).to_hf(model.state_dict(), tied_head="keep")
    name = "lm_head.weight"
    if head == "absent":
        del tensors[name]
    elif head != "own":
        tensors[name] = tensors["model.embed_tokens.weight"] + float(head == "other")
    folder.mkdir()
    tensors = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
    sizes = {key: value.nbytes for key, value in tensors.items()}
    hf_folder.write_weights(folder, sizes, load=lambda names: {key: tensors[key] for key in names})
    hf_folder.write_json(folder / "config.json", backbones.hf_config(size))
    return tensors


CASES = [
    ("smollm2-debug", "absent"),
    ("qwen3-debug", "absent"),
    ("qwen3-debug", "equal"),
    ("qwen3-untied-debug", "own"),
]


@pytest.mark.parametrize(("flavor", "head"), CASES)
def test_a_backbone_becomes_alodlm_and_comes_back(flavor, head, tmp_path):
    tensors = write_folder(tmp_path / "hf", flavor, head=head)
    convert_from_hf(tmp_path / "hf", tmp_path / "alodlm", name="alodlm", section=SECTION)
    loaded = load_model(tmp_path / "alodlm")
    model: Any = loaded.model
    assert loaded.method == "alodlm" and not model.enable_weight_tying
    assert model.lm_head.weight is not model.tok_embeddings.weight
    expected_head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, expected_head)
    assert torch.equal(model.tok_embeddings.weight, tensors["model.embed_tokens.weight"])
    # The gate starts with equal masses.
    assert not model.core.gate.weight.any()
    hazards = [model.hazard(torch.zeros(1, model.config.dim), s).item() for s in (1, 2, 3)]
    assert hazards == pytest.approx([1 / 3, 1 / 2, 1])

    convert_to_hf(tmp_path / "alodlm", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["torchtitan_ext"] == {"name": "alodlm", "section": config["torchtitan_ext"]["section"]}
    assert config["torchtitan_ext"]["section"]["passes"] == 3
    exported = hf_folder.read_tensors(tmp_path / "back")
    assert set(exported) == {*tensors, "lm_head.weight", *GATE}
    for name, tensor in tensors.items():
        assert torch.equal(hf_folder.load_tensor(exported[name]), tensor), name


def test_head_and_gate_of_a_trained_model_survive_the_round_trip(tmp_path):
    """A folder made from a tied backbone; then both are changed, as training does."""
    write_folder(tmp_path / "hf", "qwen3-debug", head="absent")
    args = ["--model.flavor", "qwen3-debug", "--checkpoint.enable", "--training.steps", "2"]
    start = ["--checkpoint.initial_load_path", str(tmp_path / "hf"), "--checkpoint.initial_load_in_hf"]
    run(jobs.training, world=1, folder=str(tmp_path), args=[*ARGS, *args, *start])
    trained = tmp_path / "out" / "checkpoint" / "step-2"
    expected = load_model(trained).model.state_dict()
    assert not torch.equal(expected[HEAD], expected[EMBEDDING])
    assert expected["core.gate.weight"].any()
    convert_to_hf(trained, tmp_path / "exported")
    convert_from_hf(tmp_path / "exported", tmp_path / "again")
    for path in ("exported", "again"):
        got = load_model(tmp_path / path).model.state_dict()
        assert set(got) == set(expected)
        assert all(torch.equal(got[name], expected[name]) for name in expected), path
    # A run that starts from the export takes the gate over too.
    (tmp_path / "next").mkdir()
    start = ["--checkpoint.initial_load_path", str(tmp_path / "exported"), "--checkpoint.initial_load_in_hf"]
    args = [*ARGS, "--model.flavor", "qwen3-debug", "--checkpoint.enable", *start]
    (got,) = run(jobs.loaded_weights, world=1, folder=str(tmp_path / "next"), args=args)
    for name, value in got.items():
        assert torch.equal(value, expected[name.replace("core.layers", "layers")]), name


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_starts_from_a_tied_folder(world, tmp_path):
    """The head is the embedding's values, in a parameter of its own, however it is sharded."""
    tensors = write_folder(tmp_path / "hf", "smollm2-debug", head="absent")
    start = ["--checkpoint.initial_load_path", str(tmp_path / "hf"), "--checkpoint.initial_load_in_hf"]
    args = [*ARGS, "--checkpoint.enable", *start, "--training.local_batch_size", str(8 // world)]
    got = run(jobs.loaded_weights, world=world, folder=str(tmp_path), args=args)[0]
    assert torch.equal(got[HEAD], tensors["model.embed_tokens.weight"])
    assert torch.equal(got[EMBEDDING], tensors["model.embed_tokens.weight"])
    name = "layers.2.feed_forward.w1.weight"
    assert torch.equal(got[f"core.{name}"], tensors["model.layers.2.mlp.gate_proj.weight"])


@pytest.mark.slow
def test_a_run_starts_from_a_tied_baselines_checkpoint(tmp_path):
    (tmp_path / "ar").mkdir()
    (tmp_path / "alodlm").mkdir()
    base = ["--checkpoint.enable", "--training.steps", "2"]
    (trained,) = run(jobs.training, world=1, folder=str(tmp_path / "ar"), args=base)
    start = ["--checkpoint.initial_load_path", str(tmp_path / "ar/out/checkpoint/step-2")]
    args = [*ARGS, "--checkpoint.enable", *start]
    (got,) = run(jobs.loaded_weights, world=1, folder=str(tmp_path / "alodlm"), args=args)
    embedding = trained["weights"].get(EMBEDDING, trained["weights"].get(HEAD))
    assert torch.equal(got[HEAD], embedding) and torch.equal(got[EMBEDDING], embedding)


def test_folders_that_contradict_themselves_are_refused(tmp_path):
    write_folder(tmp_path / "other", "qwen3-debug", head="other")
    with pytest.raises(UserError, match="lm_head.weight differs from model.embed_tokens.weight") as refused:
        convert_from_hf(tmp_path / "other", tmp_path / "a", name="alodlm", section=SECTION)
    assert "\n" not in str(refused.value) and not (tmp_path / "a").exists()
    write_folder(tmp_path / "headless", "qwen3-untied-debug", head="absent")
    with pytest.raises(UserError, match="missing lm_head.weight"):
        convert_from_hf(tmp_path / "headless", tmp_path / "b", name="alodlm", section=SECTION)
