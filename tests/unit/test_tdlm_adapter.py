"""Configs and files of TDLM: the run's config, its trajectories, conversions, and the adapter file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.unit import test_trajectories_common as made
from tests.unit.test_tdlm_model import MASK, build, logits, trajectory
from tools import convert_to_hf as to_tool
from torchtitan_ext import backbones, models, registry
from torchtitan_ext import config as front
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.decode_options import parse_options
from torchtitan_ext.methods.tdlm.config_registry import debug
from torchtitan_ext.methods.tdlm.decode import decode
from torchtitan_ext.methods.tdlm.objective import TrajectoryDistillation
from torchtitan_ext.methods.tdlm.state_dict_adapter import (
    backbone_fingerprint,
    export_adapter,
    load_adapter,
    read_section,
)
from torchtitan_ext.trainer import default_config
from torchtitan_ext.trajectories.shards import Trajectory


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name in ("mdlm", "tdlm"):
        monkeypatch.setitem(registry.METHODS, name, f"torchtitan_ext.methods.{name}")


# --- the run's config ------------------------------------------------------------------


def parse(tmp_path: Path, section: str = "", *, data: str = "absent", flavor: str = "llada-debug", argv=()):
    path = tmp_path / "c.toml"
    path.write_text(
        f'[model]\nname = "tdlm"\nflavor = "{flavor}"\n[tdlm]\n{section}\n[dataloader]\n'
        f'dataset = "trajectories"\ndataset_path = "{data}"\n[training]\nseq_len = 32\n'
    )
    return front.parse(["--job.config_file", str(path), *argv], make_default=default_config)


def test_a_config_is_completed_built_and_saved(tmp_path):
    config = parse(tmp_path, "layers = [0, 3]\nwindow = 2\nstates = 4\nhead_dim = 6")
    spec = models.build_spec(config)
    model: Any = spec.model
    assert (model.temporal, model.window, model.head_dim, model.mask_token_id) == ((0, 3), 2, 6, 259)
    objective = models.build_objective(config)
    assert isinstance(objective, TrajectoryDistillation)
    assert (objective.states, objective.mask_id, objective.prediction) == (4, 259, "own")
    front.save(config, tmp_path / "saved.toml")
    again = front.load_toml(tmp_path / "saved.toml", make_default=default_config)
    assert again.tdlm == config.tdlm


def test_the_command_line_takes_lists_names_and_numbers(tmp_path):
    for argv, layers, window in (
        (["--tdlm.layers", "middle", "--tdlm.count", "2", "--tdlm.window", "current"], (1, 2), "current"),
        (["--tdlm.layers", "0,2", "--tdlm.window", "3"], (0, 2), 3),
    ):
        model: Any = models.build_spec(parse(tmp_path, argv=argv)).model
        assert (model.temporal, model.window) == (layers, window)


def test_bad_knobs_are_one_line_that_names_the_key(tmp_path):
    for section, words in (
        ("head_dim = 63", "tdlm.head_dim must be even"),
        ("states = 1", "tdlm.states (K) must be at least 2"),
        ("tau = 2.0", "tdlm.tau must be between 0 and 1"),
        ("layers = [9]", "layer 9 (allowed: layers 0 to 3)"),
        ('window = "all"', "window"),
    ):
        with pytest.raises(UserError) as caught:
            models.build_spec(parse(tmp_path, section))
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_debug_config_builds():
    config = debug()
    assert isinstance(config.tdlm.states, int)
    models.build_spec(config)


def test_decoding_options_can_be_words():
    for text, want in (("window=off", "off"), ("window=3", 3), ("window=current,tau=0.5", "current")):
        assert parse_options(text, decode)["window"] == want


# --- its trajectories ------------------------------------------------------------------


def made_up(tmp_path: Path, *, steps: int = 4, **backbone: Any) -> Path:
    tokenizer = default_config({"name": "ar"}).tokenizer.build(tokenizer_path="")
    rows = [
        Trajectory(i, [10 + i, 11], [20] * steps, list(range(1, steps + 1)), steps, None) for i in range(4)
    ]
    made.made_up_set(tmp_path / "set", rows, tokenizer=tokenizer, **backbone)
    return tmp_path / "set"


def objective_of(tmp_path: Path, section: str, data: Path):
    config = parse(tmp_path, section, data=str(data))
    models.build_spec(config)
    return models.build_objective(config)


def test_fitting_trajectories_are_taken(tmp_path):
    assert objective_of(tmp_path, "mask_token_id = 263\nstates = 4", made_up(tmp_path)).states == 4


@pytest.mark.parametrize(
    ("section", "backbone", "words"),
    [
        ("mask_token_id = 263\nstates = 5", {}, "[tdlm] states = 5 (K) is more than the 4 steps"),
        ("mask_token_id = 262", {}, "made with mask token 263, this run's is 262"),
        ("mask_token_id = 263", {"family": "dream"}, "was made by a dream backbone"),
    ],
)
def test_trajectories_that_do_not_fit_are_refused(tmp_path, section, backbone, words):
    with pytest.raises(UserError) as caught:
        objective_of(tmp_path, section, made_up(tmp_path, **backbone))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_other_data_is_refused(tmp_path):
    config = parse(tmp_path, argv=["--dataloader.dataset", "stdlib"])
    models.build_spec(config)
    with pytest.raises(UserError, match="learns from trajectories alone: got dataset = 'stdlib'"):
        models.build_objective(config)


# --- folders ---------------------------------------------------------------------------


def write_folder(folder: Path, flavor: str, *, seed: int = 3) -> None:
    """A Hugging Face folder of a random backbone under the family's own names."""
    size = backbones.lookup(flavor)
    config = backbones.build_config(size, attention="dense")
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.ndim == 1)
        for name, tensor in config.build().state_dict().items()
    }
    tensors = backbones.HFAdapter(config, None).to_hf(weights)
    folder.mkdir()
    sizes = {key: value.nbytes for key, value in tensors.items()}
    hf_folder.write_weights(folder, sizes, load=lambda names: {key: tensors[key] for key in names})
    hf_folder.write_json(folder / "config.json", backbones.hf_config(size))


SECTION = {"layers": [1, 2], "heads": 2, "head_dim": 4, "mask_token_id": MASK}


def outputs(path: Path) -> torch.Tensor:
    """Logits of states with their history."""
    tokens, states = trajectory()
    with torch.no_grad():
        return logits(load_model(path).model, tokens, states)


@pytest.mark.parametrize("flavor", ["llada-debug", "dream-debug"])
def test_a_backbone_becomes_tdlm_and_comes_back(flavor, tmp_path):
    """Names of LLaDA and Dream; the temporal parameters start fresh, then survive the round trip."""
    write_folder(tmp_path / "hf", flavor)
    convert_from_hf(tmp_path / "hf", tmp_path / "tdlm", name="tdlm", section=SECTION)
    plain = backbones.build_config(backbones.lookup(flavor), attention="dense").build()
    plain.init_weights()
    start = load_model(tmp_path / "tdlm").model
    plain.load_state_dict({k: v for k, v in start.state_dict().items() if ".temporal." not in k})
    tokens, _ = trajectory()
    assert torch.equal(outputs(tmp_path / "tdlm"), logits(plain, tokens))

    state = start.state_dict()
    for name in state:
        if ".temporal." in name:
            state[name].normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "tdlm", no_dist=True)
    convert_to_hf(tmp_path / "tdlm", tmp_path / "out")
    found = hf_folder.read_tensors(tmp_path / "out")
    own = {name for name in found if ".temporal." in name}
    names = ("sink", *(f"{w}.weight" for w in ("wq", "wk", "wv", "wo")))
    assert own == {f"layers.{i}.temporal.{name}" for i in (1, 2) for name in names}
    assert set(found) - own == set(hf_folder.read_tensors(tmp_path / "hf"))
    adapter = tmp_path / "temporal.safetensors"
    to_tool.main([str(tmp_path / "tdlm"), str(adapter), "--adapter"])
    assert set(load_file(adapter)) == own and adapter.stat().st_mode & 0o044
    with pytest.raises(UserError, match="exists; --overwrite replaces it"):
        to_tool.main([str(tmp_path / "tdlm"), str(adapter), "--adapter"])
    with pytest.raises(UserError, match="method 'ar' trains its whole model"):
        to_tool.main([str(tmp_path / "hf"), str(tmp_path / "x"), "--adapter"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["torchtitan_ext"]
    assert (config["name"], config["section"]["layers"]) == ("tdlm", [1, 2])
    convert_from_hf(tmp_path / "out", tmp_path / "back")
    want = outputs(tmp_path / "tdlm")
    assert torch.equal(outputs(tmp_path / "back"), want) and torch.equal(outputs(tmp_path / "out"), want)
    assert not torch.equal(want, logits(plain, tokens))


# --- the adapter file ------------------------------------------------------------------


def fresh(model, **changes: Any):
    """The same backbone with temporal modules at their start."""
    other = build(**{**SECTION, "noise": 0.0, **changes})
    own = {k: v for k, v in model.state_dict().items() if ".temporal." not in k}
    other.load_state_dict(own, strict=False)
    return other


def test_an_adapter_holds_the_temporal_parameters_and_moves_to_another_copy(tmp_path):
    model = build(**SECTION)
    path = export_adapter(model, tmp_path / "a" / "adapter.safetensors")
    assert [p.name for p in path.parent.iterdir()] == ["adapter.safetensors"]
    stored = load_file(path)
    assert set(stored) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(t.numel() for t in stored.values()) == 2 * (4 * 64 * 2 * 4 + 1)
    other = fresh(model)
    tokens, states = trajectory()
    with torch.no_grad():
        want = logits(model, tokens, states)
        assert not torch.equal(logits(other, tokens, states), want)
        load_adapter(other, path)
        assert torch.equal(logits(other, tokens, states), want)


def test_an_adapter_says_how_its_backbone_is_to_be_built(tmp_path):
    write_folder(tmp_path / "hf", "llada-debug")
    convert_from_hf(tmp_path / "hf", tmp_path / "one", name="tdlm", section=SECTION)
    trained = load_model(tmp_path / "one").model
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".temporal." in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    path = export_adapter(trained, tmp_path / "adapter.safetensors")
    convert_from_hf(tmp_path / "hf", tmp_path / "two", name="tdlm", section=read_section(path))
    again = load_model(tmp_path / "two").model
    load_adapter(again, path)
    tokens, states = trajectory()
    with torch.no_grad():
        assert torch.equal(logits(again, tokens, states), logits(trained, tokens, states))
    low = load_model(tmp_path / "two", dtype=torch.bfloat16).model
    assert backbone_fingerprint(low) == backbone_fingerprint(again)
    load_adapter(low, path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": [1, 3]}, "its layers = [1, 2], the model's is [1, 3]"),
        ({"heads": 4, "head_dim": 2}, "its heads = 2, the model's is 4"),
        ({"head_dim": 6}, "its head_dim = 4, the model's is 6"),
        ({"mask_token_id": 7}, "its mask_token_id = 200, the model's is 7"),
        ({"flavor": "dream-debug"}, "belongs to another backbone: its family is 'llada'"),
    ],
)
def test_an_adapter_of_another_model_is_refused_and_changes_nothing(changes, words, tmp_path):
    path = export_adapter(build(**SECTION), tmp_path / "adapter.safetensors")
    other = build(**{**SECTION, **changes})
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_adapter(other, path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_an_adapter_is_refused_on_other_weights_but_its_window_may_change(tmp_path):
    model = build(**SECTION)
    path = export_adapter(model, tmp_path / "adapter.safetensors")
    load_adapter(fresh(model, window="current", tau=0.5), path)
    other = fresh(model)
    with torch.no_grad():
        other.layers["2"].feed_forward.w2.weight[0, 0] += 1
    with pytest.raises(UserError, match="trained on other weights of this backbone"):
        load_adapter(other, path)


def test_files_that_are_no_adapters_are_refused(tmp_path):
    model = build(**SECTION)
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    (tmp_path / "broken").write_bytes(b"nothing")
    for name, words in (
        ("other.safetensors", "is no adapter of temporal parameters"),
        ("broken", "cannot be read as safetensors"),
        ("absent", "cannot be read as safetensors"),
    ):
        with pytest.raises(UserError, match=words):
            load_adapter(model, tmp_path / name)
    plain = backbones.build_config(backbones.lookup("llada-debug"), attention="dense").build()
    with pytest.raises(UserError, match="has no temporal modules"):
        export_adapter(plain, tmp_path / "x")


def test_an_adapter_with_a_tensor_too_few_is_refused(tmp_path):
    model = build(**SECTION)
    path = export_adapter(model, tmp_path / "adapter.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["layers.2.temporal.sink"]
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(UserError, match=r"missing layers\.2\.temporal\.sink"):
        load_adapter(model, path)
