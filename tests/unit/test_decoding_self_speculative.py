"""Drafting and verifying with one model: against plain decoding, recomputation and enumeration."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext import backbones
from torchtitan_ext.decoding import KVCache, SamplingParams, autoregressive, self_speculative
from torchtitan_ext.decoding.sampling import probabilities, row_generators
from torchtitan_ext.decoding.self_speculative import (
    Drafting,
    Session,
    StepLayout,
    accept_greedy,
    accept_sampled,
    decode_pattern,
    generate,
    prompt_layout,
)
from torchtitan_ext.errors import UserError

CONTEXT = 96


def small_config(vocab: int, flavor: str = "smollm2-debug") -> backbones.Backbone.Config:
    size = dataclasses.replace(backbones.lookup(flavor), vocab_size=vocab, context=CONTEXT, n_layers=2)
    return backbones.build_config(size, attention="dense")


@functools.cache
def random_model(vocab: int = 6, flavor: str = "smollm2-debug") -> backbones.Backbone:
    """A tiny backbone whose greedy text varies; few tokens, so that some drafts are right by chance."""
    model = small_config(vocab, flavor).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1))
    return model.eval().requires_grad_(False)


class PositionModel(backbones.Backbone):
    """Token p of any text is ``text(p)``, and a mask at p says so unless ``wrong(p)``."""

    MASK = 19

    @staticmethod
    def text(p):
        return (7 * p + 3) % 19

    def wrong(self, p):
        return p < 0

    def forward(self, tokens, positions=None, attention_masks=None, readout_M=None):
        assert positions is not None and readout_M is None
        super().forward(tokens, positions, attention_masks)
        positions = positions.expand_as(tokens)
        guess = (self.text(positions) + self.wrong(positions).long()) % 19
        target = torch.where(tokens == self.MASK, guess, self.text(positions + 1))
        hidden = torch.nn.functional.one_hot(target, self.config.dim).float()
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def position_model() -> PositionModel:
    model = PositionModel(small_config(20))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        model.lm_head.weight.copy_(torch.eye(20, model.config.dim))
    return model.eval()


def random_prompts(*lengths: int, vocab: int = 6, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def dense_logits(model, tokens: list[int], positions: list[int], mask_QK) -> torch.Tensor:
    """Logits of a sequence under any mask, without a cache, [Q, V]."""
    mask = torch.as_tensor(mask_QK)[None, None]
    return model(torch.tensor([tokens]), torch.tensor([positions]), mask)[0]


def assert_cache_holds(cache: KVCache, model, rows: list[list[int]]) -> None:
    """The cache is what a causal forward over exactly these rows writes."""
    assert cache.lengths == [len(row) for row in rows]
    for b, row in enumerate(rows):
        fresh = KVCache(1, capacity=len(row))
        autoregressive.forward(model, fresh, torch.tensor([row]))
        fresh.advance(len(row))
        for layer in range(len(model.layers)):
            for got, want in zip(cache.layer(layer), fresh.layer(layer), strict=True):
                scale = want.abs().max()
                got = got[b : b + 1, :, : len(row)]
                torch.testing.assert_close(got / scale, want / scale, rtol=0, atol=1e-5)


class Watched(Session):
    """A session that looks at its cache after every forward."""

    def prefill(self, prompts):
        verified = super().prefill(prompts)
        assert all(len(tokens) == 1 for tokens in verified)
        return self._grown([list(prompt) for prompt in prompts], verified)

    def step(self):
        verified = super().step()
        assert all(1 <= len(tokens) <= self.drafting.draft_length for tokens in verified)
        return self._grown(self.rows, verified)

    def select(self, rows):
        super().select(rows)
        self.rows = [self.rows[row] for row in rows]

    def _grown(self, rows, verified):
        self.rows = [[*row, *tokens] for row, tokens in zip(rows, verified, strict=True)]
        assert_cache_holds(self.cache, self.model, [row[:-1] for row in self.rows])
        return verified


def check_statistics(result, *, draft_length: int) -> None:
    accepted, histogram = result.extra["accepted"], result.extra["histogram"]
    every = [count for counts in accepted for count in counts]
    assert histogram == {count: every.count(count) for count in sorted(set(every))}
    assert all(1 <= count <= draft_length for count in every)
    assert result.forwards == max(row.forwards for row in result)
    for row, counts in zip(result, accepted, strict=True):
        assert row.forwards == 1 + len(counts)
        # All but the last forward's tokens were emitted, and of that one at least the first.
        assert 1 + sum(counts) - (counts[-1] - 1 if counts else 0) <= len(row.new_tokens) <= 1 + sum(counts)


# ---- greedy


@pytest.mark.parametrize("length", range(1, 17))
def test_greedy_equals_autoregressive_decoding(length):
    model = random_model()
    prompts = [[], *random_prompts(1, max(length - 1, 1), length, length + 1, seed=length)]
    want = autoregressive.generate(model, prompts, max_new_tokens=14, bos_id=2)
    options = {"max_new_tokens": 14, "bos_id": 2, "mask_id": 5, "draft_length": length}
    together = generate(model, prompts, **options)
    assert [row.tokens for row in together] == [row.tokens for row in want]
    assert [row.finish_reason for row in together] == ["length"] * 5
    check_statistics(together, draft_length=length)
    assert [generate(model, [prompt], **options)[0] for prompt in prompts] == list(together)
    if length == 1:
        assert together.forwards == want.forwards and together.tokens_per_forward == 1


@pytest.mark.parametrize("flavor", ["qwen2_5-debug", "qwen3-debug"])
def test_greedy_equals_autoregressive_decoding_in_other_families(flavor):
    model, prompts = random_model(6, flavor), random_prompts(3, 8)
    want = autoregressive.generate(model, prompts, max_new_tokens=16)
    with mock.patch.object(self_speculative, "Session", Watched):
        got = generate(model, prompts, max_new_tokens=16, mask_id=0, draft_length=3)
    assert [row.tokens for row in got] == [row.tokens for row in want]


def reference(model, prompt: list[int], *, steps: int, mask_id: int, length: int, beta: float):
    """Greedy decoding of one row by its definition, everything recomputed; (tokens, accepted)."""

    def forward(prefix, drafts, first_block):
        n, tokens = len(prefix), [*prefix, *drafts]
        part = [0] * len(tokens)
        where = list(range(len(part)))
        for j in range(first_block, len(drafts) + 1):
            tokens += [mask_id] * length
            where += range(n + j, n + j + length)
            part += [j + 1] * length
        size = len(tokens)
        allowed = torch.zeros(size, size, dtype=torch.bool)
        for q, k in itertools.product(range(size), repeat=2):
            if part[q] == 0:
                allowed[q, k] = part[k] == 0 and where[k] <= where[q]
            else:
                seen = n + part[q] - 1
                allowed[q, k] = (part[k] == 0 and where[k] < seen) or part[k] == part[q]
        logits = dense_logits(model, tokens, where, allowed)
        masks = logits[n + len(drafts) :].unflatten(0, (-1, length))
        return logits[n - 1 :][: len(drafts) + 1], masks

    ar, masks = forward(prompt, [], 0)
    text, accepted = [*prompt, int(ar[0].argmax())], []
    drafts = [text[-1], *masks[0, 1:].argmax(-1).tolist()]
    for _ in range(steps):
        ar, masks = forward(text[:-1], drafts, 1)
        mixed = beta * ar[1:] + (1 - beta) * masks[:, 0]
        a, targets = 1, mixed.argmax(-1).tolist()
        while a < length and drafts[a] == targets[a - 1]:
            a += 1
        text += [*drafts[1:a], targets[a - 1]]
        accepted.append(a)
        drafts = [text[-1], *masks[a - 1, 1:].argmax(-1).tolist()]
    return text, accepted


@pytest.mark.parametrize("beta", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_greedy_follows_the_definition(beta, length):
    """Drafts, acceptance and text; with beta = 1 wrong drafts would not show in the text."""
    model, prompts, new = random_model(4), random_prompts(1, 6, 3, vocab=4, seed=5), 24
    options = {"max_new_tokens": new, "mask_id": 3, "draft_length": length, "beta": beta}
    got = generate(model, prompts, **options)
    for prompt, row, accepted in zip(prompts, got, got.extra["accepted"], strict=True):
        want, counts = reference(model, prompt, steps=len(accepted), mask_id=3, length=length, beta=beta)
        assert row.tokens == want[: len(prompt) + new]
        assert accepted == counts
    assert length == 1 or len(got.extra["histogram"]) > 1
    assert got.extra["beta"] == beta and got.extra["draft_length"] == length


@pytest.mark.parametrize("chunk, prompts", [(4, (9, 3, 4, 8, 1)), (4, (8, 8)), (5, (11,))])
def test_long_prompts_come_in_chunks(chunk, prompts, monkeypatch):
    model, rows = random_model(), random_prompts(*prompts)
    whole = generate(model, rows, max_new_tokens=10, mask_id=5, draft_length=3)
    seen: list[int] = []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    monkeypatch.setattr(autoregressive, "PREFILL_CHUNK", chunk)
    monkeypatch.setattr(self_speculative, "Session", Watched)
    assert list(generate(model, rows, max_new_tokens=1, mask_id=5, draft_length=3))
    hook.remove()
    longest = max(prompts)
    pieces = [min(chunk, longest - begin) for begin in range(0, longest, chunk)]
    pieces[-1] += 3
    assert seen[: len(pieces)] == pieces
    chunked = generate(model, rows, max_new_tokens=10, mask_id=5, draft_length=3)
    assert list(chunked) == list(whole) and chunked.extra == whole.extra


def test_one_new_token_is_one_forward():
    model, calls = random_model(), []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape))
    result = generate(model, random_prompts(4, 7), max_new_tokens=1, mask_id=5, draft_length=4)
    hook.remove()
    assert calls == [(2, 7 + 4)] and result.forwards == 1
    assert result.extra["accepted"] == [[], []] and result.extra["histogram"] == {}


def test_the_head_runs_only_where_it_is_needed():
    model, seen = random_model(), []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:-1].numel()))
    for beta, verifier in ((1.0, [4]), (0.0, [4]), (0.5, [4, 4])):
        seen.clear()
        result = generate(model, [[1, 2]], max_new_tokens=9, mask_id=5, draft_length=4, beta=beta)
        assert seen == [1, 3] + [*verifier, 3] * (result.forwards - 1)
    hook.remove()


# ---- known drafts


@pytest.mark.parametrize("length", [1, 3, 16])
def test_perfect_drafts_are_all_accepted(length):
    model = position_model()
    result = generate(model, [[0] * 5], max_new_tokens=1 + 3 * length, mask_id=19, draft_length=length)
    assert result[0].new_tokens == [model.text(p) for p in range(5, 6 + 3 * length)]
    assert result.extra["accepted"] == [[length] * 3] and result.extra["histogram"] == {length: 3}
    assert result.tokens_per_forward == (1 + 3 * length) / 4


def test_each_row_accepts_up_to_its_own_wrong_draft():
    model, length = position_model(), 4
    model.wrong = lambda p: p % 10 == 0
    prompts, new = [[0] * 3, [1] * 6, [2] * 8, [3] * 6], 30
    counts: list[tuple[int, int]] = []
    options = {"max_new_tokens": new, "mask_id": 19, "draft_length": length}
    with mock.patch.object(self_speculative, "Session", Watched):
        result = generate(model, prompts, on_step=lambda b, count: counts.append((b, count)), **options)
    for i, (prompt, row) in enumerate(zip(prompts, result, strict=True)):
        assert row.new_tokens == [model.text(p) for p in range(len(prompt), len(prompt) + new)]
        want, n, emitted = [], len(prompt), 1
        while emitted < new:
            # Draft 0 at n is certain; a wrong one at a multiple of 10 after it is where the run ends.
            want.append(next((a for a in range(1, length) if (n + a) % 10 == 0), length))
            n, emitted = n + want[-1], emitted + want[-1]
        assert result.extra["accepted"][i] == want and len(set(want)) > 1
        assert [count for b, count in counts if b == i] == [1, *want]


def test_beta_0_trusts_the_mask_slots():
    model, length = position_model(), 4
    model.wrong = lambda p: p % 5 == 0
    result = generate(
        model, [[0] * 5, [0] * 7], max_new_tokens=1 + 3 * length, mask_id=19, draft_length=length, beta=0.0
    )
    for n, row in zip((5, 7), result, strict=True):
        # The first token is the AR head's, everything after it the masks', wrong or not.
        guesses = [(model.text(p) + (p % 5 == 0)) % 19 for p in range(n + 1, n + 1 + 3 * length)]
        assert row.new_tokens == [model.text(n), *guesses]
    assert result.extra["accepted"] == [[length] * 3] * 2


def test_a_stop_token_inside_an_accepted_run_ends_the_row_there():
    model, length = position_model(), 8
    prompts = [[0] * 5, [0] * 9]
    for p in range(5, 30):
        stop = model.text(p)
        options = {"max_new_tokens": 30, "stop_ids": [stop]}
        want = autoregressive.generate(model, prompts, **options)
        got = generate(model, prompts, mask_id=19, draft_length=length, **options)
        assert [(r.tokens, r.finish_reason) for r in got] == [(r.tokens, r.finish_reason) for r in want]
        check_statistics(got, draft_length=length)


def test_callbacks_see_every_token_in_order_and_can_end_a_row():
    model, events = position_model(), []
    taken = [0, 0]

    def on_token(row: int, token: int) -> bool:
        events.append(("token", row, token))
        taken[row] += 1
        return row == 0 and taken[0] == 4

    result = generate(
        model,
        [[0] * 2, [0] * 3],
        max_new_tokens=8,
        mask_id=19,
        draft_length=5,
        on_token=on_token,
        on_step=lambda row, count: events.append(("step", row, count)),
    )
    text = model.text
    want = [("step", 0, 1), ("token", 0, text(2)), ("step", 1, 1), ("token", 1, text(3)), ("step", 0, 5)]
    want += [("token", 0, text(p)) for p in (3, 4, 5)]  # cut short by the callback
    want += [("step", 1, 5), *(("token", 1, text(p)) for p in range(4, 9))]
    want += [("step", 1, 5), ("token", 1, text(9)), ("token", 1, text(10))]  # cut short by the length
    assert events == want
    assert [row.finish_reason for row in result] == ["stop", "length"]
    assert [row.forwards for row in result] == [2, 3] and result.forwards == 3
    assert result.extra["accepted"] == [[5], [5, 5]]


def test_a_finished_row_leaves_the_batch():
    model, seen = position_model(), []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    stop = model.text(7)
    generate(
        model, [[0] * 3, [0] * 8, [0] * 10], max_new_tokens=12, mask_id=19, draft_length=3, stop_ids=[stop]
    )
    hook.remove()
    assert seen == [(3, 13), (3, 12), (3, 12), (2, 12), (2, 12)]


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_up_to_the_end_of_the_context(length):
    for model, mask in ((random_model(), 5), (position_model(), 19)):
        prompts = [[1] * (CONTEXT - 11), [1] * 50]
        want = autoregressive.generate(model, prompts, max_new_tokens=11)
        got = generate(model, prompts, max_new_tokens=11, mask_id=mask, draft_length=length)
        assert [row.tokens for row in got] == [row.tokens for row in want]
        assert len(got[0].tokens) == CONTEXT
    alone = generate(model, [[1] * (CONTEXT - 1)], max_new_tokens=1, mask_id=19, draft_length=length)
    assert len(alone[0].tokens) == CONTEXT


# ---- batches and the cache


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    stop=st.sets(st.integers(0, 5), max_size=2),
    length=st.integers(1, 6),
    new=st.integers(1, 14),
    chunk=st.sampled_from([512, 4]),
)
def test_any_batch_keeps_its_cache_and_equals_autoregressive_decoding(
    lengths, seed, stop, length, new, chunk
):
    model, prompts = random_model(), random_prompts(*lengths, seed=seed)
    options = {"max_new_tokens": new, "stop_ids": stop, "bos_id": 1}
    want = autoregressive.generate(model, prompts, **options)
    with (
        mock.patch.object(self_speculative, "Session", Watched),
        mock.patch.object(autoregressive, "PREFILL_CHUNK", chunk),
    ):
        got = generate(model, prompts, mask_id=seed % 6, draft_length=length, **options)
    assert [(r.tokens, r.finish_reason) for r in got] == [(r.tokens, r.finish_reason) for r in want]
    check_statistics(got, draft_length=length)


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
    stop=st.sets(st.integers(0, 5), max_size=1),
    length=st.integers(1, 5),
    temperature=st.sampled_from([0.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    beta=st.sampled_from([1.0, 0.5, 0.0]),
)
def test_a_batch_equals_single_runs(lengths, seed, stop, length, temperature, top_p, beta):
    model, prompts = random_model(), random_prompts(*lengths, seed=seed)
    sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    options = {
        "max_new_tokens": 12,
        "stop_ids": stop,
        "mask_id": 5,
        "draft_length": length,
        "beta": beta,
        "sampling": sampling,
    }
    with mock.patch.object(self_speculative, "Session", Watched):
        together = generate(model, prompts, **options)
    alone = [generate(model, [row], seeds=[seed + i], **options) for i, row in enumerate(prompts)]
    assert list(together) == [run[0] for run in alone]
    assert together.extra["accepted"] == [run.extra["accepted"][0] for run in alone]
    check_statistics(together, draft_length=length)


def test_a_session_by_hand():
    """Rows chosen again and again, in any order, go on as they would have."""
    model, prompts = random_model(4), random_prompts(5, 2, 3, vocab=4)
    drafting = Drafting(mask_id=3, draft_length=3)
    want = [row.new_tokens for row in autoregressive.generate(model, prompts, max_new_tokens=30)]
    with torch.inference_mode(), autoregressive.headless(model):
        session = Watched(model, drafting, row_generators([0, 1, 2]), longest=40)
        texts = session.prefill(prompts)
        for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 2]):
            session.select(order)
            texts = [texts[i] for i in order]
            want = [want[i] for i in order]
            texts = [[*old, *new] for old, new in zip(texts, session.step(), strict=True)]
            for text, whole in zip(texts, want, strict=True):
                assert text == whole[: len(text)]


# ---- masks


def see(query: tuple, key: tuple) -> bool:
    """The table: may a token of a step attend to what lies in a slot?"""
    if key[0] == "prefix":
        return True
    if query[0] == "draft":
        return key[0] == "draft" and key[1] <= query[1]
    if key[0] == "draft":
        return key[1] < query[1]
    return key[0] == "mask" and key[1] == query[1]


def step_tokens(length: int) -> list[tuple]:
    drafts = [("draft", i) for i in range(length)]
    return drafts + [("mask", j, s) for j in range(1, length + 1) for s in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("lengths", [[4], [4, 4], [4, 1, 6], [2, 9]])
def test_both_forms_of_the_mask_against_the_table(length, lengths):
    layout = StepLayout(length, longest=11, context=CONTEXT)
    forms = [layout.gathered(torch.tensor(lengths), max(lengths))]
    if len(set(lengths)) == 1:
        forms.append(layout.sliced(lengths[0]))
    for slots, positions, mask in forms:
        assert mask.shape[1:] == (length + length**2, max(lengths) + length + length**2)
        rows = max(slots.shape[0], positions.shape[0], mask.shape[0])
        for b, n in enumerate(lengths[:rows]):
            tokens = step_tokens(length)
            own_slots = slots.expand(rows, -1)[b].tolist()
            content = {slot: ("prefix",) for slot in range(n)}
            assert not content.keys() & set(own_slots) and len(set(own_slots)) == len(tokens)
            content |= dict(zip(own_slots, tokens, strict=True))
            # Those that stay are where the next forward looks for them.
            assert own_slots[:length] == list(range(n, n + length))
            for q, query in enumerate(tokens):
                row = mask.expand(rows, -1, -1)[b, q].tolist()
                assert row == [k in content and see(query, content[k]) for k in range(mask.shape[2])]
                ahead = query[1] if query[0] == "draft" else query[1] + query[2]
                assert positions.expand(rows, -1)[b, q] == n + ahead


def test_the_pattern_of_two_drafts_written_out():
    want = """
    ppp d. .. .. .
    ppp dd .. .. .
    ppp d. mm .. .
    ppp d. mm .. .
    ppp dd .. mm .
    ppp dd .. mm .
    """
    rows = ["".join(line.split()) for line in want.split("\n") if line.strip()]
    assert decode_pattern(2, prefix=3).tolist() == [[c != "." for c in row] for row in rows]


@pytest.mark.parametrize("begin, end, lengths", [(0, 6, [6]), (0, 6, [6, 2, 1]), (4, 7, [7, 3, 5, 4])])
@pytest.mark.parametrize("masks", [1, 3])
def test_the_mask_of_the_prompt(begin, end, lengths, masks):
    slots, positions, mask = prompt_layout(
        torch.tensor(lengths), begin=begin, end=end, masks=masks, context=CONTEXT
    )
    assert slots.tolist() == list(range(begin, end + masks))
    for b, n in enumerate(lengths):
        for q, slot in enumerate(slots.tolist()):
            in_block = slot >= end
            assert positions[b, q] == (n + slot - end if in_block else slot)
            want = [(k < n or k >= end) if in_block else k <= slot for k in range(end + masks)]
            assert mask[b, q].tolist() == want


def test_positions_stop_at_the_end_of_the_context():
    layout = StepLayout(3, longest=20, context=10)
    for positions in (layout.sliced(8)[1][0], layout.gathered(torch.tensor([8, 2]), 8)[1][0]):
        assert positions.tolist() == [8, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]
    _, positions, _ = prompt_layout(torch.tensor([9]), begin=0, end=9, masks=3, context=10)
    assert positions[0].tolist() == [*range(9), 9, 9, 9]


# ---- acceptance


def test_greedy_acceptance_of_every_small_case():
    for drafts in itertools.product(range(2), repeat=3):
        for targets in itertools.product(range(2), repeat=3):
            count, follows = accept_greedy(torch.tensor([drafts]), torch.tensor([targets]))
            a = 1
            while a < 3 and drafts[a] == targets[a - 1]:
                a += 1
            assert (int(count), int(follows)) == (a, targets[a - 1])


def test_sampled_acceptance_by_enumeration():
    """Sum over drafts and outcomes: the tokens follow p exactly, for any q."""
    generator = torch.Generator().manual_seed(3)
    p = torch.rand(2, 5, generator=generator).double() ** 2
    q = torch.rand(1, 5, generator=generator).double() ** 3
    p[0, 1] = q[0, 3] = 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    first = torch.zeros(5).double()
    for d in range(5):
        if q[0, d] == 0:
            continue
        keep = min(1.0, float(p[0, d] / q[0, d]))
        for level, accepted in ((keep - 1e-9, True), (keep + 1e-9, False)):
            if not 0 <= level < 1:
                continue
            count, follows = accept_sampled(
                torch.tensor([[0, d]]), p[None], q[None], torch.tensor([[level]], dtype=torch.float64)
            )
            assert int(count) == (2 if accepted else 1)
            follows = follows[0] / follows[0].sum()
            if accepted:
                torch.testing.assert_close(follows, p[1])
                first[d] += q[0, d] * keep
            else:
                first += q[0, d] * (1 - keep) * follows
    torch.testing.assert_close(first, p[0], rtol=0, atol=1e-12)


def test_sampled_acceptance_stops_at_the_first_rejection():
    p = torch.full((1, 4, 3), 1 / 3)
    q = torch.tensor([[[0.9, 0.1, 0.0]] * 3])
    for pattern in itertools.product([0.1, 0.9], repeat=3):  # accepted below 1/3 / 0.9 = 0.37
        count, follows = accept_sampled(
            torch.zeros(1, 4, dtype=torch.long), p, q, torch.tensor([pattern], dtype=torch.float64)
        )
        want = next((i + 1 for i, level in enumerate(pattern) if level > 0.5), 4)
        assert int(count) == want
        residual = torch.tensor([[0.0, 1 / 3 - 0.1, 1 / 3]])
        torch.testing.assert_close(follows, residual if want < 4 else p[:, 3])


def test_nothing_left_of_p_falls_back_to_p():
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    q = torch.tensor([[[0.5, 0.5000001]]])
    level = torch.tensor([[1 - 1e-12]], dtype=torch.float64)
    count, follows = accept_sampled(torch.tensor([[0, 1]]), p, q, level)
    assert int(count) == 1 and follows.tolist() == [[0.5, 0.5]]


# ---- the distribution of the whole algorithm, by enumeration


class Script:
    """A row's choices in the place of its generator: given ones first, then the first of each."""

    def __init__(self, given: tuple[int, ...]):
        self.given, self.taken, self.sizes = given, [], []
        self.weight, self.emitted = 1.0, 0

    def choose(self, size: int) -> int:
        choice = self.given[len(self.taken)] if len(self.taken) < len(self.given) else 0
        self.taken.append(choice)
        self.sizes.append(size)
        return choice

    def siblings(self) -> list[tuple[int, ...]]:
        """Other choices at every place after the given ones; each leaf is reached once."""
        return [
            (*self.taken[:i], other)
            for i in range(len(self.given), len(self.taken))
            for other in range(1, self.sizes[i])
        ]


def enumerated(model, prompt: list[int], *, new: int, **options) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``generate``: all draws and all acceptances, each once."""
    waiting: list[Script] = []
    certain = True  # whether the next draw is the verifier's, or the drafts'

    def draw(probs, scripts):
        nonlocal certain
        tokens = []
        for row, script in zip(probs.double(), scripts, strict=True):
            done = script.emitted >= new  # what the row draws now is never looked at
            token = 0 if done else script.choose(len(row))
            script.weight *= 1.0 if done else float(row[token] / row.sum())
            script.emitted += certain
            tokens.append(token)
        certain = options["draft_length"] == 1
        return torch.tensor(tokens)

    def uniforms(scripts, device):
        waiting[:] = scripts
        levels = [1 - 1e-12 if script.choose(2) else 0.0 for script in scripts]
        return torch.tensor(levels, dtype=torch.float64)

    def accept(drafts, p, q, levels):
        nonlocal certain
        certain = True
        count, follows = accept_sampled(drafts, p, q, levels)
        for b, script in enumerate(waiting[:: levels.shape[1]]):
            for i, level in enumerate(levels[b].tolist()):
                d = drafts[b, i + 1]
                keep = min(1.0, float(p[b, i, d].double() / q[b, i, d].double())) if q[b, i, d] > 0 else 0.0
                script.weight *= keep if level == 0 else 1 - keep
                if level > 0:
                    # Later levels are not looked at: count their first value only.
                    rest = script.taken[len(script.taken) - levels.shape[1] + i + 1 :]
                    script.weight *= float(not any(rest))
                    break
            script.emitted += int(count[b]) - 1
        return count, follows

    def first_sample(logits, params, scripts):
        nonlocal certain
        certain = True
        return draw(probabilities(logits, params), scripts)

    total: dict[tuple[int, ...], float] = {}
    wave: list[tuple[int, ...]] = [()]
    with (
        mock.patch.object(self_speculative, "draw", draw),
        mock.patch.object(self_speculative, "uniforms", uniforms),
        mock.patch.object(self_speculative, "accept_sampled", accept),
        mock.patch.object(self_speculative, "sample", first_sample),
        mock.patch.object(self_speculative, "row_generators", lambda _: scripts),
    ):
        while wave:
            scripts = [Script(given) for given in wave]
            result = generate(model, [prompt] * len(wave), max_new_tokens=new, **options)
            for row, script in zip(result, scripts, strict=True):
                output = tuple(row.new_tokens)
                total[output] = total.get(output, 0.0) + script.weight
            wave = [given for script in scripts for given in script.siblings()]
    return total


def exact(model, prompt: list[int], *, new: int, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every output of plain autoregressive decoding."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(new):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in found.items():
            tokens = [*prompt, *text]
            causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
            logits = dense_logits(model, tokens, list(range(len(tokens))), causal)[-1:]
            for token, p in enumerate(probabilities(logits, sampling)[0].tolist()):
                longer[(*text, token)] = weight * p
        found = longer
    return found


@functools.cache
def soft_model(vocab: int) -> backbones.Backbone:
    """A model of which no token has a probability near 0 or 1."""
    model = small_config(vocab).build()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + (parameter.ndim == 1))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "vocab, length, new, sampling",
    [
        (5, 2, 2, SamplingParams(temperature=1.0)),
        (5, 1, 3, SamplingParams(temperature=1.0)),
        (4, 2, 3, SamplingParams(temperature=1.0)),
        (3, 3, 3, SamplingParams(temperature=2.0)),
        (5, 2, 2, SamplingParams(temperature=1.3, top_k=3)),
        (5, 2, 2, SamplingParams(temperature=1.0, top_p=0.8)),
    ],
)
def test_output_follows_the_models_distribution_exactly(vocab, length, new, sampling):
    model, prompt = soft_model(vocab), [1, 0, 2]
    got = enumerated(model, prompt, new=new, mask_id=vocab - 1, draft_length=length, sampling=sampling)
    want = exact(model, prompt, new=new, sampling=sampling)
    assert abs(sum(got.values()) - 1) < 1e-4
    for text, p in want.items():
        assert abs(got.get(text, 0.0) - p) < 1e-5, text
    assert max(want.values()) < 0.9


def test_sampled_pairs_have_the_models_frequencies():
    model, prompt, n = soft_model(5), [4, 1], 1500
    sampling = SamplingParams(temperature=1.0, seed=11)
    result = generate(
        model, [prompt] * n, max_new_tokens=3, mask_id=4, draft_length=3, sampling=sampling, beta=1.0
    )
    texts = [tuple(row.new_tokens) for row in result]
    for text, p in exact(model, prompt, new=3, sampling=sampling).items():
        assert abs(texts.count(text) / n - p) <= 5 * (p * (1 - p) / n) ** 0.5 + 1 / n
    assert set(result.extra["histogram"]) == {1, 2, 3}
    again = generate(model, [prompt] * 2, max_new_tokens=3, mask_id=4, draft_length=3, sampling=sampling)
    assert list(again) == list(result)[:2]
    same = {"max_new_tokens": 3, "mask_id": 4, "draft_length": 3, "sampling": sampling}
    assert generate(model, [prompt], seeds=[12], **same)[0] == result[1]


# ---- what is refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"draft_length": 0}, "draft_length must be at least 1, got 0"),
        ({"beta": 1.5}, "beta must be between 0.*got 1.5"),
        ({"beta": -0.1}, "beta"),
        ({"beta": float("nan")}, "beta.*nan"),
        ({"mask_id": 6}, "mask_id 6.*6 tokens"),
        ({"mask_id": -1}, "mask_id -1"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": CONTEXT - 1}, f"prompt 1 has 2 tokens.*longer than the {CONTEXT}"),
        ({"max_len": 5}, "longer than the 5"),
        ({"seeds": [1]}, "1 seeds for 2 prompts"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_forward(options, message):
    model, calls = random_model(), []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: calls.append(args))
    usual = {"max_new_tokens": 4, "mask_id": 5, "draft_length": 2}
    with pytest.raises(UserError, match=message):
        generate(model, [[], [1, 2]], bos_id=0, **(usual | options))
    hook.remove()
    assert not calls


def test_prompts_and_models_are_checked_like_in_plain_decoding():
    usual = {"max_new_tokens": 4, "mask_id": 5, "draft_length": 2}
    with pytest.raises(UserError, match=r"prompt 1 is empty.*BOS"):
        generate(random_model(), [[3], []], **usual)
    with pytest.raises(UserError, match="token 6"):
        generate(random_model(), [[6]], **usual)
    with pytest.raises(UserError, match="not a decoder"):
        generate(torch.nn.Linear(1, 1), [[1]], **usual)
    assert list(generate(random_model(), [], **usual)) == []


def test_the_model_is_restored_after_an_error():
    model = random_model()
    modules = dict(model.named_modules())

    def fail(row: int, count: int) -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError):
        generate(model, [[1]], max_new_tokens=3, mask_id=5, draft_length=2, on_step=fail)
    assert dict(model.named_modules()) == modules and model._skip_lm_head is False
