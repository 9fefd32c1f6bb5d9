"""Logits equal those of transformers, through real Hugging Face folders on disk."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import torchtitan_ext  # noqa: F401 - before torchtitan
from torchtitan_ext.backbones import Backbone, BackboneSize, HFAdapter, build_config, hf_config, lookup
from torchtitan_ext.checkpoint.convert import convert_from_hf

transformers = pytest.importorskip("transformers")

LLADA_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
FAMILIES = ("smollm2", "qwen2_5", "qwen3", "llada", "dream")
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def small(family: str, **changes) -> BackboneSize:
    """A size that builds in milliseconds."""
    tiny = {
        "n_layers": 2,
        "dim": 32,
        "head_dim": 16 if family == "qwen3" else 8,
        "ffn_dim": 48,
        "context": 64,
    }
    return replace(lookup(f"{family}-debug"), **{**tiny, "vocab_size": 40, **changes})


def reference_model(size: BackboneSize, *, seed: int = 0):
    """The transformers model with the same arithmetic, every parameter random (norms and biases too)."""
    stand_in = {"llada": "smollm2", "dream": "qwen2_5"}.get(size.family, size.family)
    config = hf_config(replace(size, family=stand_in))
    architecture = getattr(transformers, config["architectures"][0])
    config_class = architecture.config_class
    model = architecture(config_class.from_dict({**config, "attn_implementation": "sdpa"})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def save_folder(model, size: BackboneSize, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """The model as the folder its family publishes."""
    # A copy: casting would round the rotary buffer of the reference too.
    model = copy.deepcopy(model).to(dtype)
    if size.family not in ("llada", "dream"):
        model.save_pretrained(folder)
        return folder
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if size.tied:
        del tensors["lm_head.weight"]
    if size.family == "llada":
        tensors = {llada_name(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(size)))
    return folder


def llada_name(name: str) -> str:
    """LLaDA's name of a Llama tensor, written down apart from the package's map."""
    prefix, _, rest = name.partition("layers.")
    if not rest:
        return {
            "model.embed_tokens.weight": "model.transformer.wte.weight",
            "model.norm.weight": "model.transformer.ln_f.weight",
            "lm_head.weight": "model.transformer.ff_out.weight",
        }[name]
    layer, _, part = rest.partition(".")
    assert prefix == "model."
    return f"model.transformer.blocks.{layer}.{LLADA_PARTS[part.removesuffix('.weight')]}.weight"


def build_loaded(size: BackboneSize, checkpoint: Path) -> Backbone:
    """A backbone with the weights of a checkpoint, on one process without a process group."""
    model = build_config(size, attention="dense").build().eval()
    state_dict = model.state_dict()
    dcp.load(state_dict, checkpoint_id=checkpoint, no_dist=True)
    return model


@torch.no_grad()
def logits(model: Backbone, tokens_BL: torch.Tensor, positions_BL: torch.Tensor) -> torch.Tensor:
    return model(tokens_BL, positions_BL, model.get_attention_masks(positions_BL))


@torch.no_grad()
def reference_logits(model, size: BackboneSize, tokens_BL: torch.Tensor) -> torch.Tensor:
    if size.attention == "causal":
        return model(tokens_BL).logits
    batch, length = tokens_BL.shape
    return model(tokens_BL, attention_mask=torch.zeros(batch, 1, length, length)).logits


def sample(size: BackboneSize, *, batch: int = 2, length: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(size.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(length).expand(batch, length)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, tied, tmp_path):
    size = small(family, tied=tied)
    reference = reference_model(size)
    folder = save_folder(reference, size, tmp_path / "hf")
    checkpoint = convert_from_hf(folder, tmp_path / "step-0", flavor="hf")
    model = build_loaded(size, checkpoint)
    tokens, positions = sample(size)
    expected = reference_logits(reference, size, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(model, tokens, positions), expected, **TOLERANCE)


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_logits_equal_transformers_for_any_heads(data, tmp_path_factory):
    family = data.draw(st.sampled_from(("smollm2", "qwen2_5", "qwen3")))
    kv, group = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    heads = kv * group
    changes = {"n_heads": heads, "n_kv_heads": kv, "dim": heads * 8, "tied": data.draw(st.booleans())}
    size = small(family, n_layers=data.draw(st.integers(1, 3)), norm_eps=1e-3, rope_theta=500.0, **changes)
    tmp_path = tmp_path_factory.mktemp("heads")
    reference = reference_model(size)
    folder = save_folder(reference, size, tmp_path / "hf")
    model = build_loaded(size, convert_from_hf(folder, tmp_path / "step-0"))
    tokens, positions = sample(size, length=data.draw(st.integers(1, 20)))
    expected = reference_logits(reference, size, tokens)
    torch.testing.assert_close(logits(model, tokens, positions), expected, **TOLERANCE)


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "dream"])
def test_packed_documents_equal_separate_ones(family):
    size = small(family)
    model = build_config(size, attention="dense").build().eval()
    model.init_states()
    tokens, _ = sample(size, batch=1, length=12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = logits(model, tokens, positions)
    parts = [logits(model, part, torch.arange(part.shape[1])[None]) for part in tokens.split([5, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(parts, dim=1), **TOLERANCE)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llada"])
def test_logits_equal_when_torchtitan_loads_the_folder_itself(family, tied, tmp_path):
    size = small(family, tied=tied)
    reference = reference_model(size)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    # Stored in half the width: loading widens the values.
    folder = save_folder(reference, size, tmp_path / "hf", dtype=torch.bfloat16)
    config = build_config(size, attention="dense")
    model, adapter = config.build().eval(), HFAdapter(config, str(folder))
    hf_state_dict = adapter.to_hf(model.state_dict())
    dcp.load(hf_state_dict, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    model.load_state_dict(adapter.from_hf(hf_state_dict))
    tokens, positions = sample(size)
    expected = reference_logits(reference, size, tokens)
    torch.testing.assert_close(logits(model, tokens, positions), expected, **TOLERANCE)
