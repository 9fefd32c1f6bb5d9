"""Cached block decoding against a slow twin that recomputes everything, and against single runs."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import block_diffusion as reference
from torchtitan_ext import backbones
from torchtitan_ext.decoding import SamplingParams, autoregressive
from torchtitan_ext.decoding.block_diffusion import (
    choose,
    generate,
    select_above,
    select_confident,
    select_leftmost,
)
from torchtitan_ext.errors import UserError

VOCAB, CONTEXT, MASK = 40, 64, 39
MODES = [
    ("confidence", "causal"),
    ("confidence", "block"),
    ("threshold", "causal"),
    ("threshold", "block"),
    ("left_to_right", "causal"),
    ("left_to_right", "block"),
]


@functools.cache
def random_model(flavor: str = "smollm2-debug", context: int = CONTEXT) -> backbones.Backbone:
    """A tiny backbone whose greedy text varies and whose confidences lie far from 0 and 1."""
    size = dataclasses.replace(backbones.lookup(flavor), vocab_size=VOCAB, context=context, n_layers=2)
    model = backbones.build_config(size, attention="dense").build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25 + (parameter.ndim == 1))
    return model.eval().requires_grad_(False)


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(MASK, (n,), generator=generator).tolist() for n in lengths]


def check_against_twin(model, prompt, *, new, size, policy, count, threshold, clean, stop=()):
    options = {"policy": policy, "threshold": threshold, "clean": clean}
    tokens, steps = reference.decode(
        model, prompt or [7], mask_id=MASK, new=new, size=size, count=count, stop=set(stop), **options
    )
    seen: list[tuple] = []
    result = generate(
        model,
        [prompt],
        max_new_tokens=new,
        mask_id=MASK,
        block_size=size,
        tokens_per_forward=count,
        stop_ids=stop,
        bos_id=7,
        on_step=lambda row, revealed: seen.append(("step", row, revealed)),
        on_token=lambda row, token: seen.append(("token", row, token)),
        **options,
    )
    row = result[0]
    assert row.new_tokens == tokens and row.tokens == [*(prompt or [7]), *tokens]
    assert result.extra["revealed"] == [[len(step) for step in steps]]
    assert row.forwards == result.forwards == len(steps)
    assert row.finish_reason == ("stop" if tokens[-1] in stop else "length")
    assert seen == expected_calls(len(prompt or [7]), tokens, steps)


def expected_calls(begin: int, tokens: list[int], steps: list[list[int]]) -> list[tuple]:
    """Callbacks of one row: each forward, then the tokens that nothing unknown precedes any more."""
    calls, known, given = [], set(), 0
    for step in steps:
        calls.append(("step", 0, len(step)))
        known |= set(step)
        while begin + given in known and given < len(tokens):
            calls.append(("token", 0, tokens[given]))
            given += 1
    return calls


@pytest.mark.parametrize("policy, clean", MODES)
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5])
def test_equals_recomputation(policy, clean, length):
    for count, threshold, new in ((1, 0.3, 7), (2, 0.15, 10), (4, 0.6, 4)):
        check_against_twin(
            random_model(),
            random_prompts(length, seed=length)[0],
            new=new,
            size=4,
            policy=policy,
            count=count,
            threshold=threshold,
            clean=clean,
        )


@settings(deadline=None, max_examples=80)
@given(
    mode=st.sampled_from(MODES),
    length=st.integers(1, 14),
    new=st.integers(1, 14),
    size=st.integers(1, 6),
    count=st.integers(1, 6),
    threshold=st.floats(0, 1),
    stop=st.sets(st.integers(0, MASK - 1), max_size=6),
    flavor=st.sampled_from(["smollm2-debug", "qwen3-debug"]),
    seed=st.integers(0, 1000),
)
def test_equals_recomputation_everywhere(mode, length, new, size, count, threshold, stop, flavor, seed):
    check_against_twin(
        random_model(flavor),
        random_prompts(length, seed=seed)[0],
        new=new,
        size=size,
        policy=mode[0],
        count=min(count, size),
        threshold=threshold,
        clean=mode[1],
        stop=stop,
    )


@settings(deadline=None, max_examples=25)
@given(
    mode=st.sampled_from(MODES),
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    size=st.integers(1, 6),
    stop=st.sets(st.integers(0, MASK - 1), max_size=6),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 1000),
    chunk=st.sampled_from([512, 4]),
)
def test_a_batch_equals_single_runs(mode, lengths, size, stop, temperature, seed, chunk):
    model, rows = random_model(), random_prompts(*lengths, seed=seed)
    options = {
        "max_new_tokens": 11,
        "mask_id": MASK,
        "block_size": size,
        "policy": mode[0],
        "clean": mode[1],
        "threshold": 0.3,
        "stop_ids": stop,
    }
    sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoregressive, "PREFILL_CHUNK", chunk)
        together = generate(model, rows, sampling=sampling, **options)
    alone = [
        generate(model, [row], seeds=[seed + i], sampling=sampling, **options) for i, row in enumerate(rows)
    ]
    assert list(together) == [single[0] for single in alone]
    assert together.extra["revealed"] == [single.extra["revealed"][0] for single in alone]
    assert together.forwards == max(single.forwards for single in alone)


@pytest.mark.parametrize("policy, clean", MODES)
def test_long_prompts_are_taken_in_by_chunks(policy, clean, monkeypatch):
    """Chunks change nothing, and no forward is longer than a chunk and a block."""
    model, rows = random_model(), random_prompts(23, 9, 2)
    options = {"max_new_tokens": 6, "mask_id": MASK, "block_size": 4, "policy": policy, "clean": clean}
    whole = generate(model, rows, **options)
    monkeypatch.setattr(autoregressive, "PREFILL_CHUNK", 10)
    lengths: list[int] = []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    assert list(generate(model, rows, **options)) == list(whole)
    hook.remove()
    assert lengths[0] == 8 and max(lengths) <= 12


@pytest.mark.parametrize("policy, clean", MODES)
def test_forwards_are_counted_and_none_is_spent_on_a_complete_block(policy, clean):
    model, size, new, count = random_model(), 4, 16, 2
    for length in (4, 5):
        calls: list[int] = []
        hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args, to=calls: to.append(1))
        result = generate(
            model,
            random_prompts(length),
            max_new_tokens=new,
            mask_id=MASK,
            block_size=size,
            policy=policy,
            clean=clean,
            tokens_per_forward=count,
            threshold=1.0,
        )
        hook.remove()
        assert len(calls) == result.forwards
        if policy == "threshold":  # nothing is above 1
            assert result.extra["revealed"] == [[1] * new]
        elif length == 4 or (policy == "left_to_right" and clean == "causal"):
            assert result.extra["revealed"] == [[count] * (new // count)]
        else:  # blocks of 3, 4, 4, 4 and 1 new tokens
            assert result.extra["revealed"] == [[2, 1, 2, 2, 2, 2, 2, 2, 1]]
            assert result.tokens_per_forward == pytest.approx(16 / 9)


@pytest.mark.parametrize("clean", ["causal", "block"])
def test_threshold_zero_reveals_whole_blocks(clean):
    options = {"mask_id": MASK, "block_size": 4, "policy": "threshold", "clean": clean, "threshold": 0.0}
    result = generate(random_model(), random_prompts(6), max_new_tokens=9, **options)
    assert result.extra["revealed"] == [[2, 4, 3]]


def test_left_to_right_does_not_depend_on_the_budget_and_may_fill_the_context():
    model, prompt = random_model(), random_prompts(CONTEXT - 12)[0]
    options = {"mask_id": MASK, "block_size": 8, "policy": "left_to_right", "tokens_per_forward": 3}
    whole = generate(model, [prompt], max_new_tokens=12, **options)[0]
    assert len(whole.tokens) == CONTEXT and whole.forwards == 4
    tokens, _ = reference.decode(model, prompt, mask_id=MASK, new=12, size=8, policy="left_to_right", count=3)
    assert whole.new_tokens == tokens
    for new in (1, 4, 11):
        assert generate(model, [prompt], max_new_tokens=new, **options)[0].new_tokens == tokens[:new]


def test_a_model_of_another_attention_kind_can_be_decoded():
    """A backbone that was pretrained in both directions; the mask is the decoder's."""
    prompt = random_prompts(5)[0]
    model = random_model("llada-debug")
    result = generate(model, [prompt], max_new_tokens=8, mask_id=MASK, block_size=4, policy="confidence")
    assert (
        result[0].new_tokens
        == reference.decode(model, prompt, mask_id=MASK, new=8, size=4, policy="confidence")[0]
    )


def test_the_mask_token_is_never_chosen():
    logits = torch.zeros(3, VOCAB)
    logits[:, MASK] = 50.0
    logits[1, 5] = 3.0
    before = logits.clone()
    tokens, confidence = choose(logits, mask_id=MASK, params=SamplingParams(), generators=[])
    assert tokens.tolist() == [0, 5, 0] and torch.equal(logits, before)
    want = math.exp(3) / (math.exp(3) + VOCAB - 2)
    torch.testing.assert_close(confidence, torch.tensor([1 / (VOCAB - 1), want, 1 / (VOCAB - 1)]))
    generators = [torch.Generator().manual_seed(i) for i in range(300)]
    params = SamplingParams(temperature=2.0)
    tokens, confidence = choose(
        logits[1:2].expand(300, -1), mask_id=MASK, params=params, generators=generators
    )
    assert MASK not in tokens.tolist() and len(set(tokens.tolist())) > 20
    high = math.exp(1.5) / (math.exp(1.5) + VOCAB - 2)
    for token, value in zip(tokens.tolist(), confidence.tolist(), strict=True):
        assert value == pytest.approx(high if token == 5 else high / math.exp(1.5), rel=1e-5)


def test_bfloat16_logits_are_compared_in_fp32():
    logits = torch.tensor([[4.0, 0.0, 0.0], [4.03125, 0.0, 0.0]], dtype=torch.bfloat16)
    _, confidence = choose(logits, mask_id=2, params=SamplingParams(), generators=[])
    assert confidence.dtype == torch.float32 and confidence[1] > confidence[0]


def test_sampled_text_follows_the_models_distribution():
    """One slot: a block of one mask, by enumeration."""
    model, prompt, n = random_model(), [4, 8, 15], 1500
    params = SamplingParams(temperature=1.5, top_k=4)
    result = generate(
        model,
        [prompt] * n,
        max_new_tokens=1,
        mask_id=MASK,
        block_size=4,
        policy="confidence",
        sampling=params,
    )
    drawn = [row.new_tokens[0] for row in result]
    logits = reference.dense_logits(
        model, dict(enumerate(prompt)), 3, 4, size=4, clean="causal", mask_id=MASK
    )[3:]
    logits[:, MASK] = -math.inf
    top = (logits[0] / 1.5).topk(4)
    for token, p in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
        assert abs(drawn.count(token) / n - p) <= 4.5 * (p * (1 - p) / n) ** 0.5
    assert set(drawn) <= set(top.indices.tolist())


def test_seeds_repeat_and_differ():
    options = {"max_new_tokens": 8, "mask_id": MASK, "block_size": 4, "policy": "confidence"}
    sampling = SamplingParams(temperature=1.5, seed=3)
    first = generate(random_model(), [[1, 2]] * 3, sampling=sampling, **options)
    assert list(first) == list(generate(random_model(), [[1, 2]] * 3, sampling=sampling, **options))
    assert len({tuple(row.new_tokens) for row in first}) == 3
    chosen = generate(random_model(), [[1, 2]], sampling=sampling, seeds=[5], **options)
    assert chosen[0] == first[2]


@pytest.mark.parametrize("policy, clean", MODES)
def test_a_callback_ends_a_row_and_finished_rows_leave_the_batch(policy, clean):
    model, rows, ends = random_model(), random_prompts(3, 6, 4), [1, 9, 5]
    options = {"mask_id": MASK, "block_size": 4, "policy": policy, "clean": clean, "threshold": 0.3}
    free = generate(model, rows, max_new_tokens=12, **options)
    counts, batches = [0, 0, 0], []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: batches.append(args[0].shape[0]))

    def on_token(row: int, token: int) -> bool:
        counts[row] += 1
        return counts[row] == ends[row]

    result = generate(model, rows, max_new_tokens=12, on_token=on_token, **options)
    hook.remove()
    assert counts == ends and [row.finish_reason for row in result] == ["stop"] * 3
    for row, whole, end in zip(result, free, ends, strict=True):
        assert row.new_tokens == whole.new_tokens[:end]
    want = [sum(row.forwards > step for row in result) for step in range(result.forwards)]
    assert batches == want and want[-1] < 3


def test_a_stop_token_counts_only_once_everything_left_of_it_is_known():
    """Out of order: what lies behind the first stop token is dropped, though it was revealed before."""
    model = random_model()
    options = {"max_new_tokens": 8, "mask_id": MASK, "block_size": 8, "policy": "confidence"}
    late = 0
    for prompt in random_prompts(*[8] * 12, seed=4):
        tokens, steps = reference.decode(model, prompt, mask_id=MASK, new=8, size=8, policy="confidence")
        order = [slot - 8 for (slot,) in steps]
        for stop in set(tokens):
            cut = tokens.index(stop) + 1
            row = generate(model, [prompt], stop_ids=[stop], **options)[0]
            needed = max(order.index(slot) for slot in range(cut)) + 1
            assert row.new_tokens == tokens[:cut] and row.forwards == needed
            assert row.finish_reason == "stop"  # at the last token of the budget too
            late += needed > order.index(cut - 1) + 1
    assert late > 5


def test_selection_rules():
    confidence = [0.3, 0.9, 0.5, 0.9, 0.2]
    assert select_confident(confidence, 1) == [1]
    assert select_confident(confidence, 3) == [1, 2, 3]
    assert select_confident(confidence, 9) == [0, 1, 2, 3, 4]
    assert select_above(confidence, 0.3) == [1, 2, 3]
    assert select_above(confidence, 0.9) == [1]
    assert select_above(confidence, 0.0) == [0, 1, 2, 3, 4]
    assert select_leftmost([2, 4, 7], 2) == [2, 4] and select_leftmost([2], 3) == [2]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(1, 8), st.floats(0, 1))
def test_selection_rules_in_general(confidence, count, threshold):
    best = select_confident(confidence, count)
    assert len(best) == min(count, len(confidence)) and best == sorted(set(best))
    rest = [value for slot, value in enumerate(confidence) if slot not in best]
    assert min(confidence[slot] for slot in best) >= max(rest, default=0)
    above = select_above(confidence, threshold)
    if max(confidence) > threshold:
        assert [confidence[slot] > threshold for slot in range(len(confidence))] == [
            slot in above for slot in range(len(confidence))
        ]
    else:
        assert above == [confidence.index(max(confidence))]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"tokens_per_forward": 0}, "between 1 and the block size 4, got 0"),
        ({"tokens_per_forward": 5}, "between 1 and the block size 4, got 5"),
        ({"threshold": 1.5}, "threshold must be between 0 and 1, got 1.5"),
        ({"threshold": math.nan}, "threshold must be"),
        ({"mask_id": VOCAB}, f"mask_id {VOCAB}.*{VOCAB} tokens"),
        ({"mask_id": -1}, "mask_id -1"),
        ({"policy": "confident"}, "unknown policy 'confident'; did you mean 'confidence'"),
        ({"clean": "blocks"}, "unknown clean attention 'blocks'; did you mean 'block'"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": CONTEXT}, f"{CONTEXT + 1}, longer than the {CONTEXT}"),
        ({"max_len": 3}, "longer than the 3"),
        ({"seeds": [1, 2]}, "2 seeds for 1 prompts"),
    ],
)
def test_options_that_do_not_fit_are_refused(change, message):
    options = {"max_new_tokens": 4, "mask_id": MASK, "block_size": 4, "policy": "confidence", **change}
    model = random_model()
    hook = model.tok_embeddings.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    try:
        with pytest.raises(UserError, match=message):
            generate(model, [[1]], **options)
    finally:
        hook.remove()


def test_models_that_cannot_be_decoded_this_way_are_refused():
    options = {"max_new_tokens": 4, "mask_id": MASK, "block_size": 4, "policy": "confidence"}
    size = dataclasses.replace(backbones.lookup("smollm2-debug"), n_layers=1)
    with pytest.raises(UserError, match="dense"):
        generate(backbones.build_config(size, attention="flex").build(), [[1]], **options)
    with pytest.raises(UserError, match="not a decoder"):
        generate(torch.nn.Linear(1, 1), [[1]], **options)
    with pytest.raises(UserError, match=r"prompt 0 is empty"):
        generate(random_model(), [[]], **options)


def test_no_prompts_and_the_model_is_left_as_it_was():
    model = random_model()
    modules = dict(model.named_modules())
    options = {"max_new_tokens": 4, "mask_id": MASK, "block_size": 4, "policy": "confidence"}
    empty = generate(model, [], **options)
    assert list(empty) == [] and empty.forwards == 0 and empty.extra == {"revealed": [], "traces": []}
    assert generate(model, [[1]], **options).seconds > 0
    assert dict(model.named_modules()) == modules and model._skip_lm_head is False
