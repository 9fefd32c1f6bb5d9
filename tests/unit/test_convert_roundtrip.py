"""Hugging Face folder -> checkpoint -> Hugging Face folder, on disk."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.unit.test_backbones_reference import FAMILIES, reference_model, save_folder, small
from tests.unit.test_tokenizer_kinds import write_ranks
from tools import convert_from_hf as from_tool
from tools import convert_to_hf as to_tool
from torchtitan_ext.backbones import HFAdapter, build_config, hf_config, lookup, size_from_folder
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.convert import ModelChoice, convert_from_hf, convert_to_hf, hf_choice
from torchtitan_ext.checkpoint.load import load_model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        merged.update(load_file(file))
    return merged


def assert_same_bytes(first: Path, second: Path) -> None:
    a, b = tensors_of(first), tensors_of(second)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def make_folder(family: str, folder: Path, *, dtype: torch.dtype = torch.float32, **changes) -> Path:
    size = small(family, **changes)
    return save_folder(reference_model(size), size, folder, dtype=dtype)


def add_head(folder: Path, *, scale: float = 1.0) -> None:
    """An LM head in a tied folder, as the smaller Qwen3 files have."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def debug_checkpoint(folder: Path, flavor: str, *, extra: dict | None = None) -> dict[str, torch.Tensor]:
    """A checkpoint as training writes it, with optimizer state."""
    model = build_config(lookup(flavor), attention="dense").build()
    model.init_states()
    state = dict(model.state_dict())
    moments = {f"optimizer.state.{name}.exp_avg": torch.ones_like(tensor) for name, tensor in state.items()}
    dcp.save({**state, **moments, "train_state.step": torch.tensor(3), **(extra or {})}, checkpoint_id=folder)
    (folder / "config.toml").write_text(f'[model]\nname = "ar"\nflavor = "{flavor}"\n[training]\nsteps = 3\n')
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_and_key_comes_back(family, tied, dtype, tmp_path):
    source = make_folder(family, tmp_path / "hf", dtype=dtype, tied=tied)
    checkpoint = convert_from_hf(source, tmp_path / "step-0")
    assert_same_bytes(source, convert_to_hf(checkpoint, tmp_path / "back"))
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["model_type"]
        == hf_config(small(family))["model_type"]
    )
    assert size_from_folder(tmp_path / "back") == size_from_folder(source)


def test_sharded_source_and_sharded_result(tmp_path):
    size = small("qwen3", tied=False)
    source = tmp_path / "hf"
    reference_model(size).save_pretrained(source, max_shard_size="12KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    checkpoint = convert_from_hf(source, tmp_path / "step-0")
    back = convert_to_hf(checkpoint, tmp_path / "back", max_shard_bytes=20_000)
    files = sorted(back.glob("*.safetensors"))
    assert 2 < len(files) < len(list(source.glob("*.safetensors")))
    assert_same_bytes(source, back)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors_of(source))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(source).values())
    for name, file in index["weight_map"].items():
        assert name in load_file(back / file)
    assert all(file.stat().st_size < 20_000 + 3_000 or len(load_file(file)) == 1 for file in files)


def test_transformers_loads_the_result(tmp_path):
    transformers = pytest.importorskip("transformers")
    size = small("qwen2_5")
    reference = reference_model(size)
    checkpoint = convert_from_hf(save_folder(reference, size, tmp_path / "hf"), tmp_path / "step-0")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        convert_to_hf(checkpoint, tmp_path / "back")
    ).eval()
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize("has_head", [True, False])
def test_equal_head_of_a_tied_folder_is_restored_as_it_was(has_head, tmp_path):
    source = make_folder("qwen3", tmp_path / "hf", tied=True)
    if has_head:
        add_head(source)
    checkpoint = convert_from_hf(source, tmp_path / "step-0")
    back = convert_to_hf(checkpoint, tmp_path / "back")
    assert ("lm_head.weight" in tensors_of(back)) == has_head
    assert_same_bytes(source, back)


def test_checkpoint_has_the_models_names_config_and_assets(tmp_path):
    source = make_folder("llada", tmp_path / "hf")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "modeling_llada.py"):
        (source / name).write_text(name)
    (source / "README.md").write_text("card")
    checkpoint = convert_from_hf(source, tmp_path / "step-0")
    config = build_config(size_from_folder(source), attention="dense")
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert set(stored) == set(config.build().state_dict())
    section = tomllib.loads((checkpoint / "config.toml").read_text())["model"]
    assert section == {"name": "ar", "flavor": "hf", "hf_assets_path": "hf_assets"}
    assets = {path.name for path in (checkpoint / "hf_assets").iterdir()}
    copied = {
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "modeling_llada.py",
    }
    assert assets == copied | {"hf_keys.json"}
    assert json.loads((checkpoint / "hf_assets" / "hf_keys.json").read_text()) == sorted(tensors_of(source))
    back = convert_to_hf(checkpoint, tmp_path / "back")
    assert {path.name for path in back.iterdir()} == copied | {"model.safetensors", "conversion.json"}


def test_a_tokenizers_files_in_folders_of_their_own_go_along(tmp_path):
    """Named chat templates, and the rank file where Meta's folders have it."""
    source = make_folder("smollm2", tmp_path / "hf")
    for folder in ("additional_chat_templates", "original"):
        (source / folder).mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    write_ranks(source / "original" / "tokenizer.model")
    (source / "original" / "consolidated.00.pth").write_text("weights")
    checkpoint = convert_from_hf(source, tmp_path / "step-0")
    back = convert_to_hf(checkpoint, tmp_path / "back")
    for folder in (checkpoint / "hf_assets", back):
        assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "T"
        assert not (folder / "original" / "consolidated.00.pth").exists()
    for folder in (source, checkpoint, back):
        assert load_model(folder).tokenizer.core.name == "tiktoken:llama3"


def test_training_checkpoint_exports_its_model_only(tmp_path):
    state = debug_checkpoint(tmp_path / "step-3", "qwen3-debug")
    back = convert_to_hf(tmp_path / "step-3", tmp_path / "back")
    exported = HFAdapter(build_config(lookup("qwen3-debug"), attention="dense"), None).to_hf(state)
    written = tensors_of(back)
    assert written.keys() == exported.keys() and "lm_head.weight" not in written
    assert all(torch.equal(written[name], exported[name]) for name in exported)
    assert size_from_folder(back) == lookup("qwen3-debug")


@pytest.mark.parametrize(
    "config", [hf_config(lookup("qwen3-1.7B")), {"model_type": "gpt2"}], ids=["qwen3", "gpt2"]
)
def test_config_json_of_a_borrowed_tokenizer_is_not_exported(config, tmp_path):
    debug_checkpoint(tmp_path / "step-3", "smollm2-debug")
    assets = tmp_path / "step-3" / "hf_assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(config))
    (assets / "hf_keys.json").write_text(json.dumps(["lm_head.weight", "model.other.weight"]))
    assert size_from_folder(convert_to_hf(tmp_path / "step-3", tmp_path / "back")) == lookup("smollm2-debug")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype(name, tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    checkpoint = convert_from_hf(source, tmp_path / "step-0")
    to_tool.main([str(checkpoint), str(tmp_path / "back"), "--dtype", name])
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    for key, tensor in after.items():
        assert torch.equal(tensor, before[key].to(getattr(torch, name))), key
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == name


def test_newest_whole_step_is_taken(tmp_path):
    run = tmp_path / "run"
    for step in (2, 10, 11):
        debug_checkpoint(run / "checkpoint" / f"step-{step}", "smollm2-debug")
    newest = next((run / "checkpoint" / "step-11").glob("*.distcp"))
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    expected = convert_to_hf(run / "checkpoint" / "step-10", tmp_path / "ten")
    assert_same_bytes(expected, convert_to_hf(run / "checkpoint", tmp_path / "newest"))
    to_tool.main([str(run), str(tmp_path / "of-run")])
    assert_same_bytes(expected, tmp_path / "of-run")


def test_checkpoint_without_config_takes_the_choice_from_the_command_line(tmp_path):
    debug_checkpoint(tmp_path / "step-3", "dream-debug")
    (tmp_path / "step-3" / "config.toml").unlink()
    to_tool.main([str(tmp_path / "step-3"), str(tmp_path / "back"), "--model.flavor", "dream-debug"])
    assert size_from_folder(tmp_path / "back") == lookup("dream-debug")
    assert ModelChoice(name="ar", flavor="hf") != ModelChoice(name="ar", flavor="dream-debug")


def test_command_line_round_trip(tmp_path, capsys):
    source = tmp_path / "hf"
    size = replace(lookup("smollm2-debug"), n_layers=2)
    save_folder(reference_model(size), size, source)
    from_tool.main([str(source), str(tmp_path / "step-0")])
    to_tool.main([str(tmp_path / "step-0"), str(tmp_path / "back"), "--max-shard-size", "50KB"])
    assert_same_bytes(source, tmp_path / "back")
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {tmp_path / 'step-0'}",
        f"wrote {tmp_path / 'back'}",
    ]


def test_earlier_results_are_replaced_and_files_are_readable(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    for _ in range(2):
        checkpoint = convert_from_hf(source, tmp_path / "step-0")
        back = convert_to_hf(checkpoint, tmp_path / "back")
    umask = os.umask(0)
    os.umask(umask)
    for path in [*checkpoint.rglob("*"), *back.rglob("*")]:
        if path.is_file():
            assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask, path
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "step-0", "back"}


def test_shard_planning_keeps_order_and_limit():
    sizes = {"a": 4, "b": 4, "c": 9, "d": 1, "e": 8}
    assert hf_folder.plan_shards(sizes, max_shard_bytes=9) == [["a", "b"], ["c"], ["d", "e"]]
    assert hf_folder.plan_shards(sizes, max_shard_bytes=2) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert hf_folder.plan_shards(sizes, max_shard_bytes=26) == [list(sizes)]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("5GB", 5 * 10**9), ("200 mb", 2 * 10**8), ("1.5KB", 1500), ("7", 7)]
)
def test_sizes_in_words(text, nbytes):
    assert hf_folder.parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("flavor", "method"),
    [("llada-8B", "mdlm"), ("dream-7B", "mdlm"), ("qwen3-8B", "ar"), ("llada-debug", "ar")],
)
def test_a_folder_that_does_not_say_is_taken_by_its_attention(flavor, method, tmp_path):
    """A model that attends in both directions is decoded by denoising, if it names its mask token."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(lookup(flavor))))
    assert hf_choice(tmp_path).name == method
    assert hf_choice(tmp_path, flavor=flavor).name == method
