"""Streaming decoding with a recurrent core: passes, halting, feedback, depth-aware keys and values."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_decoding_streaming import (
    MASK,
    check_against_twin,
    looped_model,
    plain_model,
    random_prompts,
    recorder,
)
from torchtitan_ext.attention import CachedAttention
from torchtitan_ext.decoding import SamplingParams, autoregressive, streaming
from torchtitan_ext.decoding.streaming import Rules
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.alodlm.decode import decode
from torchtitan_ext.methods.wedlm import decode as wedlm

STOPS = st.sets(st.integers(0, MASK - 1), max_size=5)
BANDS = {"middle": ((1, 2), 3), "whole": ((0, 2), 2), "last": ((1, 3), 3), "first": ((0, 1), 2)}


def model_of(band: str = "middle", **knobs):
    (start, end), layers = BANDS[band]
    return looped_model(band=(start, end), layers=layers, **knobs)


@settings(deadline=None, max_examples=20)
@given(
    band=st.sampled_from(list(BANDS)),
    carry_norm=st.booleans(),
    passes=st.integers(1, 4),
    length=st.integers(0, 6),
    new=st.integers(1, 8),
    window=st.integers(1, 5),
    tau=st.sampled_from([0.0, 0.8, 1.6, 2.4, 9.0]),
    penalty=st.sampled_from([0.0, 0.02, 0.3]),
    q=st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]),
    left1=st.booleans(),
    feedback=st.sampled_from(["cumulative", "one_shot"]),
    stop=STOPS,
    seed=st.integers(0, 1000),
)
def test_equals_recomputation(
    band, carry_norm, passes, length, new, window, tau, penalty, q, left1, feedback, stop, seed
):
    """Against the twin without buffers: tokens, passes, callbacks, costs, entries at every depth."""
    knobs = {"window": window, "tau": tau, "position_penalty": penalty}
    knobs |= {"q": q, "left1": left1, "feedback": feedback}
    check_against_twin(
        decode,
        model_of(band, carry_norm=carry_norm, passes=passes),
        random_prompts(length, seed=seed)[0],
        new=new,
        rules=Rules(**knobs),
        stop=stop,
        **knobs,
    )


@pytest.mark.parametrize("left1, carry_norm", [(True, False), (True, True), (False, True)])
def test_feedback_in_long_steps_equals_recomputation(left1, carry_norm):
    """Four passes in every step, each filling slots: the two ways differ from the third pass on."""
    model, texts = model_of("whole", passes=4, carry_norm=carry_norm), []
    for feedback in ("cumulative", "one_shot"):
        knobs = {"window": 5, "tau": 1.5, "position_penalty": 0.02, "q": 1.0}
        knobs |= {"left1": left1, "feedback": feedback}
        for prompt in random_prompts(3, 5, seed=6):
            trace = check_against_twin(decode, model, prompt, new=10, rules=Rules(**knobs), **knobs)
            texts.append(trace.given[-1])
    assert texts[:2] != texts[2:]


def test_the_knobs_matter():
    """Else the test above would compare little."""
    model, prompts = model_of(passes=4), random_prompts(*[5] * 6, seed=2)

    def texts(**knobs):
        result = decode(model, prompts, max_new_tokens=20, **{"window": 6, "tau": 1.6, "q": 0.6, **knobs})
        return [row.new_tokens for row in result], result.extra

    base, extra = texts()
    assert {1, 2, 3, 4} == {p for row in extra["passes"] for p in row}
    assert {1, 2, 3, 4} == {d for row in extra["depths"] for d in row}
    assert max(count for row in extra["revealed"] for count in row) > 2
    for knobs in ({"q": 0.0}, {"tau": 0.4}, {"left1": True}, {"position_penalty": 1.0}):
        assert texts(**knobs)[0] != base, knobs
    fed = [texts(q=1.0, tau=2.0, feedback=feedback)[0] for feedback in ("cumulative", "one_shot")]
    assert fed[0] != fed[1]
    means = [texts(q=q)[1]["mean_passes"] for q in (0.0, 0.5, 1.0)]
    assert means[0] == 1 and means[0] < means[1] < means[2]
    assert texts(q=1.0, tau=0.0)[1]["mean_passes"] == 4


@pytest.mark.parametrize("band", list(BANDS))
@pytest.mark.parametrize("passes", [1, 3])
def test_a_window_of_one_is_one_token_at_a_time(band, passes):
    """With q = 1 nothing halts: K dense passes over the text and one mask, for every token."""
    model, new = model_of(band, passes=passes), 9
    for prompt in random_prompts(1, 6):
        tokens = list(prompt)
        for _ in range(new):
            core, once = dense(model, [*tokens, MASK])
            assert len(core.passes) == passes and len(once.passes) == 1
            logits = model.lm_head(once.readout[0, -1])
            logits[MASK] = -torch.inf
            tokens.append(int(logits.argmax()))
        result = decode(model, [prompt], max_new_tokens=new, window=1, tau=0.0, q=1.0)
        assert result[0].tokens == tokens
        assert result.extra["passes"] == [[passes] * new] and result.extra["revealed"] == [[1] * new]


class Recorder:
    """Keys and values of every pass of a dense forward."""

    def __init__(self) -> None:
        self.passes: list[dict[int, tuple]] = [{}]
        self.readout = torch.empty(0)

    def update(self, layer_id, k_BLNH, v_BLNH):
        if layer_id in self.passes[-1]:
            self.passes.append({})
        self.passes[-1][layer_id] = (k_BLNH.transpose(1, 2), v_BLNH.transpose(1, 2))
        return self.passes[-1][layer_id]


@torch.no_grad()
def dense(model, text: list[int]) -> tuple[Recorder, Recorder]:
    """All passes of the core over a causal text, then the coda; entries of the core, and of the rest.

    The readout is the last pass's alone: before it the coda would read another pass's entries.
    """
    tokens, positions = torch.tensor([text]), torch.arange(len(text))[None]
    causal = torch.ones(1, len(text), len(text), dtype=torch.bool).tril()
    core, once = Recorder(), Recorder()
    h = model.prelude(tokens, positions, CachedAttention(once, causal))
    for depth in range(model.config.passes):
        last = model.core.run(h, CachedAttention(core, causal), positions)
        h = model.carry(last)
        assert len(core.passes) == depth + 1
    once.readout = model.coda(last, positions, CachedAttention(once, causal))
    return core, once


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("band", list(BANDS))
def test_without_early_exits_the_cache_is_that_of_parallel_passes(band, window, monkeypatch):
    """Tau 0 and q 1: every step makes K passes, and so has every token."""
    caches: list = []
    monkeypatch.setattr(streaming, "DepthCache", recorder(caches))
    model = model_of(band)
    (prompt,) = random_prompts(5, seed=3)
    result = decode(model, [prompt], max_new_tokens=10, window=window, tau=0.0, q=1.0)
    assert result.extra["passes"] == [[3] * 10]
    (cache,) = caches
    text = result[0].tokens[: cache.lengths[0]]
    assert len(text) > len(prompt)
    core, once = dense(model, text)
    for depth in (1, 2, 3):
        for layer_id, want in [*core.passes[depth - 1].items(), *once.passes[0].items()]:
            for ours, theirs in zip(cache.layer(layer_id, depth), want, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@settings(deadline=None, max_examples=15)
@given(
    length=st.integers(1, 8),
    window=st.integers(1, 6),
    tau=st.sampled_from([0.0, 1.0, 1.8, 9.0]),
    stop=STOPS,
    seed=st.integers(0, 1000),
    q=st.sampled_from([0.0, 1.0]),
)
def test_one_pass_is_wedlm(length, window, tau, stop, seed, q):
    looped = looped_model(band=(0, 1), layers=2, passes=1)
    plain = copy.deepcopy(plain_model())
    weights = {k: v for k, v in looped.state_dict().items() if not k.startswith("core.gate.")}
    plain.load_state_dict(weights, strict=True)
    prompts = random_prompts(length, length + 3, seed=seed)
    options = {"max_new_tokens": 10, "window": window, "tau": tau, "stop_ids": stop}
    ours, theirs = decode(looped, prompts, q=q, **options), wedlm.decode(plain, prompts, **options)
    assert list(ours) == list(theirs) and ours.extra == theirs.extra


@settings(deadline=None, max_examples=20)
@given(
    band=st.sampled_from(list(BANDS)),
    lengths=st.lists(st.integers(1, 16), min_size=2, max_size=4),
    window=st.integers(1, 6),
    tau=st.sampled_from([0.0, 1.2, 2.0, 9.0]),
    q=st.sampled_from([0.0, 0.4, 0.6, 1.0]),
    left1=st.booleans(),
    feedback=st.sampled_from(["cumulative", "one_shot"]),
    stop=STOPS,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 1000),
    chunk=st.sampled_from([512, 4]),
)
def test_a_batch_equals_single_runs(
    band, lengths, window, tau, q, left1, feedback, stop, temperature, seed, chunk
):
    model, rows = model_of(band), random_prompts(*lengths, seed=seed)
    options = {"max_new_tokens": 10, "window": window, "tau": tau, "stop_ids": stop}
    options |= {"q": q, "left1": left1, "feedback": feedback}
    sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoregressive, "PREFILL_CHUNK", chunk)
        together = decode(model, rows, sampling=sampling, **options)
    alone = [
        decode(model, [row], seeds=[seed + i], sampling=sampling, **options) for i, row in enumerate(rows)
    ]
    assert list(together) == [single[0] for single in alone]
    for key in ("revealed", "passes", "depths", "layer_evaluations", "head_evaluations"):
        assert together.extra[key] == [single.extra[key][0] for single in alone]
    for mine, single in zip(together.extra["first_hazards"], alone, strict=True):
        assert mine == pytest.approx(single.extra["first_hazards"][0], abs=1e-4)
    assert together.forwards == max(single.forwards for single in alone)


def test_a_row_that_has_halted_is_left_out_of_the_passes_that_follow():
    model, rows = model_of(), random_prompts(3, 8, 5, 6)
    batches: list[int] = []
    hook = model.core.layers["1"].register_forward_pre_hook(lambda _, args: batches.append(args[0].shape[0]))
    options = {"max_new_tokens": 8, "window": 4, "tau": 1.4, "q": 0.5}
    result = decode(model, rows, **options)
    hook.remove()
    assert list(result) == [decode(model, [row], **options)[0] for row in rows]
    extra = result.extra
    want = [4, 4, 4]  # the prompts, at every depth
    for step in range(max(map(len, extra["passes"]))):
        made = [row[step] for row in extra["passes"] if step < len(row)]
        want += [sum(m > depth for m in made) for depth in range(max(made))]
    assert batches == want and len(set(want)) > 2


def test_mean_halt_probability_ends_a_step():
    """Constant gates: lambda = 1/4 at every pass, so a = .25, .4375 after one and two."""
    model = copy.deepcopy(model_of(passes=4))
    with torch.no_grad():
        model.core.gate.weight.zero_()
        model.core.gate.depth_bias.fill_(float(torch.tensor(1 / 3).log()))
    (prompt,) = random_prompts(4)
    options = {"max_new_tokens": 6, "window": 4, "tau": 0.0}
    for q, passes in ((0.0, 1), (0.24, 1), (0.26, 2), (0.43, 2), (0.44, 3), (0.57, 3), (0.58, 4), (1.0, 4)):
        result = decode(model, [prompt], q=q, **options)
        assert result.extra["passes"] == [[passes] * 6], q
        assert result.extra["first_hazards"] == [pytest.approx([0.25] * 6)]
        assert result.extra["depths"] == [[passes] * 6]
        assert result.extra["path_layers"] == 1 + 2 * passes


def test_the_passes_before_a_likely_end_moved_count_too():
    """Constant gates: a is the same at every slot, so a step's passes do not depend on where ends may be."""
    model = copy.deepcopy(model_of(passes=4))
    with torch.no_grad():
        model.core.gate.weight.zero_()
        model.core.gate.depth_bias.fill_(float(torch.tensor(1 / 3).log()))
    prompts = random_prompts(3, 4, 5, 6, 7, 8)
    for stop in range(0, MASK, 3):
        options = {"max_new_tokens": 6, "window": 6, "tau": 0.0, "q": 0.43, "stop_ids": [stop, stop + 1]}
        result = decode(model, prompts, **options)
        assert {passes for row in result.extra["passes"] for passes in row} == {2}, stop


def test_left1_fills_from_the_left_one_a_pass():
    model, (prompt,) = model_of(), random_prompts(4)
    result = decode(model, [prompt], max_new_tokens=10, window=4, left1=True, q=1.0, tau=9.0)
    assert result.extra["revealed"] == result.extra["passes"] == [[3, 3, 3, 1]]
    assert result.extra["depths"] == [[1, 2, 3, 1, 2, 3, 1, 2, 3, 1]]
    assert result.extra["tokens_per_step"] == 2.5 and result.forwards == 1 + 4


def test_no_pass_follows_a_stop_token_that_ends_the_row():
    model, (prompt,) = model_of(), random_prompts(4)
    options = {"max_new_tokens": 6, "window": 6, "left1": True, "q": 1.0}
    free = decode(model, [prompt], **options)[0].new_tokens
    stop = free[1]
    cut = free.index(stop) + 1
    result = decode(model, [prompt], stop_ids=[stop], **options)
    assert result[0].new_tokens == free[:cut] and result.extra["passes"] == [[cut]]


def test_costs_are_those_of_the_layers_that_ran():
    """The prompt's coda runs once; nothing else is saved."""
    model, (prompt,) = model_of(), random_prompts(6)
    slots: list[int] = []
    blocks = [*model.layers.values(), *model.core.layers.values()]  # the coda's too
    hooks = [
        block.register_forward_pre_hook(lambda _, args: slots.append(args[0].shape[1])) for block in blocks
    ]
    extra = decode(model, [prompt], max_new_tokens=13, window=4, tau=1.4, q=0.6).extra
    for hook in hooks:
        hook.remove()
    assert sum(slots) == extra["layer_evaluations"][0] + 6 * (1 + 3 + 1)
    mean = sum(extra["passes"][0]) / len(extra["passes"][0])
    assert extra["mean_passes"] == mean and extra["path_layers"] == pytest.approx(1 + 2 * mean)


def test_what_is_not_given_comes_from_the_model():
    model, prompts = model_of(q=0.9, feedback="one_shot", tau=1.6, window=5), random_prompts(6, 3)
    given = decode(
        model_of(),
        prompts,
        max_new_tokens=12,
        window=5,
        tau=1.6,
        position_penalty=0.02,
        q=0.9,
        left1=False,
        feedback="one_shot",
    )
    assert list(decode(model, prompts, max_new_tokens=12)) == list(given)


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"window": 0}, "window"),
        ({"tau": float("nan")}, "tau"),
        ({"position_penalty": -1.0}, "position_penalty"),
        ({"q": 1.1}, "q must be between 0 and 1"),
        ({"feedback": "both"}, "feedback"),
    ],
)
def test_bad_knobs_are_refused(knobs, words):
    with pytest.raises(UserError, match=words):
        decode(model_of(), [[1]], max_new_tokens=1, **knobs)
