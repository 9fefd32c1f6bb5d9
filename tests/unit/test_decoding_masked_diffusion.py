"""Denoising against a slow twin written from the definition, and batches against single runs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import masked_diffusion as reference
from torchtitan_ext import backbones
from torchtitan_ext.decoding import SamplingParams
from torchtitan_ext.decoding.masked_diffusion import Rules, entropies, generate
from torchtitan_ext.errors import UserError

VOCAB, CONTEXT, MASK = 40, 64, 39
POLICIES = {"one_token": [0.5], "threshold": [0.0, 0.2, 0.5, 1.0], "entropy": [0.0, 1.0, 2.0, 5.0]}
policies = st.sampled_from([(policy, tau) for policy, taus in POLICIES.items() for tau in taus])


def fill(model: backbones.Backbone) -> backbones.Backbone:
    """Weights whose greedy text varies and whose confidences lie far from 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25 + (parameter.ndim == 1))
    return model.eval().requires_grad_(False)


def tiny(flavor: str) -> backbones.BackboneSize:
    return dataclasses.replace(
        backbones.lookup(flavor), vocab_size=VOCAB, context=CONTEXT, n_layers=2, mask_token_id=MASK
    )


@functools.cache
def random_model(flavor: str = "llada-debug") -> backbones.Backbone:
    return fill(backbones.build_config(tiny(flavor), attention="dense").build())


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(MASK, (n,), generator=generator).tolist() for n in lengths]


def check_trace(trace, response, steps, confidence):
    assert trace["tokens"] == response and trace["steps"] == steps
    assert trace["forwards"] == max(s for s in steps if s is not None)
    for got, want in zip(trace["confidence"], confidence, strict=True):
        assert (got is None) == (want is None)
        assert got is None or got == pytest.approx(want, rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    flavor=st.sampled_from(["llada-debug", "dream-debug"]),
    rule=policies,
    comparison=st.sampled_from(["strict", "inclusive"]),
    length=st.integers(1, 9),
    new=st.integers(1, 13),
    size=st.sampled_from([1, 3, 4, 32]),
    stop=st.sets(st.integers(0, MASK - 1), max_size=12),
    seed=st.integers(0, 1000),
)
def test_equals_the_definition(flavor, rule, comparison, length, new, size, stop, seed):
    model, prompt = random_model(flavor), random_prompts(length, seed=seed)[0]
    prediction = "shifted" if flavor.startswith("dream") else "own"
    options = {"policy": rule[0], "tau": rule[1], "prediction": prediction, "comparison": comparison}
    response, steps, confidence, text = reference.decode(
        model, prompt, mask_id=MASK, new=new, size=size, stop=stop, **options
    )
    result = generate(
        model, [prompt], max_new_tokens=new, mask_id=MASK, block_size=size, stop_ids=stop, **options
    )
    row = result[0]
    assert row.new_tokens == text and row.tokens == [*prompt, *text]
    assert row.finish_reason == ("stop" if text[-1] in stop else "length")
    assert row.forwards == result.forwards == result.extra["traces"][0]["forwards"]
    check_trace(result.extra["traces"][0], response, steps, confidence)


@settings(deadline=None, max_examples=25)
@given(
    rule=policies,
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    size=st.sampled_from([2, 4, 16]),
    stop=st.sets(st.integers(0, MASK - 1), max_size=8),
    after_stop=st.sampled_from(["drop", "reveal"]),
    prediction=st.sampled_from(["own", "shifted"]),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 1000),
)
def test_a_batch_equals_single_runs(rule, lengths, size, stop, after_stop, prediction, temperature, seed):
    model, rows = random_model(), random_prompts(*lengths, seed=seed)
    options = {
        "max_new_tokens": 9,
        "mask_id": MASK,
        "block_size": size,
        "policy": rule[0],
        "tau": rule[1],
        "stop_ids": stop,
        "after_stop": after_stop,
        "prediction": prediction,
        "sampling": SamplingParams(temperature=temperature, top_p=0.95, seed=seed),
    }
    together = generate(model, rows, **options)
    alone = [generate(model, [row], seeds=[seed + i], **options) for i, row in enumerate(rows)]
    assert list(together) == [single[0] for single in alone]
    assert together.forwards == max(single.forwards for single in alone)
    for trace, single in zip(together.extra["traces"], alone, strict=True):
        (want,) = single.extra["traces"]
        check_trace(trace, want["tokens"], want["steps"], want["confidence"])


# --- policies --------------------------------------------------------------------------


def rules(policy: str, tau: float = 0.5, comparison: str = "strict") -> Rules:
    return Rules(policy=policy, tau=tau, comparison=comparison, block_size=4)


def test_what_each_policy_reveals():
    confidence, entropy = [0.5, 0.9, 0.4, 0.9], [1.0, 0.5, 0.2, 0.7]
    assert rules("one_token").select(confidence, entropy) == [1]
    assert rules("threshold", 0.5).select(confidence, entropy) == [1, 3]
    assert rules("threshold", 0.5, "inclusive").select(confidence, entropy) == [0, 1, 3]
    assert rules("threshold", 0.9).select(confidence, entropy) == [1]
    assert rules("threshold", 0.9, "inclusive").select(confidence, entropy) == [1, 3]
    assert rules("entropy", 0.7).select(confidence, entropy) == [1, 2]
    assert rules("entropy", 0.7, "inclusive").select(confidence, entropy) == [1, 2, 3]
    assert rules("entropy", 0.1).select(confidence, entropy) == [2]
    assert rules("entropy", 0.0).select([1.0, 1.0], [0.0, 0.0]) == [0]
    assert rules("entropy", 0.0, "inclusive").select([1.0, 1.0], [0.0, 0.0]) == [0, 1]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 4)), min_size=1, max_size=8),
    st.sampled_from(list(POLICIES)),
    st.floats(0, 1),
    st.sampled_from(["strict", "inclusive"]),
)
def test_a_policy_always_reveals_and_never_less_than_the_best(values, policy, tau, comparison):
    confidence, entropy = [list(column) for column in zip(*values, strict=True)]
    picked = rules(policy, tau, comparison).select(confidence, entropy)
    assert picked == sorted(set(picked)) and picked
    best = entropy.index(min(entropy)) if policy == "entropy" else confidence.index(max(confidence))
    assert best in picked
    if len(picked) > 1 or policy == "one_token":
        left_out = [i for i in range(len(values)) if i not in picked]
        if policy == "entropy":
            assert all(entropy[i] >= max(entropy[p] for p in picked) for i in left_out)
        else:
            assert all(confidence[i] <= min(confidence[p] for p in picked) for i in left_out)


def test_entropy_leaves_out_the_mask_token_and_is_in_nats():
    logits = torch.full((2, 5), -1e4, dtype=torch.bfloat16)
    logits[0, :4] = 1.0
    logits[:, 4] = 9.0
    logits[1, 2] = 0.0
    values = entropies(logits, mask_id=4)
    assert values.dtype == torch.float32 and logits[0, 4] == 9.0
    torch.testing.assert_close(values, torch.tensor([math.log(4), 0.0]))


@pytest.mark.parametrize(
    "policy, tau, forwards",
    [
        ("one_token", 0.0, 10),
        ("threshold", 1.0, 10),
        ("threshold", 0.0, 3),
        ("entropy", 0.0, 10),
        ("entropy", 9.0, 3),
    ],
)
def test_forwards_are_counted(policy, tau, forwards):
    """Ten tokens in blocks of four: one a forward, or a block a forward; no forward more."""
    model, calls, counted = random_model(), [], []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape))
    result = generate(
        model,
        random_prompts(5, 3),
        max_new_tokens=10,
        mask_id=MASK,
        block_size=4,
        policy=policy,
        tau=tau,
        on_step=lambda row, count: counted.append((row, count)),
    )
    hook.remove()
    assert calls == [(2, 15)] * forwards and result.forwards == forwards
    assert [row.forwards for row in result] == [forwards] * 2
    want = [4, 4, 2] if forwards == 3 else [1] * 10
    assert counted == [(row, count) for count in want for row in (0, 1)]


def test_blocks_are_revealed_from_left_to_right():
    for policy, tau in [("one_token", 0.0), ("threshold", 0.3), ("entropy", 1.0)]:
        options = {"policy": policy, "tau": tau, "mask_id": MASK, "block_size": 4, "max_new_tokens": 11}
        for trace in generate(random_model(), random_prompts(3, 7, seed=5), **options).extra["traces"]:
            blocks = [trace["steps"][i : i + 4] for i in (0, 4, 8)]
            assert max(blocks[0]) < min(blocks[1]) and max(blocks[1]) < min(blocks[2])


def test_only_the_active_block_passes_the_head():
    model, read = random_model(), []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    generate(model, random_prompts(5, 3), max_new_tokens=6, mask_id=MASK, block_size=4, policy="one_token")
    hook.remove()
    assert read == [8, 6, 4, 2, 4, 2]


# --- the end of a row ------------------------------------------------------------------


def test_a_stop_token_counts_only_once_everything_left_of_it_is_known():
    model, late, spared = random_model(), 0, 0
    options = {"policy": "one_token", "mask_id": MASK, "block_size": 4, "max_new_tokens": 8}
    for prompt in random_prompts(*[8] * 10, seed=4):
        (whole,) = generate(model, [prompt], **options).extra["traces"]
        for stop in set(whole["tokens"]):
            end = whole["tokens"].index(stop)
            needed = max(whole["steps"][: end + 1])
            row = generate(model, [prompt], stop_ids=[stop], **options)
            assert row[0].new_tokens == whole["tokens"][: end + 1] and row[0].finish_reason == "stop"
            assert row[0].forwards == needed
            shown = [s if s is not None and s <= needed else None for s in whole["steps"]]
            assert row.extra["traces"][0]["steps"] == shown
            late, spared = late + (needed > whole["steps"][end]), spared + (needed < 8)
            full = generate(model, [prompt], stop_ids=[stop], after_stop="reveal", **options)
            assert full[0].new_tokens == row[0].new_tokens and full[0].finish_reason == "stop"
            assert full[0].forwards == 8 and full.extra["traces"] == [whole]
    assert late > 5 and spared > 5


def test_a_callback_ends_a_row_and_finished_rows_leave_the_batch():
    model, rows, ends = random_model(), random_prompts(3, 9, 4), [1, 4, 8]
    options = {"policy": "threshold", "tau": 0.4, "mask_id": MASK, "block_size": 4, "max_new_tokens": 8}
    free = generate(model, rows, **options)
    counts, shapes = [0, 0, 0], []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))

    def on_token(row: int, token: int) -> bool:
        counts[row] += 1
        return counts[row] == ends[row]

    result = generate(model, rows, on_token=on_token, **options)
    hook.remove()
    assert counts == ends and [row.finish_reason for row in result] == ["stop"] * 3
    for row, whole, end in zip(result, free, ends, strict=True):
        assert row.new_tokens == whole.new_tokens[:end]
    left = [[i for i, row in enumerate(result) if row.forwards > step] for step in range(result.forwards)]
    # Padding goes with the row that needed it.
    assert shapes == [(len(some), max(len(rows[i]) for i in some) + 8) for some in left]
    assert shapes[-1][0] < 3


def test_the_mask_token_is_never_emitted():
    model = fill(backbones.build_config(tiny("llada-debug"), attention="dense").build())
    with torch.no_grad():
        model.lm_head.weight[MASK] = (
            3 * model.lm_head.weight.abs().max() * torch.sign(model.lm_head.weight[0])
        )
    prompts = random_prompts(4, 6)
    for temperature in (0.0, 1.5):
        result = generate(
            model,
            prompts,
            max_new_tokens=12,
            mask_id=MASK,
            block_size=4,
            policy="threshold",
            tau=0.1,
            sampling=SamplingParams(temperature=temperature),
        )
        assert all(MASK not in row.new_tokens and len(row.new_tokens) == 12 for row in result)


def test_seeds_repeat_and_differ():
    options = {"max_new_tokens": 8, "mask_id": MASK, "block_size": 4}
    sampling = SamplingParams(temperature=1.5, seed=3)
    first = generate(random_model(), [[1, 2]] * 3, sampling=sampling, **options)
    assert list(first) == list(generate(random_model(), [[1, 2]] * 3, sampling=sampling, **options))
    assert len({tuple(row.new_tokens) for row in first}) == 3
    assert generate(random_model(), [[1, 2]], sampling=sampling, seeds=[5], **options)[0] == first[2]


def test_traces_are_plain_data():
    result = generate(
        random_model(), random_prompts(3, 5), max_new_tokens=6, mask_id=MASK, block_size=4, policy="threshold"
    )
    traces = result.extra["traces"]
    assert json.loads(json.dumps(traces)) == traces
    assert [t["prompt_tokens"] for t in traces] == [3, 5]
    assert {(t["policy"], t["tau"], t["block_size"]) for t in traces} == {("threshold", 0.9, 4)}
    entropy = generate(random_model(), [[1]], max_new_tokens=2, mask_id=MASK, block_size=4, policy="entropy")
    assert entropy.extra["traces"][0]["tau"] == 0.5


# --- temporal memory -------------------------------------------------------------------

BONUS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 0.5


class Remembering(backbones.Backbone):
    """Logits depend on the number of earlier forwards in which their position was masked."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(backbones.Backbone.Config):
        pass

    def forward(self, tokens, positions=None, attention_masks=None, readout_M=None, temporal=None):
        logits = super().forward(tokens, positions, attention_masks, readout_M)
        return logits + temporal.recall(tokens, readout_M)[None, :, None] * BONUS


class CountingMemory:
    """Counts, for each masked position, the forwards it was in."""

    def begin(self, masked_BL):
        self.masked, self.count = masked_BL.clone(), masked_BL * 0
        self.revealed_B = torch.zeros(len(masked_BL), dtype=torch.long)

    def recall(self, tokens_BL, readout_M):
        assert torch.equal(tokens_BL == MASK, self.masked), "told of every reveal in time"
        assert self.masked.flatten()[readout_M].all(), "only masked positions are served"
        counted_M = self.count.flatten()[readout_M]
        self.count = (self.count + 1) * self.masked
        return counted_M

    def revealed(self, rows, positions):
        for row, position in zip(rows, positions, strict=True):
            assert self.masked[row, position]
            self.masked[row, position] = False
            self.revealed_B[row] += 1
        self.count = self.count * self.masked

    def select(self, rows, length):
        self.masked, self.count = self.masked[list(rows), :length], self.count[list(rows), :length]
        self.revealed_B = self.revealed_B[list(rows)]


@functools.cache
def remembering() -> Remembering:
    return fill(Remembering.Config(**backbones.config_fields(tiny("llada-debug"), attention="dense")).build())


@settings(deadline=None, max_examples=20)
@given(
    rule=policies,
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    size=st.sampled_from([2, 5, 16]),
    stop=st.sets(st.integers(0, MASK - 1), max_size=8),
    seed=st.integers(0, 100),
)
def test_memory_sees_every_forward_and_every_reveal(rule, lengths, size, stop, seed):
    """Also outside the active block, across blocks, and when rows leave the batch."""
    rows, memory = random_prompts(*lengths, seed=seed), CountingMemory()
    options = {"policy": rule[0], "tau": rule[1]}
    result = generate(
        remembering(),
        rows,
        max_new_tokens=8,
        mask_id=MASK,
        block_size=size,
        stop_ids=stop,
        memory=memory,
        **options,
    )
    for row, trace, prompt in zip(result, result.extra["traces"], rows, strict=True):
        response, steps, confidence, text = reference.decode(
            random_model(), prompt, mask_id=MASK, new=8, size=size, stop=stop, bonus=BONUS, **options
        )
        assert row.new_tokens == text
        check_trace(trace, response, steps, confidence)


def test_memory_knows_masks_from_padding_and_how_much_is_revealed():
    """The mask token is id 0, with which shorter rows are padded."""
    seen: list[torch.Tensor] = []

    class First(CountingMemory):
        def begin(self, masked_BL):
            seen.append(masked_BL)
            super().begin(masked_BL)

        def recall(self, tokens_BL, readout_M):
            return torch.zeros(len(readout_M))

    memory = First()
    generate(remembering(), [[5, 6, 7], [8]], max_new_tokens=3, mask_id=0, block_size=4, memory=memory)
    assert seen[0].int().tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0]]
    assert memory.revealed_B.tolist() == [3, 3]


# --- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"policy": "treshold"}, "unknown policy 'treshold'; did you mean 'threshold'"),
        ({"policy": "threshold", "tau": 1.5}, "tau must be between 0 and 1, got 1.5"),
        ({"policy": "threshold", "tau": math.nan}, "tau must be between"),
        ({"policy": "entropy", "tau": -0.1}, "0 or more, got -0.1"),
        ({"policy": "entropy", "tau": math.inf}, "0 or more, got inf"),
        ({"comparison": "strickt"}, "unknown comparison 'strickt'; did you mean 'strict'"),
        ({"after_stop": "revel"}, "unknown after_stop 'revel'; did you mean 'reveal'"),
        ({"prediction": "shift"}, "unknown prediction 'shift'; did you mean 'shifted'"),
        ({"mask_id": VOCAB}, f"mask_id {VOCAB}.*{VOCAB} tokens"),
        ({"mask_id": -1}, "mask_id -1"),
        ({"mask_id": 1}, "prompt 0 holds the mask token 1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": CONTEXT}, f"{CONTEXT + 1}, longer than the {CONTEXT}"),
        ({"max_len": 3}, "longer than the 3"),
        ({"seeds": [1, 2]}, "2 seeds for 1 prompts"),
    ],
)
def test_options_that_do_not_fit_are_refused(change, message):
    model = random_model()
    hook = model.tok_embeddings.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    try:
        with pytest.raises(UserError, match=message):
            generate(model, [[1]], **{"max_new_tokens": 4, "mask_id": MASK, "block_size": 4, **change})
    finally:
        hook.remove()


def test_models_that_cannot_be_decoded_this_way_are_refused():
    options = {"max_new_tokens": 4, "mask_id": MASK, "block_size": 4}
    with pytest.raises(UserError, match="smollm2.*causal"):
        generate(random_model("smollm2-debug"), [[1]], **options)
    with pytest.raises(UserError, match="Linear is not a backbone"):
        generate(torch.nn.Linear(1, 1), [[1]], **options)
    with pytest.raises(UserError, match="prompt 0 is empty"):
        generate(random_model(), [[]], **options)


def test_an_empty_prompt_starts_from_bos_and_a_row_may_fill_the_context():
    options = {"mask_id": MASK, "block_size": 32, "policy": "threshold", "tau": 0.0}
    result = generate(random_model(), [[]], max_new_tokens=CONTEXT - 1, bos_id=2, **options)
    assert result[0].tokens[0] == 2 and len(result[0].tokens) == CONTEXT


def test_no_prompts_and_the_model_is_left_as_it_was():
    model = random_model()
    modules = dict(model.named_modules())
    empty = generate(model, [], max_new_tokens=4, mask_id=MASK, block_size=4)
    assert list(empty) == [] and empty.forwards == 0 and empty.extra == {"traces": []}
    assert generate(model, [[1]], max_new_tokens=4, mask_id=MASK, block_size=4).seconds > 0
    assert dict(model.named_modules()) == modules
