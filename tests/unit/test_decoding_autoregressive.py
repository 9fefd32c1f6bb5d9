"""Cached decoding against recomputation, transformers, and single runs."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext import backbones
from torchtitan_ext.decoding import Generation, KVCache, SamplingParams, autoregressive, decoder_for, generate
from torchtitan_ext.decoding.rotary import StepRotary, step_rotary
from torchtitan_ext.errors import UserError

CAUSAL = ["smollm2-debug", "qwen2_5-debug", "qwen3-debug"]
VOCAB, CONTEXT = 40, 96


@functools.cache
def random_model(flavor: str = "smollm2-debug") -> backbones.Backbone:
    """A tiny backbone with weights large enough that its greedy text varies."""
    size = dataclasses.replace(backbones.lookup(flavor), vocab_size=VOCAB, context=CONTEXT, n_layers=3)
    model = backbones.build_config(size, attention="dense").build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1))
    return model.eval().requires_grad_(False)


def recomputed(model: backbones.Backbone, tokens: list[int]) -> torch.Tensor:
    """Logits after the last token, without a cache."""
    positions = torch.arange(len(tokens))[None]
    return model(torch.tensor([tokens]), positions, model.get_attention_masks(positions))[0, -1]


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("flavor", CAUSAL)
@pytest.mark.parametrize("chunk", [512, 4])
def test_cached_logits_equal_recomputed_ones(flavor, chunk, monkeypatch):
    monkeypatch.setattr(autoregressive, "PREFILL_CHUNK", chunk)
    model, rows = random_model(flavor), random_prompts(1, 9, 4, 30)
    cache = KVCache(len(rows), capacity=8)
    with torch.inference_mode(), autoregressive.headless(model), step_rotary(model):
        logits_BV = autoregressive.prefill(model, cache, rows)
        steps = [logits_BV]
        grown = [list(row) for row in rows]
        for token in (3, 17, 0):
            grown = [[*row, token] for row in grown]
            steps.append(autoregressive.step(model, cache, torch.full((len(rows),), token)))
    assert cache.lengths == [len(row) for row in grown]
    for t, logits_BV in enumerate(steps):
        for b, row in enumerate(grown):
            want = recomputed(model, row[: len(rows[b]) + t])
            # These weights give logits of about 10, so that greedy text varies.
            scale = want.abs().max()
            torch.testing.assert_close(logits_BV[b] / scale, want / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("flavor", CAUSAL)
def test_greedy_equals_recomputation_and_the_model_is_left_as_it_was(flavor):
    model, rows = random_model(flavor), random_prompts(5, 1)
    modules = dict(model.named_modules())
    result = generate(model, rows, max_new_tokens=15)
    for prompt, row in zip(rows, result, strict=True):
        tokens = list(prompt)
        for _ in range(15):
            tokens.append(int(recomputed(model, tokens).argmax()))
        assert row.tokens == tokens and row.new_tokens == tokens[len(prompt) :]
        assert row.finish_reason == "length" and row.forwards == 15
    assert len({token for row in result for token in row.new_tokens}) > 4
    assert dict(model.named_modules()) == modules and model._skip_lm_head is False


@pytest.mark.parametrize(
    "flavor, name", [("smollm2-debug", "Llama"), ("qwen2_5-debug", "Qwen2"), ("qwen3-debug", "Qwen3")]
)
def test_greedy_equals_transformers(flavor, name):
    transformers = pytest.importorskip("transformers")
    model = random_model(flavor)
    values = {
        k: v
        for k, v in backbones.hf_config(model.config.size).items()
        if k not in ("architectures", "model_type")
    }
    config = getattr(transformers, f"{name}Config")(**values)
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    adapter = backbones.HFAdapter(model.config, None)
    reference.load_state_dict(adapter.to_hf(model.state_dict(), tied_head="keep"))
    for prompt in random_prompts(1, 7, 20):
        tokens = torch.tensor([prompt])
        want = reference.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert generate(model, [prompt], max_new_tokens=20)[0].tokens == want[0].tolist()


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    seed=st.integers(0, 100),
    stop=st.sets(st.integers(0, VOCAB - 1), max_size=8),
    temperature=st.sampled_from([0.0, 1.0]),
    flavor=st.sampled_from(CAUSAL),
)
def test_a_batch_equals_single_runs(lengths, seed, stop, temperature, flavor):
    model, rows = random_model(flavor), random_prompts(*lengths, seed=seed)
    options = {"max_new_tokens": 12, "stop_ids": stop}
    sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=seed)
    together = generate(model, rows, sampling=sampling, **options)
    alone = [
        generate(model, [row], sampling=dataclasses.replace(sampling, seed=seed + i), **options)[0]
        for i, row in enumerate(rows)
    ]
    assert list(together) == alone
    assert together.forwards == max(row.forwards for row in alone)
    assert together.new_tokens == sum(len(row.new_tokens) for row in alone)
    for row in together:
        assert 1 <= len(row.new_tokens) <= 12
        assert not stop & set(row.new_tokens[:-1])
        assert (row.finish_reason == "stop") == (row.new_tokens[-1] in stop)


def test_samples_of_one_prompt_differ_and_a_seed_repeats_them():
    model, sampling = random_model(), SamplingParams(temperature=1.5, seed=7)
    first = generate(model, [[1, 2]] * 3, max_new_tokens=12, sampling=sampling)
    again = generate(model, [[1, 2]] * 3, max_new_tokens=12, sampling=sampling)
    assert list(first) == list(again)
    assert len({tuple(row.new_tokens) for row in first}) == 3
    chosen = generate(model, [[1, 2]] * 2, max_new_tokens=12, sampling=sampling, seeds=[9, 9])
    assert chosen[0] == chosen[1] == first[2]


def test_sampled_text_follows_the_models_distribution():
    """Two tokens by enumeration: the frequency of each pair against the product of probabilities."""
    model, prompt, n = random_model(), [4, 8], 1500
    params = SamplingParams(temperature=2.0, top_k=3)
    pairs = [tuple(r.new_tokens) for r in generate(model, [prompt] * n, max_new_tokens=2, sampling=params)]
    from torchtitan_ext.decoding.sampling import probabilities

    first = probabilities(recomputed(model, prompt)[None], params)[0]
    total = 0.0
    for a in first.nonzero()[:, 0].tolist():
        second = probabilities(recomputed(model, [*prompt, a])[None], params)[0]
        for b in second.nonzero()[:, 0].tolist():
            p = float(first[a] * second[b])
            total += p
            assert abs(pairs.count((a, b)) / n - p) <= 4.5 * (p * (1 - p) / n) ** 0.5
    assert abs(total - 1) < 1e-5


def test_a_finished_row_leaves_the_batch():
    model, rows = random_model(), random_prompts(3, 3, 3)
    ends = [1, 6, 3]
    seen: list[int] = []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    counts = [0, 0, 0]

    def on_token(row: int, token: int) -> bool:
        counts[row] += 1
        return counts[row] == ends[row]

    free = generate(model, rows, max_new_tokens=10)
    seen.clear()
    result = generate(model, rows, max_new_tokens=10, on_token=on_token)
    hook.remove()
    assert seen == [3, 2, 2, 1, 1, 1]
    assert [len(row.new_tokens) for row in result] == [row.forwards for row in result] == ends
    assert [row.finish_reason for row in result] == ["stop"] * 3
    for row, whole, end in zip(result, free, ends, strict=True):
        assert row.new_tokens == whole.new_tokens[:end]


def test_callback_sees_every_token_in_order():
    seen: list[tuple[int, int]] = []
    result = generate(
        random_model(),
        random_prompts(2, 5),
        max_new_tokens=6,
        on_token=lambda row, token: seen.append((row, token)),
    )
    for i, row in enumerate(result):
        assert [token for r, token in seen if r == i] == row.new_tokens


def test_an_empty_prompt_starts_from_bos():
    model = random_model()
    want = generate(model, [[7]], max_new_tokens=5)[0]
    assert generate(model, [[]], max_new_tokens=5, bos_id=7)[0] == want
    with pytest.raises(UserError, match=r"prompt 1 is empty.*BOS"):
        generate(model, [[3], []], max_new_tokens=5)


def test_what_does_not_fit_is_refused_before_the_start():
    model = random_model()
    assert len(generate(model, [[1] * (CONTEXT - 2)], max_new_tokens=2)[0].tokens) == CONTEXT
    for options, message in (
        ({"max_new_tokens": 3}, f"prompt 1 has {CONTEXT - 2} tokens.*{CONTEXT + 1}.*{CONTEXT}"),
        ({"max_new_tokens": 2, "max_len": 50}, "longer than the 50"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 1, "seeds": [1]}, "1 seeds for 2 prompts"),
    ):
        with pytest.raises(UserError, match=message):
            generate(model, [[1], [1] * (CONTEXT - 2)], **options)
    with pytest.raises(UserError, match=f"token {VOCAB}.*{VOCAB}"):
        generate(model, [[VOCAB]], max_new_tokens=1)


def test_models_that_cannot_be_decoded_this_way_are_refused():
    size = dataclasses.replace(backbones.lookup("llada-debug"), n_layers=1)
    with pytest.raises(UserError, match=r"llada.*both directions"):
        generate(backbones.build_config(size, attention="dense").build(), [[1]], max_new_tokens=1)
    size = dataclasses.replace(backbones.lookup("smollm2-debug"), n_layers=1)
    with pytest.raises(UserError, match="dense"):
        generate(backbones.build_config(size, attention="flex").build(), [[1]], max_new_tokens=1)
    with pytest.raises(UserError, match="not a decoder"):
        generate(torch.nn.Linear(1, 1), [[1]], max_new_tokens=1)


def test_the_model_is_restored_after_an_error():
    model = random_model()
    modules = dict(model.named_modules())

    def fail(row: int, token: int) -> None:
        raise KeyError("callback")

    with pytest.raises(KeyError):
        generate(model, [[1]], max_new_tokens=3, on_token=fail)
    assert dict(model.named_modules()) == modules and model._skip_lm_head is False


@pytest.mark.parametrize("rows, dtype", [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
def test_step_rotary_equals_the_training_module(rows, dtype):
    rope = random_model("qwen3-debug").layers["0"].attention.rope
    width = rope.config.dim
    q, k = torch.randn(3, 5, 4, width, dtype=dtype), torch.randn(3, 5, 2, width, dtype=dtype)
    positions = torch.randint(CONTEXT, (rows, 5))
    fast = StepRotary(rope.cache)
    for place in (positions, positions, positions.flip(1)):
        for got, want in zip(fast(q, k, place), rope(q, k, place), strict=True):
            assert torch.equal(got, want) and got.dtype == dtype


def test_no_prompts_and_statistics():
    assert list(generate(random_model(), [], max_new_tokens=3)) == []
    result = generate(random_model(), random_prompts(2, 2), max_new_tokens=4)
    assert result.tokens_per_forward == 1 and result.forwards == 4 and result.seconds > 0
    assert result.tokens_per_second == pytest.approx(8 / result.seconds)
    assert Generation(results=[], forwards=0, seconds=0.0).tokens_per_second == 0


def test_decoders_by_method_name():
    assert decoder_for("ar") is generate and decoder_for("llama3") is generate
    with pytest.raises(UserError, match="did you mean 'ar'"):
        decoder_for("arr")
