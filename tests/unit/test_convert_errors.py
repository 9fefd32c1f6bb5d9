"""What does not fit is refused with one line, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.paths import ROOT
from tests.unit.test_backbones_reference import reference_model, save_folder, small
from tests.unit.test_convert_roundtrip import add_head, debug_checkpoint, make_folder
from torchtitan_ext.backbones import HFAdapter, build_config, hf_config, lookup
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.convert import convert_from_hf, convert_to_hf
from torchtitan_ext.errors import UserError


def edit(folder: Path, change) -> None:
    """Rewrite the tensors of a single-file folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(source: Path, match: str, **options) -> None:
    target = source.parent / "step-0"
    before = sorted(path.name for path in source.parent.iterdir())
    with pytest.raises(UserError, match=match) as caught:
        convert_from_hf(source, target, **options)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in source.parent.iterdir()) == before


def test_missing_tensor(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    edit(source, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(source, r"missing model\.layers\.1\.mlp\.up_proj\.weight")


def test_unexpected_tensor(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    edit(source, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}))
    refused(source, r"unexpected model\.layers\.0\.self_attn\.q_proj\.bias")


def test_biases_that_the_config_does_not_announce(tmp_path):
    source = make_folder("qwen2_5", tmp_path / "hf")
    config = {**hf_config(small("smollm2"))}
    (source / "config.json").write_text(json.dumps(config))
    refused(source, r"unexpected model\.layers\.0\.self_attn\.k_proj\.bias")


def test_other_shape(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    edit(source, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(7, 32)}))
    refused(source, r"model\.layers\.0\.mlp\.up_proj\.weight: got \[7, 32\], expected \[48, 32\]")


def test_other_vocabulary_has_its_own_words(tmp_path):
    size = lookup("smollm2-debug")
    source = make_folder(
        "smollm2",
        tmp_path / "hf",
        **{name: getattr(size, name) for name in ("n_layers", "dim", "head_dim", "ffn_dim")},
    )
    refused(
        source,
        r"model\.embed_tokens\.weight has 40 rows, but the model's vocabulary has 264 tokens",
        flavor="smollm2-debug",
    )


def test_different_head_in_a_tied_folder(tmp_path):
    source = make_folder("qwen3", tmp_path / "hf", tied=True)
    add_head(source, scale=1.5)
    refused(source, r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word_embeddings to false")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 1e4}, r"rope_theta 10000\.0, the model 100000\.0"),
        ({"n_heads": 2, "n_kv_heads": 1, "head_dim": 32}, "n_heads 2, the model 4"),
        ({"norm_eps": 1e-6}, "norm_eps 1e-06, the model 1e-05"),
    ],
)
def test_equal_shapes_of_another_arithmetic(changes, message, tmp_path):
    size = replace(lookup("smollm2-debug"), n_layers=1)
    source = save_folder(reference_model(replace(size, **changes)), replace(size, **changes), tmp_path / "hf")
    adapter = HFAdapter(build_config(size, attention="dense"), None)
    with pytest.raises(UserError, match=message):
        adapter.check_folder(source)
    (source / "config.json").unlink()
    assert set(adapter.check_folder(source)) == set(load_file(source / "model.safetensors"))


def test_old_rotary_buffers_are_fine(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    expected = set(load_file(source / "model.safetensors"))
    edit(source, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    back = convert_to_hf(convert_from_hf(source, tmp_path / "step-0"), tmp_path / "back")
    assert set(load_file(back / "model.safetensors")) == expected


def test_pickled_weights_are_named(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refused(source, r"only pytorch_model\.bin; pickled weights are not read")


def test_no_weights_no_config_no_folder(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    (source / "model.safetensors").unlink()
    refused(source, r"holds no model\.safetensors")
    (source / "config.json").unlink()
    refused(source, r"config\.json not found")
    shutil.rmtree(source)
    with pytest.raises(UserError, match=r"hf is not a folder"):
        convert_from_hf(source, tmp_path / "step-0", flavor="smollm2-debug")


def test_cut_file(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(source, r"model\.safetensors is damaged")


def test_index_without_its_file(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    weights = source / "model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(weights), "model-00001-of-00001.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, r"model-00001-of-00001\.safetensors is missing; the index lists it")
    weights.rename(source / "model-00001-of-00001.safetensors")
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00001.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, r"lists model\.extra\.weight")


def test_unreadable_index(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    (source / "model.safetensors.index.json").write_text("[]")
    refused(source, "not a safetensors index")


def test_integer_weights(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    edit(source, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    refused(source, r"model\.norm\.weight is stored as I8")


def test_output_in_use(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    target = tmp_path / "step-0"
    debug_checkpoint(target, "smollm2-debug")
    before = sorted(path.name for path in target.iterdir())
    with pytest.raises(UserError, match=r"not empty.*--overwrite"):
        convert_from_hf(source, target)
    assert sorted(path.name for path in target.iterdir()) == before
    convert_from_hf(source, target, overwrite=True)
    with pytest.raises(UserError, match=r"hf is not empty"):
        convert_to_hf(target, source)


def test_output_inside_the_input(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    for target in (source, source / "step-0", tmp_path):
        with pytest.raises(UserError, match="must lie outside the input"):
            convert_from_hf(source, target, overwrite=True)
    assert (source / "model.safetensors").is_file()


def test_full_disk_is_noticed_before_writing(tmp_path, monkeypatch):
    source = make_folder("smollm2", tmp_path / "hf")
    checkpoint = convert_from_hf(source, tmp_path / "step-0")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(UserError, match=r"back needs 0\.05 GB, but the disk has 0\.00 GB free"):
        convert_to_hf(checkpoint, tmp_path / "back")
    with pytest.raises(UserError, match="the disk has"):
        convert_from_hf(source, tmp_path / "step-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "step-0"]


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_failure_while_writing_keeps_the_earlier_result(tmp_path, monkeypatch):
    checkpoint = convert_from_hf(make_folder("smollm2", tmp_path / "hf"), tmp_path / "step-0")
    back = convert_to_hf(checkpoint, tmp_path / "back")
    weights = (back / "model.safetensors").read_bytes()
    monkeypatch.setattr(hf_folder, "save_file", no_space)
    with pytest.raises(UserError, match=r"back was not written: .*No space left"):
        convert_to_hf(checkpoint, back)
    assert (back / "model.safetensors").read_bytes() == weights
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "step-0"]


def test_failure_inside_the_checkpoint_library_is_one_line(tmp_path, monkeypatch):
    source = make_folder("smollm2", tmp_path / "hf")
    monkeypatch.setattr(torch, "save", no_space)
    refused(source, r"step-0 was not written: .*No space left")


def test_parent_that_is_a_file(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"was not written: .*Not a directory"):
        convert_from_hf(source, tmp_path / "file" / "step-0")


def test_output_behind_a_link(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    (tmp_path / "real").mkdir()
    (tmp_path / "step-0").symlink_to(tmp_path / "real")
    for _ in range(2):
        convert_from_hf(source, tmp_path / "step-0")
    assert (tmp_path / "step-0").is_symlink() and (tmp_path / "real" / ".metadata").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "real", "step-0"]


def test_checkpoint_of_another_size(tmp_path):
    debug_checkpoint(tmp_path / "step-3", "smollm2-debug")
    for flavor, message in (
        ("qwen3-debug", r"missing layers\.0\.attention\.k_norm\.weight \(8 in all\)"),
        ("llada-debug", r"wk\.weight is \[32, 64\], the model has \[64, 64\]"),
    ):
        (tmp_path / "step-3" / "config.toml").write_text(f'[model]\nname = "ar"\nflavor = "{flavor}"\n')
        with pytest.raises(UserError, match=message):
            convert_to_hf(tmp_path / "step-3", tmp_path / "back")


def test_unknown_parameter_in_a_checkpoint(tmp_path):
    debug_checkpoint(tmp_path / "step-3", "smollm2-debug", extra={"layers.0.gate.weight": torch.ones(3)})
    with pytest.raises(UserError, match=r"unexpected layers\.0\.gate\.weight"):
        convert_to_hf(tmp_path / "step-3", tmp_path / "back")


def test_damaged_checkpoint(tmp_path):
    debug_checkpoint(tmp_path / "step-3", "smollm2-debug")
    (tmp_path / "step-3" / ".metadata").unlink()
    with pytest.raises(UserError, match=r"no whole checkpoint; step-3: it has no \.metadata"):
        convert_to_hf(tmp_path, tmp_path.parent / "elsewhere")
    with pytest.raises(UserError, match=r"step-3 cannot be loaded: it has no \.metadata"):
        convert_to_hf(tmp_path / "step-3", tmp_path / "back")


def test_a_hugging_face_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"hf is a Hugging Face folder already"):
        convert_to_hf(make_folder("smollm2", tmp_path / "hf"), tmp_path / "back")


def test_checkpoint_without_config(tmp_path):
    debug_checkpoint(tmp_path / "step-3", "smollm2-debug")
    path = tmp_path / "step-3" / "config.toml"
    for text, message in (
        ("[model]\n", "lacks"),
        ("[model", "not valid TOML"),
        (None, r"give --model\.name"),
    ):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(UserError, match=message):
            convert_to_hf(tmp_path / "step-3", tmp_path / "back")


def test_unknown_dtype_flavor_and_method(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    with pytest.raises(UserError, match=r"unknown dtype 'bf16'.*bfloat16"):
        convert_to_hf(source, tmp_path / "back", dtype="bf16")
    refused(source, r"unknown model flavor 'smollm-135M'; did you mean 'smollm2-135M'", flavor="smollm-135M")
    refused(source, r"'arr'.*ar", name="arr")


@pytest.mark.parametrize("text", ["5 elephants", "", "-1GB", "0"])
def test_sizes_that_are_none(text):
    with pytest.raises(UserError):
        hf_folder.parse_bytes(text)


@pytest.mark.parametrize("family", ["smollm2", "qwen3"])
def test_torchtitans_own_adapters_are_checked_too(family, tmp_path):
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    size = small("qwen3", tied=False)
    source = make_folder(family, tmp_path / "hf", tied=False)
    config = build_config(size, attention="dense")
    adapter, state = Qwen3StateDictAdapter(config, None), config.build().state_dict()
    if family == "qwen3":
        hf_folder.check_against(adapter, state, source)
        edit(source, lambda t: t.update({"model.layers.0.other.weight": torch.ones(1)}))
        with pytest.raises(UserError, match=r"unexpected model\.layers\.0\.other\.weight"):
            hf_folder.check_against(adapter, state, source)
    else:
        with pytest.raises(UserError, match=r"missing model\.layers\.0\.self_attn\.k_norm\.weight"):
            hf_folder.check_against(adapter, state, source)


def test_check_against_uses_the_whole_model(tmp_path):
    size = small("smollm2")
    config = build_config(size, attention="dense")
    source = make_folder("smollm2", tmp_path / "hf")
    hf_folder.check_against(HFAdapter(config, None), {}, source)
    edit(source, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"missing model\.norm\.weight"):
        hf_folder.check_against(HFAdapter(config, None), {}, source)


def test_tool_prints_one_line_and_fails(tmp_path):
    source = make_folder("smollm2", tmp_path / "hf")
    edit(source, lambda tensors: tensors.pop("model.norm.weight"))
    tool = [sys.executable, str(ROOT / "tools" / "convert_from_hf.py"), str(source), str(tmp_path / "step-0")]
    result = subprocess.run(tool, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "missing model.norm.weight" in errors[0]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "step-0").exists()


def test_save_folder_writes_what_llada_publishes(tmp_path):
    # The other tests rest on this: the folder has LLaDA's names and no others.
    source = make_folder("llada", tmp_path / "hf")
    names = set(load_file(source / "model.safetensors"))
    assert "model.transformer.blocks.1.ff_proj.weight" in names
    assert all(name.startswith("model.transformer.") for name in names)
    assert save_folder.__doc__
