"""Streaming decoding of a plain backbone: against recomputation, token by token, in batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_decoding_streaming import (
    CONTEXT,
    MASK,
    check_against_twin,
    plain_model,
    random_prompts,
    recorder,
)
from torchtitan_ext.decoding import SamplingParams, autoregressive, streaming
from torchtitan_ext.decoding.kv_cache import KVCache
from torchtitan_ext.decoding.streaming import Rules
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.wedlm.decode import decode

STOPS = st.sets(st.integers(0, MASK - 1), max_size=5)


@torch.no_grad()
def dense_logits(model, tokens: list[int], positions: list[int]) -> torch.Tensor:
    """Logits [L, V] without the mask token, attention causal in the order given."""
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[None, None]
    logits = model(torch.tensor([tokens]), torch.tensor([positions]), causal)[0]
    logits[:, MASK] = -math.inf
    return logits


def slow(model, prompt, *, new, window, tau, penalty, stop=(), wait=True):
    """The definition over absolute positions: one dense forward a step over prefix and window.

    ``wait``: slots behind the first stop token, known or likeliest, are left alone.
    """
    known, end = dict(enumerate(prompt)), len(prompt) + new
    prefix, behind, steps = len(prompt), min(len(prompt) + window, end), []
    while True:
        leading = 0
        while prefix + leading in known:
            leading += 1
        behind = min(behind + leading, end)
        filled = [i for i in range(prefix, behind) if i in known]
        masked = [i for i in range(prefix, behind) if i not in known]
        positions = [*range(prefix), *filled, *masked]
        logits = dense_logits(model, [known.get(i, MASK) for i in positions], positions)
        prefix += leading
        scores, best = {}, {}
        for i in masked:
            p = logits[positions.index(i)].softmax(-1)
            entropy = -sum(float(x) * math.log(float(x)) for x in p if x > 0)
            scores[i], best[i] = entropy + penalty * (i - masked[0]), int(p.argmax())
        ends = [i for i in range(prefix, behind) if wait and known.get(i, best.get(i)) in stop]
        masked = [i for i in masked if not ends or i <= ends[0]]
        picked = [i for i in masked if scores[i] < tau] or [min(masked, key=scores.__getitem__)]
        known |= {i: best[i] for i in picked}
        steps.append(len(picked))
        text = []
        while (token := known.get(len(prompt) + len(text))) is not None:
            text.append(token)
            if token in stop or len(text) == new:
                return text, steps


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(1, 12),
    new=st.integers(1, 14),
    window=st.integers(1, 7),
    tau=st.sampled_from([0.0, 0.4, 0.8, 1.4, 2.2, 3.0, 9.0]),
    penalty=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    stop=STOPS,
    seed=st.integers(0, 1000),
    flavor=st.sampled_from(["smollm2-debug", "qwen3-debug"]),
)
def test_equals_dense_recomputation(length, new, window, tau, penalty, stop, seed, flavor):
    model, prompt = plain_model(flavor), random_prompts(length, seed=seed)[0]
    options = {"window": window, "tau": tau}
    tokens, steps = slow(model, prompt, new=new, penalty=penalty, stop=stop, **options)
    result = decode(model, [prompt], max_new_tokens=new, position_penalty=penalty, stop_ids=stop, **options)
    assert result[0].new_tokens == tokens
    assert result.extra["revealed"] == [steps] and result.forwards == 1 + len(steps)
    assert result.extra["passes"] == [[1] * len(steps)] and result.extra["mean_passes"] == 1


@settings(deadline=None, max_examples=15)
@given(
    length=st.integers(0, 8),
    new=st.integers(1, 8),
    window=st.integers(1, 5),
    tau=st.floats(0, 3.5),
    penalty=st.floats(0, 1),
    stop=STOPS,
    seed=st.integers(0, 1000),
)
def test_every_committed_entry_equals_recomputation(length, new, window, tau, penalty, stop, seed):
    """Against the twin without buffers: tokens, callbacks, costs, keys and values."""
    rules = Rules(window=window, tau=tau, position_penalty=penalty)
    check_against_twin(
        decode,
        plain_model(),
        random_prompts(length, seed=seed)[0],
        new=new,
        rules=rules,
        stop=stop,
        window=window,
        tau=tau,
        position_penalty=penalty,
    )


def test_different_thresholds_decode_differently():
    """Else the tests above would compare little: windows fill in order, out of order, and at once."""
    model, prompt = plain_model(), random_prompts(6, seed=1)[0]
    texts, steps = [], []
    for tau in (0.0, 1.4, 2.2, 9.0):
        result = decode(model, [prompt], max_new_tokens=16, window=6, tau=tau)
        texts.append(tuple(result[0].new_tokens))
        steps.append(len(result.extra["passes"][0]))
    assert len(set(texts)) >= 3 and steps == sorted(steps, reverse=True)
    assert steps[0] == 16 and steps[-1] == 3  # 6 + 6 + 4


@pytest.mark.parametrize("tau", [0.0, 1.0, 9.0])
@pytest.mark.parametrize("flavor", ["smollm2-debug", "qwen3-debug"])
def test_a_window_of_one_is_one_token_at_a_time(tau, flavor):
    model, new = plain_model(flavor), 12
    for prompt in random_prompts(1, 5, 9):
        tokens = list(prompt)
        for _ in range(new):
            logits = dense_logits(model, [*tokens, MASK], list(range(len(tokens) + 1)))
            tokens.append(int(logits[-1].argmax()))
        result = decode(model, [prompt], max_new_tokens=new, window=1, tau=tau)
        assert result[0].tokens == tokens and result.extra["revealed"] == [[1] * new]
        assert result.extra["tokens_per_step"] == 1 and result.tokens_per_forward == new / (new + 1)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_the_cache_is_that_of_a_causal_forward_over_the_text(window, monkeypatch):
    caches = []
    monkeypatch.setattr(streaming, "DepthCache", recorder(caches))
    model = plain_model()
    for prompt, tau in zip(random_prompts(2, 7, 5), (0.0, 1.5, 9.0), strict=True):
        row = decode(model, [prompt], max_new_tokens=14, window=window, tau=tau)[0]
        cache, plain = caches.pop(), KVCache(1)
        (length,) = cache.lengths
        assert len(prompt) < length < len(row.tokens)
        with torch.no_grad():
            autoregressive.forward(model, plain, torch.tensor([row.tokens[:length]]))
        plain.advance(length)
        for layer_id in range(2):
            for ours, theirs in zip(cache.layer(layer_id, 1), plain.layer(layer_id), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    window=st.integers(1, 6),
    tau=st.sampled_from([0.0, 1.4, 2.2, 9.0]),
    stop=STOPS,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 1000),
    chunk=st.sampled_from([512, 4]),
)
def test_a_batch_equals_single_runs(lengths, window, tau, stop, temperature, seed, chunk):
    model, rows = plain_model(), random_prompts(*lengths, seed=seed)
    options = {"max_new_tokens": 11, "window": window, "tau": tau, "stop_ids": stop}
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
    assert together.forwards == max(single.forwards for single in alone)


def test_a_callback_ends_a_row_and_finished_rows_leave_the_batch():
    model, rows, ends = plain_model(), random_prompts(3, 6, 4), [1, 9, 5]
    free = decode(model, rows, max_new_tokens=12, tau=1.4)
    counts, batches = [0, 0, 0], []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: batches.append(args[0].shape[0]))

    def on_token(row: int, token: int) -> bool:
        counts[row] += 1
        return counts[row] == ends[row]

    result = decode(model, rows, max_new_tokens=12, tau=1.4, on_token=on_token)
    hook.remove()
    assert counts == ends and [row.finish_reason for row in result] == ["stop"] * 3
    for row, whole, end in zip(result, free, ends, strict=True):
        assert row.new_tokens == whole.new_tokens[:end]
    want = [sum(row.forwards > step for row in result) for step in range(result.forwards)]
    assert batches == want and want[0] == 3 > want[-1]


def test_slots_behind_a_likely_end_wait_and_a_stop_token_counts_once_everything_left_of_it_is_known():
    model, behind, changed = plain_model(), {True: 0, False: 0}, 0
    options = {"window": 6, "tau": 1.4}
    for prompt in random_prompts(*[8] * 8, seed=4):
        for stop in set(slow(model, prompt, new=10, penalty=0.0, **options)[0]):
            texts = []
            for wait in behind:
                text, steps = slow(model, prompt, new=10, penalty=0.0, stop=[stop], wait=wait, **options)
                behind[wait] += sum(steps) - len(text)
                texts.append(text)
            changed += texts[0] != texts[1]
            row = decode(
                model, [prompt], max_new_tokens=10, position_penalty=0.0, stop_ids=[stop], **options
            )[0]
            assert row.new_tokens == texts[0] and stop not in row.new_tokens[:-1]
            assert row.finish_reason == ("stop" if row.new_tokens[-1] == stop else "length")
    assert behind[True] < behind[False] and changed > 0


def test_budgets_smaller_than_the_window_and_no_forward_for_known_tokens():
    model, prompt = plain_model(), random_prompts(5)[0]
    calls = []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    for new, want in ((1, [5, 1]), (3, [5, 3]), (8, [5, 8]), (9, [5, 8, 9]), (19, [5, 8, 16, 11])):
        calls.clear()
        result = decode(model, [prompt], max_new_tokens=new, window=8, tau=9.0, position_penalty=0.0)
        assert calls == want and len(result[0].new_tokens) == new
    hook.remove()


def test_prompts_may_fill_the_context():
    model, (long, short) = plain_model(), random_prompts(CONTEXT - 3, 2)
    together = decode(model, [long, short], max_new_tokens=3, window=8, tau=0.0)
    assert len(together[0].tokens) == CONTEXT
    for row, prompt in zip(together, (long, short), strict=True):
        assert row.new_tokens == slow(model, prompt, new=3, window=8, tau=0.0, penalty=0.02)[0]


def test_long_prompts_are_taken_in_by_chunks(monkeypatch):
    model, rows, lengths = plain_model(), random_prompts(23, 9, 2), []
    whole = decode(model, rows, max_new_tokens=6)
    monkeypatch.setattr(autoregressive, "PREFILL_CHUNK", 10)
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    assert list(decode(model, rows, max_new_tokens=6)) == list(whole)
    hook.remove()
    assert lengths[:3] == [10, 10, 3] and max(lengths) <= 10


def test_costs_are_those_of_the_layers_that_ran():
    model, (prompt,) = plain_model(), random_prompts(6)
    slots, heads = [], []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: slots.append(args[0].shape[1]))
        for layer in model.layers.values()
    ]
    hooks.append(model.lm_head.register_forward_pre_hook(lambda _, args: heads.append(args[0].shape[0])))
    extra = decode(model, [prompt], max_new_tokens=13, tau=1.4).extra
    for hook in hooks:
        hook.remove()
    assert sum(slots) == extra["layer_evaluations"][0] + 2 * 6
    assert heads and sum(heads) == extra["head_evaluations"][0]
    assert extra["layer_evaluations_per_token"] == extra["layer_evaluations"][0] / 13
    assert extra["path_layers"] == 2 and extra["depths"] == [[1] * 13] and "first_hazards" not in extra
    size = model.config.size
    dense = 2 * sum(p.numel() for p in model.layers["0"].parameters() if p.ndim == 2)
    layer = dense + 4 * size.n_heads * size.head_dim * (6 + 13 / 2)
    want = sum(slots) * layer + sum(heads) * 2 * size.dim * size.vocab_size
    assert extra["gflop_per_token"] == pytest.approx(want / 13 / 1e9)
    assert extra["prefill_gflop_per_token"] == pytest.approx(2 * 6 * layer / 13 / 1e9)


def test_the_mask_token_is_never_emitted():
    """A model that wants nothing else: the head's row of the mask is far above all others."""
    model = plain_model("qwen2_5-debug")
    weight = model.lm_head.weight
    before = weight[MASK].clone()
    try:
        with torch.no_grad():
            weight[MASK] = weight[:MASK].abs().max(0).values * 50
        for temperature in (0.0, 2.0):
            sampling = SamplingParams(temperature=temperature)
            result = decode(model, random_prompts(4, 6), max_new_tokens=12, tau=1.4, sampling=sampling)
            assert all(MASK not in row.new_tokens for row in result)
    finally:
        with torch.no_grad():
            weight[MASK] = before


def test_seeds_repeat_and_differ():
    sampling, model = SamplingParams(temperature=1.5, seed=3), plain_model()
    first = decode(model, [[1, 2]] * 3, max_new_tokens=8, sampling=sampling)
    assert list(first) == list(decode(model, [[1, 2]] * 3, max_new_tokens=8, sampling=sampling))
    assert len({tuple(row.new_tokens) for row in first}) == 3
    assert decode(model, [[1, 2]], max_new_tokens=8, sampling=sampling, seeds=[5])[0] == first[2]


def test_what_is_not_given_comes_from_the_model():
    model, (prompt,) = plain_model(), random_prompts(6)
    given = decode(model, [prompt], max_new_tokens=12, window=4, tau=1.0, position_penalty=0.02)
    assert list(decode(model, [prompt], max_new_tokens=12)) == list(given)


@pytest.mark.parametrize(
    "knobs, words",
    [({"window": 0}, "window"), ({"tau": -1.0}, "tau"), ({"position_penalty": -1.0}, "position_penalty")],
)
def test_bad_knobs_are_refused(knobs, words):
    with pytest.raises(UserError, match=words):
        decode(plain_model(), [[1]], max_new_tokens=1, **knobs)
