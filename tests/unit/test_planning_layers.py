"""Steps of deep models from shallow ones, larger batches from smaller ones, and what a step counts."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchtitan_ext  # noqa: F401
from torchtitan_ext import models
from torchtitan_ext.planning import layers, share, step, tracker
from torchtitan_ext.planning.cluster import largest_batch
from torchtitan_ext.trainer import default_config

SECTIONS = {
    "ar": {},
    "looped": {"start": 2, "end": 3, "loops": 2},
    "t2mlr": {"start": 2, "end": 3, "forward_depth": 3, "backward_depth": 1},
    "alodlm": {"start": 1, "end": 3, "passes": 2},
    "tdlm": {"states": 2, "heads": 2, "head_dim": 6},
    "tidar": {"block_size": 8},
    "wedlm": {"block_size": 8},
    "mdlm": {},
}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def prepared(method, *, batch=2, seq_len=32, checkpointing="selective", chunks=1):
    config = default_config({"name": method})
    config.model.flavor = "llada-debug" if method in ("tdlm", "mdlm") else "smollm2-debug"
    if method == "tdlm":
        config.dataloader.dataset, config.dataloader.dataset_path = "trajectories", "nowhere"
    config.training.local_batch_size, config.training.seq_len = batch, seq_len
    config.activation_checkpoint.mode, config.loss.num_chunks = checkpointing, chunks
    for key, value in SECTIONS[method].items():
        setattr(getattr(config, method), key, value)
    spec = models.build_spec(config)
    config.model_spec = spec
    config.loss.global_vocab_size = spec.model.vocab_size
    return config, spec


def deeper(model, depth):
    """A model config with ``depth`` blocks of each kind; TDLM's alternate."""
    model = copy.deepcopy(model)
    if getattr(model, "temporal", None) is not None:
        plain, special = (model.layers[i] for i in (model.temporal[0] - 1, model.temporal[0]))
        model.layers = [plain] * depth + [special, plain] * depth
        model.temporal = tuple(range(depth, 3 * depth, 2))
    elif hasattr(model, "start"):
        model.layers = [model.layers[0]] * (3 * depth)
        model.start, model.end = depth, 2 * depth
        if hasattr(model.core, "end"):
            model.core.end = model.end
    else:
        model.layers = [model.layers[0]] * depth
    model.layers = [copy.deepcopy(layer) for layer in model.layers]
    model.size = dataclasses.replace(model.size, n_layers=len(model.layers))
    return model


def totals_of(config, spec, model, *, whole=False, world=4):
    def measure(own):
        return step.measure(
            config, dataclasses.replace(spec, model=own), world=world, stand_in="flex", accumulates=True
        )

    with step.fake_world(world):
        if not whole:
            return layers.totals(model, measure)
        kinds = layers.kinds_of(model)
        return layers._measured(model, kinds, [len(kind) for kind in kinds], measure)


@pytest.mark.parametrize(
    ("method", "depth"),
    [
        ("ar", 6),
        *(pytest.param(m, 5, marks=pytest.mark.slow) for m in ("looped", "t2mlr", "alodlm", "tdlm", "tidar")),
    ],
)
def test_depth_is_linear(method, depth):
    config, spec = prepared(method)
    model = deeper(spec.model, depth)
    assert max(map(len, layers.kinds_of(model))) > 4
    guessed, whole = totals_of(config, spec, model), totals_of(config, spec, model, whole=True)
    for name in layers.COUNTED:
        assert getattr(guessed, name) == getattr(whole, name), name
    assert guessed.volumes == whole.volumes
    # Within a kind the fullest moment may be one operation earlier or later.
    assert sum(guessed.peak().values()) == pytest.approx(sum(whole.peak().values()), rel=5e-3)
    assert set(guessed.memory) == set(whole.memory)


@pytest.mark.parametrize(
    "method", ["ar", *(pytest.param(m, marks=pytest.mark.slow) for m in ("tidar", "alodlm", "tdlm"))]
)
def test_what_grows_is_proportional_to_the_batch(method):
    found = {}
    for batch in (4, 12):
        config, spec = prepared(method, batch=batch, seq_len=64)
        found[batch] = totals_of(config, spec, layers.with_layers(spec.model, [0, 1, 2, 3]))
    whole = sum(found[12].peak().values())
    held = found[4].peak()
    grown = sum((3 if label in tracker.GROWING else 1) * nbytes for label, nbytes in held.items())
    # Random corruption does not hide exactly three times as many tokens.
    assert grown == pytest.approx(whole, rel=0.01 if method == "ar" else 0.03)
    assert largest_batch(found[4], 4, capacity=int(whole * 1.03)) == 12


def test_counts_of_a_step():
    config, spec = prepared("ar", checkpointing="none")
    found = totals_of(config, spec, spec.model)
    with torch.device("meta"):
        model = spec.model.build()
    tokens = 2 * 32
    matrices = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    assert found.block_flops == 6 * tokens * matrices
    assert found.head_flops == 6 * tokens * model.lm_head.weight.numel()
    size = spec.model.size
    # Padded to FlexAttention's blocks of 128; the backward computes the scores once more.
    assert found.attention_flops == 14 * 2 * size.n_layers * size.n_heads * size.head_dim * 128**2
    recomputed = totals_of(*prepared("ar", checkpointing="full"), spec.model)
    assert recomputed.block_flops == 8 * tokens * matrices
    assert recomputed.peak()[tracker.ACTIVATIONS] < found.peak()[tracker.ACTIVATIONS]
    assert recomputed.volumes == found.volumes


def test_nothing_but_states_is_held_at_the_update():
    """DTensor's own sums over shapes, of whole parameters, are no memory."""
    config, spec = prepared("ar", chunks=2)
    found = totals_of(config, spec, spec.model, world=64)
    held = found.memory["update",]
    states = held[tracker.PARAMETERS] + held[tracker.GRADIENTS] + held[tracker.OPTIMIZER]
    assert held[tracker.BUFFERS] > 0
    assert sum(held.values()) - held[tracker.BUFFERS] < 1.2 * states


def test_measuring_changes_neither_config_nor_spec():
    config, spec = prepared("tidar")
    before = repr((config, spec.model))
    totals_of(config, spec, layers.with_layers(spec.model, [0]))
    assert repr((config, spec.model)) == before


def test_kinds_and_kept_layers():
    _, spec = prepared("alodlm")
    assert layers.kinds_of(spec.model) == [[0], [1, 2], [3]]
    model = deeper(spec.model, 6)
    smaller = layers.with_layers(model, [0, 5, 6, 7, 11, 12, 17])
    assert (smaller.start, smaller.end, smaller.core.end, smaller.size.n_layers) == (2, 5, 5, 7)
    _, spec = prepared("tdlm")
    model = deeper(spec.model, 4)
    assert layers.kinds_of(model) == [[0, 1, 2, 3], [4, 6, 8, 10], [5, 7, 9, 11]]
    smaller = layers.with_layers(model, [0, 3, 4, 5, 10, 11])
    assert smaller.temporal == (2, 4)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ar", lambda side: side * (side + 1) / 2 / side**2),
        ("mdlm", lambda side: 1.0),
        # Clean to clean causal, masked to earlier clean blocks, masked to its own block.
        ("tidar", lambda side: (side * (side + 1) + side) / (2 * side) ** 2),
    ],
)
@pytest.mark.parametrize("side", [3, 16, 32])
def test_share_of_blocks_that_are_computed(method, expected, side):
    config, spec = prepared(method, seq_len=128 * side, batch=3)
    with torch.device("meta"):
        model = spec.model.build()
    assert share.computed_share(config, model) == pytest.approx(expected(side))


def test_operations_on_tensors_of_another_mode_are_not_counted():
    """DTensor runs an operation once on whole tensors to learn its shapes; in place it gives nothing back."""
    mine, other = FakeTensorMode(), FakeTensorMode()
    with mine:
        counted = torch.ones(4, 4)
    with other:
        foreign = torch.ones(64, 64)
    watched = tracker.StepTracker(fake=mine)
    with watched:
        torch._foreach_mul_([foreign], 2.0)
        assert not watched.work
        torch._foreach_mul_([counted], 2.0)
    assert watched.work["step"].operations == 1 and watched.work["step"].traffic == 4 * 16
