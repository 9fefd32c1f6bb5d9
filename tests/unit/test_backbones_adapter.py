"""Renaming between our names and those of a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchtitan_ext  # noqa: F401 - before torchtitan
from torchtitan_ext.backbones import HFAdapter, build_config, lookup
from torchtitan_ext.backbones.adapter import model_shapes
from torchtitan_ext.backbones.key_maps import hf_names, is_ignorable
from torchtitan_ext.errors import UserError

LLADA_BLOCK = (
    "attn_norm",
    "ff_norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "attn_out",
    "ff_proj",
    "up_proj",
    "ff_out",
)
LLADA_FIRST_BLOCK = {f"model.transformer.blocks.0.{name}.weight" for name in LLADA_BLOCK}


class WithGate(HFAdapter):
    """A method that adds one parameter to each block."""

    allow_missing = ("layers.*.gate.weight",)


def adapter_of(flavor: str, *, cls: type[HFAdapter] = HFAdapter, **changes) -> HFAdapter:
    return cls(build_config(replace(lookup(flavor), **changes), attention="dense"), None)


def fake_state(adapter: HFAdapter) -> dict[str, object]:
    return {name: object() for name in model_shapes(adapter.model_config)}


@settings(deadline=None, max_examples=20)
@given(
    family=st.sampled_from(["smollm2", "qwen2_5", "qwen3", "llada", "dream"]),
    n_layers=st.integers(1, 12),
    tied=st.booleans(),
)
def test_names_are_one_to_one_with_the_model(family, n_layers, tied):
    size = replace(lookup(f"{family}-debug"), n_layers=n_layers, tied=tied)
    names = hf_names(size)
    assert len(set(names.values())) == len(names)
    assert set(names) == set(model_shapes(build_config(size, attention="dense", max_seq_len=4)))


@pytest.mark.parametrize(
    "flavor", ["smollm2-debug", "qwen2_5-debug", "qwen3-debug", "llada-debug", "dream-debug"]
)
def test_there_and_back(flavor):
    adapter = adapter_of(flavor)
    state = fake_state(adapter)
    if adapter.size.tied:
        state["lm_head.weight"] = state["tok_embeddings.weight"]
    restored = adapter.from_hf(adapter.to_hf(state))
    assert restored.keys() == state.keys()
    assert all(restored[name] is state[name] for name in state)


def test_llada_names():
    names = adapter_of("llada-debug").names
    assert {name for name in names.values() if ".blocks.0." in name} == LLADA_FIRST_BLOCK
    assert names["layers.3.feed_forward.w1.weight"] == "model.transformer.blocks.3.ff_proj.weight"
    assert names["layers.3.feed_forward.w2.weight"] == "model.transformer.blocks.3.ff_out.weight"
    assert names["layers.3.feed_forward.w3.weight"] == "model.transformer.blocks.3.up_proj.weight"
    roots = {name for name in names.values() if ".blocks." not in name}
    assert roots == {f"model.transformer.{name}.weight" for name in ("wte", "ln_f", "ff_out")}


def test_tied_head_is_written_only_on_request():
    adapter = adapter_of("qwen3-debug")
    state = fake_state(adapter)
    assert "lm_head.weight" not in adapter.to_hf(state)
    assert adapter.to_hf(state, tied_head="keep")["lm_head.weight"] is state["lm_head.weight"]
    untied = adapter_of("qwen3-debug", tied=False)
    assert "lm_head.weight" in untied.to_hf(fake_state(untied))


def test_missing_and_unexpected_are_listed():
    adapter = adapter_of("smollm2-debug")
    theirs = adapter.to_hf(fake_state(adapter))
    del theirs["model.norm.weight"]
    theirs["model.layers.0.self_attn.q_proj.bias"] = object()
    message = r"missing model\.norm\.weight; unexpected model\.layers\.0\.self_attn\.q_proj\.bias"
    with pytest.raises(UserError, match=message):
        adapter.from_hf(theirs)


def test_a_layer_too_many_is_unexpected():
    theirs = adapter_of("smollm2-debug", n_layers=5)
    tensors = theirs.to_hf(fake_state(theirs))
    with pytest.raises(UserError, match=r"unexpected model\.layers\.4\..* and 1 more"):
        adapter_of("smollm2-debug").from_hf(tensors)


def test_names_without_a_counterpart_are_refused():
    adapter = adapter_of("smollm2-debug")
    with pytest.raises(UserError, match=r"no Hugging Face name for layers\.0\.gate\.weight"):
        adapter.to_hf({"layers.0.gate.weight": object()})


def test_parameters_a_method_adds():
    adapter = adapter_of("smollm2-debug", cls=WithGate)
    state = {**fake_state(adapter), "layers.0.gate.weight": object()}
    theirs = adapter.to_hf(state)
    assert "layers.0.gate.weight" not in theirs
    restored = adapter.from_hf(theirs)
    assert "layers.0.gate.weight" not in restored
    exported = adapter.to_hf(state, added="keep")
    assert adapter.from_hf(exported)["layers.0.gate.weight"] is state["layers.0.gate.weight"]


def test_a_pipeline_stage_asks_for_its_own_part():
    adapter = adapter_of("llada-debug")
    stage = {name: t for name, t in fake_state(adapter).items() if name.startswith("layers.0.")}
    assert adapter.from_hf(adapter.to_hf(stage)) == stage


def test_old_rotary_buffers_are_ignored():
    adapter = adapter_of("smollm2-debug")
    theirs = adapter.to_hf(fake_state(adapter))
    theirs["model.layers.0.self_attn.rotary_emb.inv_freq"] = object()
    assert len(adapter.from_hf(theirs)) == len(adapter.names)
    assert not is_ignorable("model.layers.0.self_attn.q_proj.weight")


def test_sharded_tensors_are_only_renamed(tmp_path):
    from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        adapter = adapter_of("qwen2_5-debug")
        state = {
            name: distribute_tensor(tensor, mesh)
            for name, tensor in adapter.model_config.build().state_dict().items()
        }
        restored = adapter.from_hf(adapter.to_hf(state))
        assert all(isinstance(tensor, DTensor) for tensor in restored.values())
        same = [name for name in state if restored[name] is state[name]]
        # The tied head comes back as the embedding.
        assert set(state) - set(same) == {"lm_head.weight"}
    finally:
        torch.distributed.destroy_process_group()


def test_shard_numbers_follow_the_source_folder(tmp_path):
    config = build_config(lookup("smollm2-debug"), attention="dense")
    names = [name for name in hf_names(lookup("smollm2-debug")).values() if name != "lm_head.weight"]
    weight_map = {name: f"model-0000{1 + ('layers' in name)}-of-00002.safetensors" for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    numbers = HFAdapter(config, str(tmp_path)).fqn_to_index_mapping
    assert numbers is not None and set(numbers) == set(names)
    assert numbers["model.norm.weight"] == 1 and numbers["model.layers.0.self_attn.q_proj.weight"] == 2
    # Files of another model say nothing about this one.
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors"}})
    )
    assert HFAdapter(config, str(tmp_path)).fqn_to_index_mapping is None


def test_quantised_reading_is_refused(tmp_path):
    with pytest.raises(UserError, match="initial_load_in_hf_quantized"):
        adapter_of("smollm2-debug").get_hf_storage_reader(str(tmp_path), from_quantized=True)
