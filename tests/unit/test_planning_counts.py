"""Parameters and FLOPs by part against the built model and the trainer's own total."""

from __future__ import annotations

import pytest
import torch

import torchtitan_ext  # noqa: F401
from torchtitan_ext import models
from torchtitan_ext.planning import counts
from torchtitan_ext.registry import METHODS
from torchtitan_ext.trainer import default_config

MODELS = {
    "ar": {},
    "mdlm": {},
    "tidar": {"block_size": 4},
    "tidar_longer_block": {"block_size": 64},
    "block_diffusion": {"block_size": 16},
    "wedlm": {"block_size": 8},
    "looped": {"start": 2, "end": 3, "loops": 5},
    "looped_full": {"kind": "full", "loops": 3},
    "looped_pause": {"kind": "pause", "pause_tokens": 2},
    "looped_lstm": {"kind": "lstm", "lstm_layers": 2, "lstm_hidden": 12},
    "t2mlr": {"start": 2, "end": 3, "forward_depth": 7, "backward_depth": 3},
    "t2mlr_all_gradient": {"start": 1, "end": 4, "forward_depth": 3, "backward_depth": 3},
    "t2mlr_no_gradient": {"start": 2, "end": 2, "forward_depth": 5, "backward_depth": 0},
    "alodlm": {"start": 1, "end": 3, "passes": 4, "block_size": 8},
    "alodlm_one_pass": {"start": 0, "end": 4, "passes": 1, "block_size": 64},
    "tdlm": {"layers": "dispersed", "states": 5, "heads": 2, "head_dim": 6},
    "tdlm_last": {"layers": [3], "states": 2},
    "llama3": {},
    "qwen3": {},
}
"""Case -> keys of the method's section."""


def built(case, flavor=None):
    method = next(
        name for name in (*METHODS, "llama3", "qwen3") if case == name or case.startswith(f"{name}_")
    )
    config = default_config({"name": method})
    flavors = {"mdlm": "llada-debug", "tdlm": "llada-debug", "llama3": "debugmodel", "qwen3": "debugmodel"}
    config.model.flavor = flavor or flavors.get(method, "smollm2-debug")
    for key, value in MODELS[case].items():
        assert hasattr(getattr(config, method), key)
        setattr(getattr(config, method), key, value)
    model_config = models.build_spec(config).model
    with torch.device("meta"):
        return method, model_config, model_config.build()


def test_every_method_has_a_case():
    assert set(METHODS) <= {case for case in MODELS}


@pytest.mark.parametrize("case", sorted(MODELS))
@pytest.mark.parametrize("seq_len", [1, 48])
def test_parts_sum_to_what_the_trainer_counts(case, seq_len):
    method, config, model = built(case)
    total_parameters, total_flops = config.get_nparams_and_flops(model, seq_len)
    assert sum(counts.parameters(model).values()) == total_parameters
    parts = counts.flops(method, config, model, seq_len=seq_len)
    assert sum(parts.values()) == total_flops
    assert all(count >= 0 for count in parts.values())


def test_parts_of_a_looped_model_are_those_of_its_blocks():
    _, config, model = built("alodlm")
    parts = counts.parameters(model)
    with torch.device("meta"):
        one = sum(p.numel() for p in config.layers[0].build().parameters())
    size = config.size
    assert parts == {
        counts.EMBEDDING: size.vocab_size * size.dim,
        counts.BLOCKS: one,
        counts.CORE: 2 * one,
        counts.CODA: one,
        counts.NORM: size.dim,
        counts.HEAD: size.vocab_size * size.dim,
        counts.ADDED: size.dim + 4,
    }


def test_a_tied_head_counts_once_and_a_frozen_backbone_is_not_trained():
    _, config, model = built("ar")
    parts = counts.parameters(model)
    assert counts.EMBEDDING not in parts and parts[counts.HEAD] == config.size.vocab_size * config.size.dim
    _, _, model = built("tdlm")
    assert counts.trainable(model) == counts.parameters(model)[counts.ADDED] > 0


def test_attention_is_what_grows_with_the_sequence():
    for case in ("ar", "t2mlr", "tdlm", "alodlm"):
        method, config, model = built(case)
        short, long = (counts.flops(method, config, model, seq_len=n) for n in (100, 300))
        grown = {part for part in short if short[part] != long[part]}
        assert grown == {counts.ATTENTION}
