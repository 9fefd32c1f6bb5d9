"""Decoding of looped and pause-token models against recomputation without a cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_looped_model import MIDDLE, build, logits
from torchtitan_ext.decoding.autoregressive import Session, headless
from torchtitan_ext.decoding.sampling import SamplingParams
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.looped import pause
from torchtitan_ext.methods.looped.decode import PauseSession, decode

KINDS = {
    "middle": {"loops": 3, **MIDDLE},
    "full": {"kind": "full", "loops": 2},
    "pause": {"kind": "pause", "pause_tokens": 2, "scale": 8.0},
}


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def greedy_by_recomputation(model, prompt: list[int], count: int) -> list[int]:
    """No cache at all: the training forward over everything, for every new token."""
    pauses = getattr(model.config, "pause_tokens", 0)
    tokens = list(prompt)
    for _ in range(count):
        seen = pause.expand_tokens(torch.tensor([tokens]), pauses=pauses, pause_id=263)
        last = logits(model, seen, torch.arange(seen.shape[1])[None])[0, -1]
        if pauses:
            last[263] = float("-inf")
        tokens.append(int(last.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("flavor", ["smollm2-debug", "qwen2_5-debug", "qwen3-debug"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_decoding_equals_recomputation(flavor, kind):
    model = build(flavor, **KINDS[kind]).eval()
    prompts = [prompt_of(n, n) for n in (1, 4, 7, 9)]
    expected = [greedy_by_recomputation(model, prompt, 6) for prompt in prompts]
    assert len({token for row in expected for token in row}) > 2  # else there is nothing to compare
    assert [row.new_tokens for row in decode(model, prompts, max_new_tokens=6)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_step_are_those_of_the_training_forward(kind):
    model = build(**KINDS[kind]).eval()
    pauses = getattr(model.config, "pause_tokens", 0)
    tokens = prompt_of(12, 4)
    seen = pause.expand_tokens(torch.tensor([tokens]), pauses=pauses, pause_id=263)
    session_class = PauseSession if pauses else Session
    with torch.inference_mode(), headless(model):
        session = session_class(model, 1, 12)
        got = [session.prefill([tokens[:5]]), *(session.step(torch.tensor([t])) for t in tokens[5:])]
    with torch.no_grad():
        whole = logits(model, seen, torch.arange(seen.shape[1])[None])[0, pauses :: 1 + pauses]
    spoken = slice(0, 263)  # the pause's own logit is masked
    torch.testing.assert_close(torch.cat(got)[:, spoken], whole[4:, spoken], atol=1e-5, rtol=1e-5)


def test_a_prompt_longer_than_a_chunk(monkeypatch):
    """Later chunks read the keys that the same pass left for the earlier ones."""
    monkeypatch.setattr("torchtitan_ext.decoding.autoregressive.PREFILL_CHUNK", 5)
    for knobs in KINDS.values():
        model = build(**knobs).eval()
        prompt = prompt_of(13, 2)
        expected = greedy_by_recomputation(model, prompt, 4)
        assert decode(model, [prompt], max_new_tokens=4)[0].new_tokens == expected


@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    seed=st.integers(0, 5),
    kind=st.sampled_from(sorted(KINDS)),
)
@settings(deadline=None, max_examples=12)
def test_batches_equal_single_rows(lengths, seed, kind):
    model = build(**KINDS[kind]).eval()
    prompts = [prompt_of(n, seed + i) for i, n in enumerate(lengths)]
    sampling = SamplingParams(temperature=1.0, seed=3)
    batch = decode(model, prompts, max_new_tokens=6, sampling=sampling)
    for i, prompt in enumerate(prompts):
        alone = decode(model, [prompt], max_new_tokens=6, sampling=sampling, seeds=[3 + i])
        assert alone[0].new_tokens == batch[i].new_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_stop_leave_the_others_alone(kind):
    model = build(**KINDS[kind]).eval()
    prompts = [prompt_of(n, n) for n in (3, 9, 5)]
    alone = [decode(model, [p], max_new_tokens=10)[0].new_tokens for p in prompts]
    stop = alone[1][2]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in alone]
    batch = decode(model, prompts, max_new_tokens=10, stop_ids=[stop])
    assert [r.new_tokens for r in batch] == expected


def test_a_pause_is_never_spoken():
    model = build(kind="pause").eval()
    with torch.no_grad():  # the pause's row of the tied head wins everywhere, but for the mask
        model.lm_head.weight[263] = 0
        model.lm_head.weight[263, :] = 50 * torch.sign(torch.randn(64))
    tokens = decode(
        model,
        [prompt_of(6, s) for s in range(4)],
        max_new_tokens=12,
        sampling=SamplingParams(temperature=2.0, seed=0),
    )
    assert all(263 not in row.new_tokens for row in tokens)


def test_lengths_count_tokens_without_their_pauses():
    model = build(kind="pause", pause_tokens=1).eval()  # 2048 positions: 1024 tokens
    with pytest.raises(UserError, match="longer than the 1024 tokens allowed"):
        decode(model, [prompt_of(1020, 0)], max_new_tokens=5)
    with pytest.raises(UserError, match="longer than the 8 tokens allowed"):
        decode(model, [prompt_of(6, 0)], max_new_tokens=5, max_len=8)


def test_an_lstm_has_no_decoder():
    with pytest.raises(UserError, match="'lstm' has no decoder"):
        decode(build(kind="lstm", lstm_hidden=16, lstm_layers=1), [[1]], max_new_tokens=1)
