"""Decoding with the recurrent cache: exact prefill, Jacobi prefill, batches, against recomputation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import t2mlr as reference
from tests.unit.test_t2mlr_model import build, logits
from torchtitan_ext.decoding.sampling import SamplingParams
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.t2mlr.decode import decode


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("flavor", ["smollm2-debug", "qwen2_5-debug", "qwen3-debug"])
def test_cached_decoding_equals_recomputation(flavor):
    model = build(flavor).eval()
    prompt = prompt_of(7, 0)
    expected = reference.decode(model, prompt, new=8)
    assert decode(model, [prompt], max_new_tokens=8, prefill="exact")[0].new_tokens == expected


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=12)
def test_deep_enough_jacobi_prefill_equals_exact_token_for_token(lengths, seed):
    """Batches of unequal prompts too, and each row as if it were alone."""
    model = build().eval()
    prompts = [prompt_of(n, seed + i) for i, n in enumerate(lengths)]
    exact = decode(model, prompts, max_new_tokens=6, prefill="exact")
    jacobi = decode(model, prompts, max_new_tokens=6, prefill="jacobi", depth=max(lengths))
    assert [r.new_tokens for r in jacobi] == [r.new_tokens for r in exact]
    for prompt, row in zip(prompts, exact, strict=True):
        assert decode(model, [prompt], max_new_tokens=6, prefill="exact")[0].new_tokens == row.new_tokens


def test_shallow_prefill_is_another_function():
    """Else the test above would compare nothing."""
    model = build().eval()
    prompts = [prompt_of(12, seed) for seed in range(6)]
    exact = decode(model, prompts, max_new_tokens=12, prefill="exact")
    shallow = decode(model, prompts, max_new_tokens=12, depth=1)
    assert [r.new_tokens for r in shallow] != [r.new_tokens for r in exact]


def test_rows_that_stop_leave_the_others_alone():
    model = build().eval()
    prompts = [prompt_of(n, n) for n in (3, 9, 5)]
    alone = [decode(model, [p], max_new_tokens=10, prefill="exact")[0].new_tokens for p in prompts]
    stop = alone[1][2]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in alone]
    batch = decode(model, prompts, max_new_tokens=10, prefill="exact", stop_ids=[stop])
    assert [r.new_tokens for r in batch] == expected


def test_sampled_rows_equal_single_runs():
    model = build().eval()
    prompts = [prompt_of(n, n) for n in (2, 6)]
    sampling = SamplingParams(temperature=1.0, seed=3)
    batch = decode(model, prompts, max_new_tokens=8, sampling=sampling, depth=16)
    for i, prompt in enumerate(prompts):
        one = decode(model, [prompt], max_new_tokens=8, sampling=sampling, seeds=[3 + i], depth=16)
        assert one[0].new_tokens == batch[i].new_tokens


def test_closed_gates_decode_as_the_backbone():
    from tests.unit.test_t2mlr_model import plain
    from torchtitan_ext.decoding.autoregressive import generate

    model = build(gates=0.0).eval()
    prompts = [prompt_of(n, n) for n in (4, 11)]
    ours = decode(model, prompts, max_new_tokens=10)
    theirs = generate(plain("smollm2-debug", model).eval(), prompts, max_new_tokens=10)
    assert [r.new_tokens for r in ours] == [r.new_tokens for r in theirs]


def test_parallel_logits_predict_the_decoded_tokens():
    """Training's forward at a sufficient depth over the decoded text says what decoding said."""
    model = build(forward_depth=24).eval()
    prompt = prompt_of(8, 1)
    row = decode(model, [prompt], max_new_tokens=16, prefill="exact")[0]
    positions = torch.arange(24)[None]
    with torch.no_grad():
        predicted = logits(model, torch.tensor([row.tokens]), positions)[0].argmax(-1)
    assert predicted[7:23].tolist() == row.new_tokens


@pytest.mark.parametrize(
    ("knobs", "words"), [({"prefill": "both"}, "'both'"), ({"depth": 0}, "at least 1, got 0")]
)
def test_bad_knobs_are_refused(knobs, words):
    with pytest.raises(UserError, match=words):
        decode(build().eval(), [[1]], max_new_tokens=1, **knobs)
