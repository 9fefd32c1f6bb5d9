"""Initial values, masks, tying and placements of a backbone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torchtitan.config import ParallelismConfig
from torchtitan.protocols.module import Module

from torchtitan_ext.backbones import Backbone, build_config, lookup
from torchtitan_ext.errors import UserError


def build(flavor: str, *, seed: int = 0, **changes) -> Backbone:
    model = build_config(replace(lookup(flavor), **changes), attention="dense").build()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.init_states()
    return model


def test_initial_values():
    model = build("qwen3-debug", n_layers=8)
    values = dict(model.named_parameters())
    residual = 0.02 / (2 * 8) ** 0.5
    for name, parameter in values.items():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = residual if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")) else 0.02
            assert abs(parameter.std().item() / expected - 1) < 0.06, name
            assert abs(parameter.mean().item()) < 0.1 * expected, name


@pytest.mark.parametrize("flavor", ["qwen2_5-debug", "dream-debug"])
def test_biases_start_at_zero_and_belong_to_qkv_alone(flavor):
    biases = {name: p for name, p in build(flavor).named_parameters() if name.endswith(".bias")}
    assert {name.split(".")[-2] for name in biases} == {"wq", "wk", "wv"}
    assert len(biases) == 3 * 4
    assert all(not bias.any() for bias in biases.values())


@pytest.mark.parametrize("flavor", ["smollm2-debug", "qwen2_5-debug", "qwen3-debug", "llada-debug"])
def test_every_parameter_has_an_initialiser_of_its_own(flavor):
    model = build(flavor)
    for name, module in model.named_modules():
        own = [n for n, _ in module.named_parameters(recurse=False)]
        assert isinstance(module, Module)
        assert set(own) <= set(module._param_init or {}), name
        for parameter in own:
            full = torch.full((8, 8), 7.0)
            initialise = module._param_init[parameter]
            initialise(full)
            tied = flavor != "llada-debug" and name == "tok_embeddings"
            assert torch.equal(full, torch.full((8, 8), 7.0)) == tied
            assert not isinstance(initialise, partial) or initialise.func is torch.nn.init.normal_


@pytest.mark.parametrize(("flavor", "tied"), [("smollm2-debug", True), ("llada-debug", False)])
def test_tying(flavor, tied):
    model = build(flavor)
    assert (model.tok_embeddings.weight is model.lm_head.weight) == tied
    assert model.lm_head.weight.std() > 0.01
    # Both names are in the state dict, as torchtitan's checkpoints have them.
    assert {"tok_embeddings.weight", "lm_head.weight"} <= set(model.state_dict())


def test_tying_survives_the_meta_device():
    with torch.device("meta"):
        model = build_config(lookup("smollm2-debug"), attention="dense").build()
    model.to_empty(device="cpu")
    model.init_states()
    assert model.tok_embeddings.weight is model.lm_head.weight
    assert 0.018 < model.lm_head.weight.std() < 0.022


@torch.no_grad()
@pytest.mark.parametrize(("flavor", "sees_later"), [("qwen3-debug", False), ("dream-debug", True)])
def test_the_mask_follows_the_family(flavor, sees_later):
    model = build(flavor).eval()
    positions = torch.arange(6)[None]
    tokens = torch.arange(6)[None] + 65
    changed = tokens.clone()
    changed[0, -1] = 3
    masks = model.get_attention_masks(positions)
    first, second = model(tokens, positions, masks), model(changed, positions, masks)
    assert torch.equal(first[:, 0], second[:, 0]) != sees_later
    assert not torch.equal(first[:, -1], second[:, -1])


def test_the_mask_is_a_property_of_the_call_not_of_the_block():
    causal = build("smollm2-debug")
    bidirectional = build("smollm2-debug", attention="bidirectional")
    positions, tokens = torch.arange(6)[None], torch.arange(6)[None]
    other = bidirectional.get_attention_masks(positions)
    with torch.no_grad():
        torch.testing.assert_close(causal(tokens, positions, other), bidirectional(tokens, positions, other))


def test_gradients_reach_every_parameter():
    model = build("qwen2_5-debug", n_layers=2)
    positions, tokens = torch.arange(6)[None], torch.arange(6)[None]
    model(tokens, positions, model.get_attention_masks(positions)).square().sum().backward()
    # A key bias shifts every score of a query equally, so its gradient is zero, but it is there.
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() or name.endswith("wk.bias"), name


@pytest.mark.parametrize("enable_sp", [True, False])
@pytest.mark.parametrize("flavor", ["qwen2_5-debug", "qwen3-debug"])
def test_every_parameter_gets_a_placement(flavor, enable_sp):
    config = build_config(lookup(flavor), attention="dense")
    config.update_from_config(
        config=SimpleNamespace(parallelism=ParallelismConfig(enable_sequence_parallel=enable_sp))
    )
    model = config.build()
    for name, module in model.named_modules():
        for parameter, _ in module.named_parameters(recurse=False):
            assert parameter in module._sharding_config.state_shardings, f"{name}.{parameter}"
    for block in config.layers:
        # Adding a note for one block must not change another: no shared sub-configs.
        assert sum(block.attention is other.attention for other in config.layers) == 1


def test_degrees_that_do_not_divide_the_heads_are_refused():
    config = build_config(lookup("smollm2-135M"), attention="dense")
    with pytest.raises(ValueError, match="n_heads"):
        config.update_from_config(
            config=SimpleNamespace(parallelism=ParallelismConfig(tensor_parallel_degree=2))
        )


def test_context_parallel_with_varlen_is_refused():
    config = build_config(lookup("smollm2-debug"), attention="varlen")
    parallelism = ParallelismConfig(context_parallel_degree=2)
    with pytest.raises(UserError, match="context_parallel_degree = 2"):
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))


def test_rotary_tables_longer_than_the_context_are_refused():
    with pytest.raises(UserError, match=r"8193.*8192"):
        build_config(lookup("smollm2-135M"), attention="dense", max_seq_len=8193)
    short = build_config(lookup("smollm2-135M"), attention="dense", max_seq_len=16)
    assert short.max_seq_len == 16


def test_flops_count_matrices_and_attention():
    size = lookup("llada-debug")
    config = build_config(size, attention="dense")
    n_params, flops = config.get_nparams_and_flops(config.build(), 100)
    assert n_params == size.n_params
    matmul = size.n_params - size.vocab_size * size.dim
    assert flops == 6 * matmul + 6 * size.n_layers * size.n_heads * 2 * size.head_dim * 100


def test_layers_know_their_number():
    config = build_config(lookup("smollm2-debug"), attention="dense")
    assert [block.attention.inner_attention.layer_id for block in config.layers] == [0, 1, 2, 3]
