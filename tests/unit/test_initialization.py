"""Initial weights keyed by seed and name."""

from __future__ import annotations

import pytest
import torch

from torchtitan_ext import backbones, initialization


def build(flavor: str, seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):  # as the trainer does; elsewhere the constructors draw numbers too
        model = backbones.build_config(backbones.lookup(flavor), attention="dense").build()
    model.to_empty(device="cpu")
    initialization.key_initialisers(model, seed=seed)
    with torch.no_grad():
        model.init_weights()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_same_seed_same_weights_whatever_was_drawn_before():
    torch.manual_seed(1)
    first = build("qwen2_5-debug", 0)
    torch.manual_seed(2)
    torch.rand(100)
    second = build("qwen2_5-debug", 0)
    other = build("qwen2_5-debug", 1)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        constant = tensor.unique().numel() == 1  # norms and biases
        assert constant or not torch.equal(tensor, other[name]), name


def test_layers_differ_and_the_global_generator_is_untouched():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    weights = build("smollm2-debug", 0)
    assert torch.equal(torch.rand(3), expected)
    name = "layers.{}.feed_forward.w1.weight"
    assert not torch.equal(weights[name.format(0)], weights[name.format(1)])
    assert weights[name.format(0)].std() == pytest.approx(0.02, rel=0.05)


def test_residual_outputs_start_smaller():
    weights = build("smollm2-debug", 0)
    assert weights["layers.0.attention.wo.weight"].std() == pytest.approx(0.02 / 8**0.5, rel=0.05)


def test_a_module_without_initialisers_is_refused():
    from torchtitan.models.common.linear import Linear

    layer = Linear.Config(in_features=2, out_features=2).build()
    with pytest.raises(ValueError, match="no param_init"):
        initialization.key_initialisers(layer, seed=0)


def test_seeds_are_stable():
    """A change here would change every run's weights."""
    assert initialization.seed_from(0, "layers.0.attention.wo.weight") == 1103814027839880327
    assert initialization.seed_from(1, 2) != initialization.seed_from(12)
    assert 0 <= initialization.seed_from("x") < 2**63
