"""The theorems of TDLM: identity at the start, cold start, parallel = sequential, a frozen backbone."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_ext import backbones
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.tdlm import Section, model_registry, temporal
from torchtitan_ext.methods.tdlm.config import complete, temporal_layers
from torchtitan_ext.methods.tdlm.decode import memory_of
from torchtitan_ext.methods.tdlm.model import TDLM

MASK = 200
FLAVORS = ["llada-debug", "dream-debug"]
PROMPT = 3


def build(flavor: str = "llada-debug", *, noise: float = 0.3, **knobs) -> TDLM:
    """A model whose every temporal matrix has an effect: W_O and the sink would start at 0."""
    knobs = {"heads": 2, "head_dim": 6, "mask_token_id": MASK, **knobs}
    model = model_registry(flavor, section=Section(**knobs)).model.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_weights()
        for name, parameter in model.named_parameters():
            if ".temporal." in name:
                # Narrow queries and keys, so that no state takes all the weight.
                std = noise if name.endswith(("wo.weight", "sink")) else 0.3 if "wv" in name else 0.04
                parameter.normal_(std=std, generator=generator)
            elif parameter.ndim == 2:
                parameter.normal_(std=0.15, generator=generator)
    return model


def plain(model: TDLM, flavor: str) -> torch.nn.Module:
    """The backbone with the same weights."""
    backbone = backbones.build_config(backbones.lookup(flavor), attention="dense").build()
    backbone.init_weights()
    weights = {k: v for k, v in model.state_dict().items() if ".temporal." not in k}
    backbone.load_state_dict(weights, strict=True)
    return backbone


def trajectory(*, batch: int = 2, response: int = 6, states: int = 4, seed: int = 0):
    """Tokens [N, L] of sampled states with their :class:`~temporal.States`, and the reveal steps."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, MASK, (batch, PROMPT + response), generator=generator)
    order = torch.stack([torch.randperm(response, generator=generator) + 1 for _ in range(batch)])
    reveal = torch.cat([torch.zeros(batch, PROMPT, dtype=torch.long), order], dim=1)
    steps = temporal.sample_steps([response] * batch, states=states, generator=generator)
    masked = temporal.masked_states(reveal, steps)[:, :-1]
    shown = torch.where(masked, MASK, tokens[:, None])
    revealed = temporal.revealed_counts(reveal, masked)
    return shown.flatten(0, 1), temporal.States(masked.flatten(0, 1), revealed.flatten(), states)


def logits(model, tokens: torch.Tensor, temporal=None) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    own = {} if temporal is None else {"temporal": temporal}
    return model(tokens, positions, model.get_attention_masks(positions), **own)


@torch.no_grad()
def sequential(model, tokens: torch.Tensor, states: temporal.States, *, window=None) -> torch.Tensor:
    """The states one forward after the other, as decoding runs them; logits as the parallel forward's."""
    shown, masked = (x.unflatten(0, (-1, states.count)) for x in (tokens, states.masked_NL))
    memory = memory_of(model, window=window)
    memory.begin(masked[:, 0])
    outputs = []
    for i in range(states.count):
        if i:
            rows, positions = (masked[:, i - 1] & ~masked[:, i]).nonzero(as_tuple=True)
            memory.revealed(rows.tolist(), positions.tolist())
        outputs.append(logits(model, shown[:, i], memory))
    return torch.stack(outputs, dim=1).flatten(0, 1)


# --- Proposition 1 ---------------------------------------------------------------------


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("window", ["full", "current", 2])
def test_starts_as_its_backbone_with_any_history(flavor, window):
    model = build(flavor, noise=0.0, window=window)
    tokens, states = trajectory()
    want = logits(plain(model, flavor), tokens)
    assert torch.equal(logits(model, tokens, states), want)
    assert torch.equal(logits(model, tokens), want)
    shown = want.unflatten(0, (-1, states.count))
    # One state at a time: other shapes, so the kernels may round otherwise; the twin has the same.
    memory = memory_of(model)
    memory.begin(states.masked_NL.unflatten(0, (-1, states.count))[:, 0])
    first = tokens.unflatten(0, (-1, states.count))[:, 0]
    for _ in range(3):
        assert torch.equal(logits(model, first, memory), logits(plain(model, flavor), first))
    torch.testing.assert_close(sequential(model, tokens, states), shown.flatten(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_the_first_step_of_a_request_is_the_backbones(flavor):
    model = build(flavor)
    tokens, states = trajectory()
    backbone = plain(model, flavor)
    together = logits(model, tokens, states).unflatten(0, (-1, states.count))
    want = logits(backbone, tokens).unflatten(0, (-1, states.count))
    assert torch.equal(together[:, 0], want[:, 0])
    assert (together[:, 1:] - want[:, 1:]).abs().amax(dim=(-2, -1)).min() > 1e-3
    memory = memory_of(model)
    memory.begin(states.masked_NL.unflatten(0, (-1, states.count))[:, 0])
    first = tokens.unflatten(0, (-1, states.count))[:, 0]
    assert torch.equal(logits(model, first, memory), logits(backbone, first))
    assert (logits(model, first, memory) - logits(backbone, first)).abs().max() > 1e-3


def test_the_current_only_window_keeps_the_gate():
    """Paper table 2: without any history its correction is not zero."""
    model = build(window="current")
    tokens, states = trajectory()
    got, want = logits(model, tokens, states), logits(plain(model, "llada-debug"), tokens)
    difference = (got - want).abs().amax(-1).unflatten(0, (-1, states.count))
    assert difference[:, 0].max() > 1e-3


# --- Proposition 2 ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flavor", "shift"), [("llada-debug", "literal"), ("dream-debug", "literal"), ("dream-debug", "moved")]
)
@pytest.mark.parametrize("window", ["full", "current", 1, 2])
def test_parallel_states_equal_the_sequential_ones(flavor, window, shift):
    """In every layer: all of them have a temporal module."""
    model = build(flavor, layers=[0, 1, 2, 3], window=window, shift=shift)
    tokens, states = trajectory(batch=3, response=9, states=5)
    inner: dict[str, list[torch.Tensor]] = {}
    for name, layer in model.layers.items():
        layer.register_forward_hook(lambda _m, _a, out, name=name: inner.setdefault(name, []).append(out))
    with torch.no_grad():
        parallel = logits(model, tokens, states)
    one_by_one = sequential(model, tokens, states)
    torch.testing.assert_close(parallel, one_by_one, atol=1e-5, rtol=1e-5)
    for together, *steps in inner.values():
        torch.testing.assert_close(together, torch.stack(steps, dim=1).flatten(0, 1), atol=1e-5, rtol=1e-5)


@given(
    response=st.integers(2, 9),
    data=st.data(),
    window=st.sampled_from(["full", 1, 3]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=15)
def test_parallel_equals_sequential_for_any_trajectory(response, data, window, seed):
    model = build(window=window)
    tokens, states = trajectory(response=response, states=data.draw(st.integers(2, response)), seed=seed)
    with torch.no_grad():
        parallel = logits(model, tokens, states)
    torch.testing.assert_close(parallel, sequential(model, tokens, states), atol=1e-5, rtol=1e-5)


def by_definition(module, h_LD, past, r: int, masked, *, window="full"):
    """Eq. 2 and 7 to 10 for one state, position by position and head by head; ``past``: [(h, r), ...]."""
    out = h_LD.clone()
    heads, width = module.heads, module.wq.weight.shape[0] // module.heads
    frequencies = [10000 ** (-2 * u / width) for u in range(width // 2)]

    def turned(vector, r):
        new = vector.clone()
        for u, w in enumerate(frequencies):
            c, s, v = math.cos(r * w), math.sin(r * w), u + width // 2
            new[u], new[v] = c * vector[u] - s * vector[v], s * vector[u] + c * vector[v]
        return new

    for p in masked:
        remembered = past if window == "full" else past[-window:]
        z = []
        for a in range(heads):
            rows = slice(a * width, (a + 1) * width)
            q = turned(module.wq.weight[rows] @ h_LD[p], r)
            keys = [turned(module.wk.weight[rows] @ h[p], rj) for h, rj in remembered]
            weights = [math.exp(float(q @ k) / math.sqrt(width)) for k in keys]
            total = math.exp(float(module.sink)) + sum(weights)
            values = [module.wv.weight[rows] @ h[p] for h, _ in remembered]
            z.append(sum((w / total * v for w, v in zip(weights, values, strict=True)), torch.zeros(width)))
        out[p] += module.wo.weight @ torch.cat(z)
    return out


@pytest.mark.parametrize("window", ["full", 2])
@torch.no_grad()
def test_a_module_is_the_papers_formula(window):
    model = build(window=window)
    block = model.layers["1"]
    tokens, states = trajectory(batch=1, response=5, states=4)
    calls = []
    block.temporal.register_forward_hook(lambda _m, args, out: calls.append((args[0], out)))
    logits(model, tokens, states)
    ((before, after),) = calls
    past = []
    for i in range(states.count):
        r = int(states.revealed_N[i])
        masked = states.masked_NL[i].nonzero()[:, 0].tolist()
        want = by_definition(block.temporal, before[i], past, r, masked, window=window)
        torch.testing.assert_close(after[i], want, atol=1e-5, rtol=1e-4)
        past.append((before[i], r))


@torch.no_grad()
def test_a_module_stands_between_attention_and_feed_forward():
    model = build()
    block = model.layers["1"]
    seen = {}
    for name, module in (("block", block), ("attention", block.attention), ("temporal", block.temporal)):
        module.register_forward_hook(lambda _m, args, out, name=name: seen.update({name: (args[0], out)}))
    tokens, states = trajectory()
    logits(model, tokens, states)
    x, out = seen["block"]
    before, after = seen["temporal"]
    assert torch.equal(before, x + seen["attention"][1]) and not torch.equal(before, after)
    assert torch.equal(out, after + block.feed_forward(block.ffn_norm(after)))


def test_a_moved_correction_acts_on_the_positions_that_predict_masks():
    model = build("dream-debug", shift="moved", layers=[3])
    tokens, states = trajectory()
    changed = (logits(model, tokens, states) - logits(plain(model, "dream-debug"), tokens)).abs().amax(
        -1
    ) > 1e-5
    # In the last layer a correction stays where it is.
    history = torch.arange(states.count).repeat(2)[:, None] > 0
    expected = torch.zeros_like(changed)
    expected[:, :-1] = states.masked_NL[:, 1:]
    assert torch.equal(changed, expected & history)


def test_corrections_stay_at_masked_positions():
    model = build(layers=[3])
    tokens, states = trajectory()
    changed = (logits(model, tokens, states) - logits(plain(model, "llada-debug"), tokens)).abs().amax(
        -1
    ) > 1e-5
    history = torch.arange(states.count).repeat(2)[:, None] > 0
    assert torch.equal(changed, states.masked_NL & history)


def test_trajectories_of_a_batch_do_not_see_each_other():
    model = build()
    tokens, states = trajectory(batch=3)
    together = logits(model, tokens, states)
    for b in range(3):
        rows = slice(b * states.count, (b + 1) * states.count)
        own = temporal.States(states.masked_NL[rows], states.revealed_N[rows], states.count)
        torch.testing.assert_close(logits(model, tokens[rows], own), together[rows], atol=1e-5, rtol=1e-5)


# --- what is trained -------------------------------------------------------------------


def test_only_temporal_parameters_get_gradients():
    model = build()
    tokens, states = trajectory()
    logits(model, tokens, states).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".temporal." in name)
        if parameter.requires_grad:
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_gradients_are_those_of_finite_differences():
    model = build().double()
    tokens, states = trajectory()

    def loss() -> torch.Tensor:
        return logits(model, tokens, states).square().mean()

    loss().backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        with torch.no_grad():
            index, step = parameter.grad.abs().argmax(), 1e-5
            flat = parameter.view(-1)
            flat[index] += step
            up = loss()
            flat[index] -= 2 * step
            slope = (up - loss()) / (2 * step)
            flat[index] += step
        # The backbone's rotary table and the softmax over states are fp32.
        assert slope.item() == pytest.approx(parameter.grad.view(-1)[index].item(), rel=2e-2), name


def test_an_empty_response_and_a_response_of_one_token_have_finite_gradients():
    model = build()
    tokens = torch.randint(0, MASK, (4, 5), generator=torch.Generator().manual_seed(0))
    for masked in ([], [4]):
        mask = torch.zeros(4, 5, dtype=torch.bool)
        mask[:, masked] = True
        states = temporal.States(mask, torch.zeros(4, dtype=torch.long), 4)
        out = logits(model, tokens.masked_fill(mask, MASK), states)
        assert bool(out.isfinite().all())
        out.square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize(
    ("flavor", "knobs", "millions"),
    [
        ("llada-8B", {"heads": 4, "head_dim": 64}, 67.1),
        ("dream-7B", {"layers": "middle", "count": 14, "heads": 4, "head_dim": 84}, 67.4),
    ],
)
def test_parameters_of_the_papers_models(flavor, knobs, millions):
    spec = model_registry(flavor, section=Section(mask_token_id=5, **knobs))
    with torch.device("meta"):
        model = spec.model.build()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers, dim = len(spec.model.temporal), backbones.lookup(flavor).dim
    assert trained == layers * (4 * dim * knobs["heads"] * knobs["head_dim"] + 1)
    assert round(trained / 1e6, 1) == millions


def test_counted_flops_are_those_that_run():
    model = build(layers=[1, 3], states=4)
    tokens, states = trajectory(batch=2, response=29, states=4)
    rows, length = tokens.shape
    # Half of a state is read out, so that two trajectories of four states read each token once.
    readout = torch.arange(2 * length)
    positions = torch.arange(length).expand(rows, -1)
    with FlopCounterMode(display=False) as counter:
        out = model(tokens, positions, model.get_attention_masks(positions), readout, states)
        out.sum().backward()
    counted = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    linear = sum(n for op, n in counted.items() if "mm" in op)
    size, config = backbones.lookup("llada-debug"), model.config
    _, ours = config.get_nparams_and_flops(model, length)
    scores = 4 * length * size.n_heads * size.head_dim
    ours -= states.count * (size.n_layers * scores + 2 * scores * (size.n_layers - 1 - 1))
    assert ours * 2 * length == pytest.approx(linear, rel=0.01)


# --- which layers, and bad input -------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "n_layers", "want"),
    [
        ({}, 32, list(range(1, 32, 2))),
        ({"count": 8}, 32, list(range(2, 32, 4))),
        ({"count": 32}, 32, list(range(32))),
        ({"layers": "middle"}, 32, list(range(8, 24))),
        ({"layers": "middle", "count": 14}, 28, list(range(7, 21))),
        ({"layers": [3, 1]}, 4, [1, 3]),
        ({}, 1, [0]),
    ],
)
def test_allocations(knobs, n_layers, want):
    assert temporal_layers(Section(**knobs), n_layers=n_layers) == want


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"layers": [1, 4]}, ["[tdlm] layers = [1, 4]", "layer 4", "0 to 3"]),
        ({"layers": [-1]}, ["layer -1", "0 to 3"]),
        ({"layers": []}, ["no layer"]),
        ({"layers": [1, 1]}, ["names a layer twice"]),
        ({"count": 5}, ["[tdlm] count = 5", "4 layers"]),
        ({"shift": "moved"}, ["[tdlm] shift = 'moved'", "'own'"]),
    ],
)
def test_impossible_layers_are_refused(knobs, words):
    with pytest.raises(UserError) as caught:
        build(**knobs)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"head_dim": 63}, ["tdlm.head_dim must be even", "63"]),
        ({"head_dim": 0}, ["tdlm.head_dim must be at least 1"]),
        ({"heads": 0}, ["tdlm.heads"]),
        ({"states": 1}, ["tdlm.states (K) must be at least 2", "got 1"]),
        ({"tau": 1.1}, ["tdlm.tau must be between 0 and 1", "1.1"]),
        ({"tau": -0.1}, ["tdlm.tau"]),
        ({"tau": math.nan}, ["tdlm.tau"]),
        ({"window": 0}, ["tdlm.window must be at least 1"]),
        ({"window": True}, ["tdlm.window"]),
        ({"block_size": 0}, ["tdlm.block_size"]),
        ({"count": -1}, ["tdlm.count"]),
    ],
)
def test_bad_knobs_are_refused(knobs, words):
    with pytest.raises(ValueError) as caught:
        Section(**knobs)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_a_causal_backbone_is_refused():
    with pytest.raises(UserError, match=r"name = 'tdlm' needs a bidirectional backbone.*'qwen3-debug'"):
        model_registry("qwen3-debug", section=Section(mask_token_id=5))


def test_the_section_is_settled_from_the_backbone():
    for flavor, prediction, mask in (("llada-8B", "own", 126336), ("dream-7B", "shifted", 151666)):
        section = Section()
        model = SimpleNamespace(flavor=flavor, hf_assets_path="")
        complete(SimpleNamespace(tdlm=section, model=model))
        assert (section.prediction, section.mask_token_id) == (prediction, mask)
        again = dataclasses.replace(section)
        complete(SimpleNamespace(tdlm=again, model=model))
        assert again == section


def test_a_pipeline_is_refused():
    config = model_registry("llada-debug", section=Section(mask_token_id=5)).model
    with pytest.raises(UserError, match="pipeline_parallel_degree = 2"):
        config.update_from_config(
            config=SimpleNamespace(
                parallelism=SimpleNamespace(pipeline_parallel_degree=2), model=SimpleNamespace(name="tdlm")
            )
        )
