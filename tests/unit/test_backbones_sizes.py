"""Sizes, parameter counts, and config.json in both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchtitan_ext  # noqa: F401 - before torchtitan
from torchtitan_ext.backbones import (
    SIZES,
    BackboneSize,
    build_config,
    hf_config,
    lookup,
    same_arithmetic,
    size_for,
    size_from_folder,
    size_from_hf,
)
from torchtitan_ext.backbones.sizes import differences
from torchtitan_ext.errors import UserError

PUBLISHED_PARAMETERS = {
    "smollm2-135M": 134_515_008,
    "smollm2-360M": 361_821_120,
    "smollm2-1.7B": 1_711_376_384,
    "qwen2_5-1.5B": 1_543_714_304,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "llada-8B": 8_015_581_184,
    "dream-7B": 7_615_616_512,
}


@pytest.mark.parametrize("flavor", SIZES)
def test_every_size_builds_without_storage(flavor):
    size = lookup(flavor)
    config = build_config(size, attention="dense", max_seq_len=8)
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    assert sum(parameter.numel() for parameter in model.parameters()) == size.n_params
    assert PUBLISHED_PARAMETERS.get(flavor, size.n_params) == size.n_params


def test_every_published_size_is_there():
    assert set(PUBLISHED_PARAMETERS) <= set(SIZES)


@pytest.mark.parametrize("flavor", SIZES)
def test_transformers_counts_the_same_parameters(flavor):
    transformers = pytest.importorskip("transformers")
    size = lookup(flavor)
    if size.dim % size.n_heads and size.family == "smollm2":
        pytest.skip("transformers refuses a Llama whose heads do not divide its width")
    stand_in = {"llada": "smollm2", "dream": "qwen2_5"}.get(size.family, size.family)
    config = hf_config(replace(size, family=stand_in))
    architecture = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = architecture(architecture.config_class.from_dict(config))
    assert sum(parameter.numel() for parameter in model.parameters()) == size.n_params


def test_debug_sizes_keep_what_is_special_about_a_family():
    assert lookup("qwen3-debug").head_dim != lookup("qwen3-debug").dim // lookup("qwen3-debug").n_heads
    assert lookup("qwen2_5-debug").qkv_bias and lookup("dream-debug").qkv_bias
    assert lookup("qwen3-debug").qk_norm
    assert lookup("llada-debug").n_kv_heads == lookup("llada-debug").n_heads
    for name in ("smollm2", "qwen2_5", "qwen3", "dream"):
        assert lookup(f"{name}-debug").n_kv_heads < lookup(f"{name}-debug").n_heads
    for size in (size for flavor, size in SIZES.items() if flavor.endswith("-debug")):
        assert size.vocab_size >= 260 and size.vocab_size % 4 == 0 and size.context == 2048


def test_unknown_flavor_names_the_nearest():
    with pytest.raises(UserError, match=r"'smollm2-135m'; did you mean 'smollm2-135M'\?.*qwen3-8B"):
        lookup("smollm2-135m")


@pytest.mark.parametrize("flavor", SIZES)
def test_config_json_round_trip(flavor):
    assert size_from_hf(hf_config(lookup(flavor))) == lookup(flavor)


@st.composite
def sizes(draw) -> BackboneSize:
    family = draw(st.sampled_from(["smollm2", "qwen2_5", "qwen3", "llada", "dream"]))
    kv, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 64))
    dim = kv * group * head_dim if family == "llada" else draw(st.integers(1, 512))
    return replace(
        lookup(f"{family}-debug"),
        n_layers=draw(st.integers(1, 99)),
        n_heads=kv * group,
        n_kv_heads=kv,
        head_dim=head_dim,
        dim=dim,
        ffn_dim=draw(st.integers(1, 999)),
        vocab_size=draw(st.integers(1, 9999)),
        rope_theta=float(draw(st.integers(100, 10**7))),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6, 1e-3])),
        tied=draw(st.booleans()),
        context=draw(st.integers(1, 10**6)),
        eos_token_id=draw(st.one_of(st.none(), st.integers(0, 50))),
        mask_token_id=draw(st.integers(0, 50)),
    )


@settings(deadline=None, max_examples=50)
@given(size=sizes())
def test_any_size_survives_config_json(size):
    assert size_from_hf(hf_config(size)) == size


def test_newer_config_json_spells_rope_as_parameters():
    config = hf_config(lookup("qwen3-8B"))
    del config["rope_theta"], config["rope_scaling"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    assert size_from_hf(config) == lookup("qwen3-8B")


def test_several_eos_tokens_keep_the_first():
    config = {**hf_config(lookup("qwen3-8B")), "eos_token_id": [151645, 151643]}
    assert size_from_hf(config).eos_token_id == 151645


@pytest.mark.parametrize(
    ("flavor", "changes", "message"),
    [
        ("qwen3-8B", {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'; did you mean 'qwen3'"),
        ("qwen3-8B", {"num_experts": 8}, "num_experts = 8; experts are not supported"),
        ("qwen3-8B", {"attention_bias": True}, "attention_bias = True; only False"),
        ("qwen3-8B", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; only 'silu'"),
        ("qwen3-8B", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        (
            "smollm2-135M",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling of type 'linear'",
        ),
        ("smollm2-135M", {"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters of type 'llama3'"),
        ("smollm2-135M", {"mlp_bias": True}, "mlp_bias = True"),
        ("smollm2-135M", {"attention_bias": True}, "attention_bias = True"),
        ("smollm2-135M", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("smollm2-135M", {"num_hidden_layers": "30"}, "'num_hidden_layers' must be a whole number, got '30'"),
        ("qwen2_5-1.5B", {"attention_bias": False}, "attention_bias = False; only True"),
        (
            "qwen2_5-1.5B",
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21},
            "sliding window of 4096",
        ),
        ("qwen2_5-1.5B", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llada-8B", {"block_type": "sequential"}, "block_type = 'sequential'; only 'llama'"),
        ("llada-8B", {"include_qkv_bias": True}, "include_qkv_bias = True"),
        ("llada-8B", {"activation_type": "swiglu"}, "activation_type = 'swiglu'"),
    ],
)
def test_what_cannot_be_computed_is_refused(flavor, changes, message):
    with pytest.raises(UserError, match=message):
        size_from_hf({**hf_config(lookup(flavor)), **changes})


def test_unused_sliding_window_is_fine():
    changes = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 21}
    assert size_from_hf({**hf_config(lookup("qwen2_5-1.5B")), **changes}) == lookup("qwen2_5-1.5B")


def test_missing_key_is_named():
    config = hf_config(lookup("qwen3-8B"))
    del config["intermediate_size"]
    with pytest.raises(UserError, match=r"config\.json lacks 'intermediate_size'"):
        size_from_hf(config)


@pytest.mark.parametrize("change", [{"n_heads": 3}, {"head_dim": 7}, {"n_layers": 0}])
def test_impossible_sizes_are_refused(change):
    with pytest.raises(UserError, match=next(iter(change))):
        replace(lookup("qwen3-debug"), **change)


def test_folder_errors_name_the_file(tmp_path):
    with pytest.raises(UserError, match=r"config\.json not found"):
        size_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        size_from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UserError, match=rf"{tmp_path}.*unknown config.json model_type 'mamba'"):
        size_from_folder(tmp_path)


def test_flavor_hf_needs_a_folder():
    assert size_for("dream-7B") == lookup("dream-7B")
    with pytest.raises(UserError, match="hf_assets_path"):
        size_for("hf")


def test_same_arithmetic_ignores_tokens_and_context_only():
    size = lookup("smollm2-135M")
    assert same_arithmetic(size, replace(size, context=2048, eos_token_id=2))
    assert same_arithmetic(size, replace(size, norm_eps=9.999999747378752e-06))
    assert not same_arithmetic(size, replace(size, rope_theta=1e4))
    assert differences(size, replace(size, rope_theta=1e4, tied=False)) == ["rope_theta", "tied"]
