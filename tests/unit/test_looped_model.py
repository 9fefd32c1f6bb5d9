"""Looped transformers on one process: the backbone once, by hand twice, packing, causality, cost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_ext import backbones, initialization, models
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.looped import Section, model_registry
from torchtitan_ext.trainer import default_config

FLAVORS = ["smollm2-debug", "qwen2_5-debug", "qwen3-debug"]
MIDDLE = {"kind": "middle", "start": 2, "end": 3}


def build(flavor: str = "smollm2-debug", *, scale: float = 3.0, **knobs):
    """A model with keyed weights, the blocks' larger than at the start so that a pass shows."""
    spec = model_registry(flavor, section=Section(**knobs))
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    initialization.key_initialisers(model, seed=0)
    with torch.no_grad():
        model.init_weights()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layers." in name:
                parameter.mul_(scale)
    return model


def plain(flavor: str, model=None) -> torch.nn.Module:
    """The backbone, with the weights of ``model`` or its own initial ones."""
    backbone = backbones.build_config(backbones.lookup(flavor), attention="dense").build()
    initialization.key_initialisers(backbone, seed=0)
    backbone.init_weights()
    if model is not None:
        backbone.load_state_dict(model.state_dict(), strict=True)
    return backbone


def rows(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def tokens_for(positions: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, positions.shape, generator=torch.Generator().manual_seed(seed))


def logits(model, tokens, positions):
    return model(tokens, positions, model.get_attention_masks(positions))


def by_hand(backbone, tokens, positions, *, start: int, end: int, loops: int) -> torch.Tensor:
    """A plain backbone's layers in the order in which a loop runs them; the band is 1-based, inclusive."""
    masks = backbone.get_attention_masks(positions)
    count = len(backbone.layers)
    order = [*range(start - 1), *(list(range(start - 1, end)) * loops), *range(end, count)]
    h = backbone.tok_embeddings(tokens)
    for i in order:
        h = backbone.layers[str(i)](h, masks, positions)
    return backbone.lm_head(backbone.norm(h))


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("knobs", [MIDDLE, {"kind": "full"}], ids=["middle", "full"])
def test_one_loop_is_the_backbone_bit_for_bit(flavor, knobs):
    model = build(flavor, loops=1, **knobs)
    positions = rows(7, 9)
    tokens = tokens_for(positions)
    with torch.no_grad():
        assert torch.equal(logits(model, tokens, positions), logits(plain(flavor, model), tokens, positions))


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize(("knobs", "band"), [(MIDDLE, (2, 3)), ({"kind": "full"}, (1, 4))])
@pytest.mark.parametrize("loops", [2, 3])
def test_loops_are_the_layers_by_hand_with_gradient_through_all_passes(flavor, knobs, band, loops):
    model = build(flavor, loops=loops, **knobs)
    reference = plain(flavor, model)
    positions = rows(7, 9)
    tokens = tokens_for(positions)
    ours = logits(model, tokens, positions)
    theirs = by_hand(reference, tokens, positions, start=band[0], end=band[1], loops=loops)
    assert torch.equal(ours, theirs)
    assert (ours - logits(reference, tokens, positions)).abs().max() > 1e-3  # the loop does something
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[model.initial_name(name)], msg=name)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(deadline=None, max_examples=10)
def test_packed_documents_equal_separate_ones(lengths):
    model = build(loops=3, **MIDDLE)
    positions = rows(*lengths)
    tokens = tokens_for(positions)
    with torch.no_grad():
        packed = logits(model, tokens, positions)
        separate = [logits(model, piece, rows(piece.shape[1])) for piece in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), atol=1e-5, rtol=1e-5)


@given(changed=st.integers(0, 15), kind=st.sampled_from(["middle", "full"]))
@settings(deadline=None, max_examples=12)
def test_a_token_changes_nothing_before_it_nor_in_another_document(changed, kind):
    model = build(loops=3, **(MIDDLE if kind == "middle" else {"kind": kind}))
    positions = rows(6, 10)
    tokens = tokens_for(positions)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 256
    with torch.no_grad():
        difference = (logits(model, tokens, positions) - logits(model, other, positions)).abs().amax(-1)[0]
    document = range(6) if changed < 6 else range(6, 16)
    for t in range(16):
        if t < changed or t not in document:
            assert difference[t] == 0, t
    assert difference[changed] > 0


@pytest.mark.parametrize(
    "knobs", [{"loops": 3, **MIDDLE}, {"kind": "full"}, {"kind": "pause"}], ids=lambda k: k["kind"]
)
def test_starts_from_the_baselines_weights_under_its_names(knobs):
    theirs = plain("smollm2-debug").state_dict()
    ours = build(scale=1.0, **knobs).state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("knobs", [{"loops": 3, **MIDDLE}, {"kind": "full"}, {"kind": "pause"}])
def test_every_tensor_has_its_hugging_face_name(knobs):
    spec = model_registry("smollm2-debug", section=Section(**knobs))
    adapter = spec.state_dict_adapter(spec.model, None)
    state = spec.model.build().state_dict()
    back = adapter.from_hf(adapter.to_hf(state))
    assert back.keys() == state.keys()
    assert "model.layers.1.self_attn.q_proj.weight" in adapter.to_hf(state)


@pytest.mark.parametrize(
    ("knobs", "layer_passes"),
    [
        ({"loops": 1, **MIDDLE}, 4),
        ({"loops": 4, **MIDDLE}, 4 + 3 * 2),
        ({"kind": "full", "loops": 2}, 8),
        ({"kind": "full", "loops": 3}, 12),
    ],
)
def test_counted_flops_are_the_passes_that_run(knobs, layer_passes):
    """Against torch's counter, on the matrix products of the linear layers."""
    model = build(**knobs)
    positions = rows(64)
    with FlopCounterMode(display=False) as counter:
        logits(model, tokens_for(positions), positions).sum().backward()
    # mm and addmm; attention is counted by formula below.
    counted = sum(f for op, f in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    size = backbones.lookup("smollm2-debug")
    attention = 3 * layer_passes * 4 * 64 * size.n_heads * size.head_dim
    _, ours = model.config.get_nparams_and_flops(model, 64)
    assert ours - attention == pytest.approx(counted / 64, rel=0.01)


@pytest.mark.parametrize(
    ("knobs", "layer_passes"),
    [
        ({"kind": "middle", "start": 9, "end": 22, "loops": 3}, 30 + 2 * 14),
        ({"kind": "full", "loops": 2}, 60),
        ({"kind": "pause"}, 60),
    ],
)
def test_cost_of_the_papers_baselines(knobs, layer_passes):
    """L + (K - 1) D layers for a middle loop, K L for a full one (T2MLR table 5); heads aside."""
    spec = model_registry("smollm2-135M", section=Section(**knobs))
    with torch.device("meta"):
        model = spec.model.build()
    parameters, flops = spec.model.get_nparams_and_flops(model, 0)
    assert parameters == backbones.lookup("smollm2-135M").n_params
    head = 6 * 576 * 49152 * (2 if knobs["kind"] == "pause" else 1)
    per_layer = 6 * (2 * 576 * (576 + 192) + 3 * 576 * 1536 + 2 * 576)
    assert flops - head == pytest.approx(layer_passes * per_layer, rel=1e-3)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({}, ["[looped]", "start = 0", "1 <= start <= end <= 4"]),
        ({"start": 3, "end": 2}, ["start = 3, end = 2"]),
        ({"start": 2, "end": 5}, ["end = 5"]),
        ({"kind": "pause", "pause_token_id": 264}, ["pause_token_id = 264", "0 to 263"]),
    ],
)
def test_knobs_that_do_not_fit_the_backbone_are_refused(knobs, words):
    with pytest.raises(UserError) as caught:
        model_registry("smollm2-debug", section=Section(**knobs))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["loops", "pause_tokens", "lstm_layers", "lstm_hidden"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"looped.{name} must be at least 1, got 0"):
        Section(start=1, end=2, **{name: 0})


def test_knobs_that_contradict_are_refused():
    with pytest.raises(ValueError, match="belong to looped.kind = 'middle', got kind = 'full'"):
        Section(kind="full", start=1, end=4)
    with pytest.raises(ValueError, match="-1 for the last row, got -2"):
        Section(kind="pause", pause_token_id=-2)
    with pytest.raises(UserError, match="causal backbone"):
        model_registry("llada-debug", section=Section(kind="full"))


def test_pipeline_parallel_is_refused():
    config = default_config({"name": "looped"})
    config.model.flavor = "qwen3-untied-debug"
    config.looped = Section(kind="full")
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(UserError, match="pipeline_parallel_degree = 2 does not work with a recurrent core"):
        models.build_spec(config).model.update_from_config(config=config)
