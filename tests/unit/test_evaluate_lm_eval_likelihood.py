"""Likelihoods of all methods: against slower ways to compute them, batches, draws."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import lm_eval_models
from torchtitan_ext import masks
from torchtitan_ext.attention import build_mask
from torchtitan_ext.decoding import clean_stream, decoder_for
from torchtitan_ext.decoding.strategies import decoder_of, parse
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import decoding, likelihood
from torchtitan_ext.evaluation.likelihood import Draws, Pair

PAIRS = [
    Pair([70, 71, 72], [73, 74]),
    Pair([65], [66]),
    Pair([80, 81, 82, 83, 84, 85, 86, 87], [88, 89, 90, 91, 92]),
    Pair([97, 98, 99, 100], [101, 102, 103]),
    Pair([97, 98], [101, 102, 103]),
]


def scores(name: str, pairs=PAIRS, **options):
    loaded = lm_eval_models.loaded(name)
    options = {"batch_size": 2, **options}
    return likelihood.scores(loaded.model, pairs, method=loaded.method, **options)


@pytest.mark.parametrize("name", sorted(lm_eval_models.ALL))
def test_scores_do_not_depend_on_the_batch_and_keep_their_order(name):
    draws = Draws(samples=3, seed=5)
    alone = [scores(name, [pair], batch_size=1, draws=draws)[0] for pair in PAIRS]
    for batch_size in (2, 64):
        together = scores(name, batch_size=batch_size, draws=draws)
        assert [s.greedy for s in together] == [s.greedy for s in alone]
        for one, other in zip(together, alone, strict=True):
            assert one.nats == pytest.approx(other.nats, abs=2e-4)
    assert len({round(s.nats, 3) for s in alone}) == len(PAIRS)
    turned = scores(name, PAIRS[::-1], draws=draws)
    assert [s.nats for s in turned[::-1]] == pytest.approx([s.nats for s in alone], abs=2e-4)


@pytest.mark.parametrize("name", sorted(set(lm_eval_models.CAUSAL) - {"pause"}))
def test_causal_scores_are_those_of_one_text_alone(name):
    model = lm_eval_models.loaded(name).model
    for pair, score in zip(PAIRS, scores(name), strict=True):
        assert score.nats == pytest.approx(-decoding.text_nats(model, *pair), abs=2e-4)


@pytest.mark.parametrize("name", sorted(lm_eval_models.CAUSAL))
def test_what_autoregressive_decoding_says_is_greedy_and_nothing_else_is(name):
    loaded = lm_eval_models.loaded(name)
    decode = decoder_for(loaded.method)
    if name == "t2mlr":
        decode = partial(decode, prefill="exact")
    elif name in ("tidar", "block_diffusion", "wedlm", "alodlm"):
        decode = decoder_of(parse("ar"), loaded.model, method=loaded.method)
        if name == "alodlm":
            assert decode.func is clean_stream.generate
    prompts = [list(pair.context) for pair in PAIRS]
    new = [list(row.new_tokens) for row in decode(loaded.model, prompts, max_new_tokens=3)]
    said = scores(name, [Pair(p, n) for p, n in zip(prompts, new, strict=True)])
    assert all(score.greedy for score in said)
    other = [[*n[:-1], (n[-1] + 1) % 200] for n in new]
    unsaid = scores(name, [Pair(p, n) for p, n in zip(prompts, other, strict=True)])
    assert not any(score.greedy for score in unsaid)
    assert all(a.nats > b.nats for a, b in zip(said, unsaid, strict=True))


def test_probabilities_of_all_next_tokens_add_up_to_one():
    for name in ("pause", "alodlm", "lstm", "mdlm"):
        model = lm_eval_models.loaded(name).model
        every = [Pair([70, 71], [token]) for token in range(model.config.vocab_size)]
        total = sum(math.exp(s.nats) for s in scores(name, every, batch_size=128, draws=Draws(samples=1)))
        assert total == pytest.approx(1, abs=1e-3)


def test_recurrence_as_deep_as_in_training_is_another_number():
    exact, trained = scores("t2mlr"), scores("t2mlr", recurrence="trained")
    assert abs(exact[2].nats - trained[2].nats) > 1e-3


# --- estimates -------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12), st.integers(0, 99))
def test_hidden_places_and_their_weights(sizes, samples, seed):
    units, begin = [], 3
    for size in sizes:
        units.append(list(range(begin, begin + size)))
        begin += size
    drawn = likelihood.hide(units, samples=samples, generator=torch.Generator().manual_seed(seed))
    assert len(drawn) == samples
    chosen: list[Counter[int]] = [Counter() for _ in units]
    for places, weights in drawn:
        assert places == sorted(set(places)) and len(places) == len(weights)
        for unit, counts in zip(units, chosen, strict=True):
            own = [w for p, w in zip(places, weights, strict=True) if p in unit]
            assert own == [len(unit) / len(own)] * len(own)  # never empty, and n / l each
            counts[len(own)] += 1
    for unit, counts in zip(units, chosen, strict=True):
        # Spread evenly: every number of hidden places as often as any other, within one.
        often = [counts[length] for length in range(1, len(unit) + 1)]
        assert max(often) - min(often) <= 1


def test_every_place_is_hidden_as_often_as_any_other():
    drawn = likelihood.hide([[0, 1, 2, 3]], samples=4000, generator=torch.Generator().manual_seed(0))
    counts = Counter(place for places, _ in drawn for place in places)
    assert all(abs(counts[place] / 4000 - 2.5 / 4) < 0.03 for place in range(4))


def reference_estimate(name: str, pair: Pair, draws: Draws) -> float:
    """Draw by draw and token by token, without padding."""
    model = lm_eval_models.loaded(name).model
    config, text = model.config, [*pair.context, *pair.continuation]
    places = list(range(len(pair.context), len(text)))
    blocks = sorted({p // config.block_size for p in places})
    units = [[p for p in places if p // config.block_size == b] for b in blocks]
    drawn = likelihood.hide(
        units if name == "blocks" else [places],
        samples=draws.samples,
        generator=likelihood.generator_for(text, seed=draws.seed),
    )
    total = 0.0
    for hidden, weights in drawn:
        masked = [config.mask_token_id if i in hidden else token for i, token in enumerate(text)]
        positions = torch.arange(len(text))[None]
        if name == "blocks":
            tokens, both = torch.tensor([text + masked]), positions.repeat(1, 2)
            mask = masks.doubled_blocks(both, block_size=4, clean="block")
            logits = model(tokens, both, build_mask(mask, "dense"))[0, len(text) :]
        else:
            mask = build_mask(masks.bidirectional_document(positions), "dense")
            logits = model(torch.tensor([masked]), positions, mask)[0]
        back = 1 if name == "dream" else 0
        for place, weight in zip(hidden, weights, strict=True):
            total += weight * float(logits[place - back].log_softmax(-1)[text[place]])
    return total / draws.samples


@pytest.mark.parametrize("name", ["mdlm", "dream", "blocks"])
def test_estimate_is_the_mean_over_its_draws(name):
    draws = Draws(samples=4, seed=1)
    for pair, score in zip(PAIRS, scores(name, draws=draws), strict=True):
        assert score.nats == pytest.approx(reference_estimate(name, pair, draws), abs=5e-4)
        assert not score.greedy


def test_estimate_depends_on_its_seed_alone():
    first = scores("mdlm", draws=Draws(samples=2, seed=0))
    assert scores("mdlm", draws=Draws(samples=2, seed=0)) == first
    other = scores("mdlm", draws=Draws(samples=2, seed=1))
    assert other[2].nats != first[2].nats
    # One token is hidden in every draw: nothing is random.
    assert other[1].nats == pytest.approx(first[1].nats, abs=1e-5)


@pytest.mark.parametrize("window, differs", [("full", False), ("current", True)])
def test_temporal_modules_as_in_the_first_forward_of_decoding(monkeypatch, window, differs):
    model = lm_eval_models.loaded("tdlm").model
    monkeypatch.setattr(model.config, "window", window)
    with_modules = scores("tdlm", draws=Draws(samples=2))
    before = model.layers["0"].temporal.wo.weight.clone()
    model.layers["0"].temporal.wo.weight.zero_()
    try:
        without = scores("tdlm", draws=Draws(samples=2))
    finally:
        model.layers["0"].temporal.wo.weight.copy_(before)
    # Nothing is remembered, and only "current" lets a forward see itself.
    assert (abs(with_modules[0].nats - without[0].nats) > 1e-3) == differs


def test_pairs_that_cannot_be_scored():
    with pytest.raises(UserError, match="pair 0 has no context"):
        scores("ar", [Pair([], [1])])
    with pytest.raises(UserError, match="pair 1 has no continuation"):
        scores("mdlm", [Pair([1], [2]), Pair([1], [])])
    limit = likelihood.longest(lm_eval_models.loaded("ar").model)
    with pytest.raises(UserError, match=f"{limit} \\+ 2 tokens, the model scores at most {limit + 1}"):
        scores("ar", [Pair([1] * limit, [2, 3])])
    with pytest.raises(UserError, match="at least 1, got 0"):
        Draws(samples=0)
    # Pauses take room.
    plain, pause = (likelihood.longest(lm_eval_models.loaded(n).model) for n in ("ar", "pause"))
    assert pause == plain // 3
