"""Names of decoding strategies, and what they bind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_ext import backbones
from torchtitan_ext.decoding import autoregressive, block_diffusion, self_speculative
from torchtitan_ext.decoding.interface import Generation
from torchtitan_ext.decoding.strategies import Strategy, decoder_of, parse
from torchtitan_ext.errors import UserError

VOCAB, MASK, SIZE = 40, 39, 4


def random_model(**config: Any) -> backbones.Backbone:
    """A tiny backbone whose config has these values besides its own."""
    size = dataclasses.replace(
        backbones.lookup("smollm2-debug"), vocab_size=VOCAB, context=64, n_layers=2
    )  # one layer's keys are the same for every mask
    plain = backbones.build_config(size, attention="dense")
    model = plain.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25 + (parameter.ndim == 1))
    kind = dataclasses.make_dataclass(
        "Config",
        [(key, type(value), value) for key, value in config.items()],
        bases=(type(plain),),
        kw_only=True,
    )
    model.config = kind(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})
    return model.eval().requires_grad_(False)


def masked_model(**config: Any) -> backbones.Backbone:
    return random_model(mask_token_id=MASK, block_size=SIZE, **config)


@pytest.mark.parametrize(
    "text, strategy, label",
    [
        ("ar", Strategy(kind="ar"), "AR"),
        ("tidar", Strategy(kind="tidar"), "TiDAR"),
        ("tidar:8", Strategy(kind="tidar", draft_length=8), "TiDAR, 8 drafts"),
        ("tidar:8:0.5", Strategy(kind="tidar", draft_length=8, beta=0.5), "TiDAR, 8 drafts, beta 0.5"),
        ("tidar::0", Strategy(kind="tidar", beta=0.0), "TiDAR, beta 0"),
        ("confidence", Strategy(kind="confidence"), "Confidence max, 1 a forward"),
        ("confidence:2", Strategy(kind="confidence", tokens_per_forward=2), "Confidence max, 2 a forward"),
        ("left_to_right", Strategy(kind="left_to_right"), "Left to right, 1 a forward"),
        (
            "left_to_right:2",
            Strategy(kind="left_to_right", tokens_per_forward=2),
            "Left to right, 2 a forward",
        ),
        ("threshold", Strategy(kind="threshold"), "Confidence > 0.9"),
        ("threshold:0.7", Strategy(kind="threshold", threshold=0.7), "Confidence > 0.7"),
    ],
)
def test_names(text, strategy, label):
    assert parse(text) == strategy
    assert strategy.name == text and strategy.label == label


@pytest.mark.parametrize(
    "text, name",
    [
        ("tidar:8:1", "tidar:8"),
        ("confidence:1", "confidence"),
        ("threshold:0.90", "threshold"),
        (" ar ", "ar"),
    ],
)
def test_other_spellings_have_one_name(text, name):
    assert parse(text).name == name


@given(
    kind=st.sampled_from(["ar", "tidar", "confidence", "threshold", "left_to_right"]),
    count=st.integers(1, 64),
    draft=st.none() | st.integers(1, 64),
    number=st.floats(0, 1),
)
def test_every_name_reads_as_its_strategy(kind, count, draft, number):
    values: dict[str, Any] = {
        "ar": {},
        "tidar": {"draft_length": draft, "beta": number},
        "confidence": {"tokens_per_forward": count},
        "left_to_right": {"tokens_per_forward": count},
        "threshold": {"threshold": number},
    }[kind]
    strategy = Strategy(kind=kind, **values)
    assert parse(strategy.name) == strategy


@pytest.mark.parametrize(
    "text, message",
    [
        ("confidense", "unknown decoding strategy 'confidense'; did you mean 'confidence'.*allowed: ar, "),
        ("", "unknown decoding strategy ''"),
        ("AR", "unknown decoding strategy 'AR'"),
        ("ar:1", r"'ar:1' has too many values \(allowed: ar\)"),
        ("tidar:8:1:2", r"too many values \(allowed: tidar\[:DRAFT\[:BETA\]\]\)"),
        ("confidence:2:3", r"too many values \(allowed: confidence\[:K\]\)"),
        ("tidar:x", "DRAFT must be a whole number of at least 1, got 'x'"),
        ("tidar:0", "DRAFT must be a whole number of at least 1, got '0'"),
        ("confidence:1.5", "K must be a whole number of at least 1, got '1.5'"),
        ("left_to_right:-1", "K must be a whole number of at least 1, got '-1'"),
        ("threshold:1.5", "TAU must be a number between 0 and 1, got '1.5'"),
        ("threshold:nan", "TAU must be a number between 0 and 1, got 'nan'"),
        ("tidar:8:high", "BETA must be a number between 0 and 1, got 'high'"),
    ],
)
def test_wrong_names_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_ar_needs_no_mask_token():
    assert decoder_of(parse("ar"), random_model()) is autoregressive.generate


@pytest.mark.parametrize("text", ["tidar", "confidence", "threshold", "left_to_right"])
@pytest.mark.parametrize("config, key", [({}, "mask_token_id"), ({"mask_token_id": MASK}, "block_size")])
def test_the_others_do(text, config, key):
    with pytest.raises(UserError, match=f"{text}.*methods tidar, block_diffusion.*has no {key}"):
        decoder_of(parse(text), random_model(**config))


@pytest.mark.parametrize("config, clean", [({}, "causal"), ({"clean_attention": "block"}, "block")])
@pytest.mark.parametrize(
    "text, options",
    [
        ("confidence", {"policy": "confidence", "tokens_per_forward": 1}),
        ("confidence:3", {"policy": "confidence", "tokens_per_forward": 3}),
        ("left_to_right:2", {"policy": "left_to_right", "tokens_per_forward": 2}),
        ("threshold:0.1", {"policy": "threshold", "threshold": 0.1}),
    ],
)
def test_block_strategies_bind_the_models_values(text, options, config, clean):
    model, prompts = masked_model(**config), [[1, 2, 3, 4, 5, 6], [3]]
    got = decoder_of(parse(text), model)(model, prompts, max_new_tokens=9)
    want = block_diffusion.generate(
        model, prompts, max_new_tokens=9, mask_id=MASK, block_size=SIZE, clean=clean, **options
    )
    assert list(got) == list(want) and got.extra == want.extra
    other = block_diffusion.generate(
        model,
        prompts,
        max_new_tokens=9,
        mask_id=MASK,
        block_size=SIZE,
        clean="block" if clean == "causal" else "causal",
        **options,
    )
    assert list(got) != list(other)


def test_more_tokens_than_a_block_has_are_refused():
    model = masked_model()
    with pytest.raises(UserError, match="between 1 and the block size 4, got 5"):
        decoder_of(parse("confidence:5"), model)(model, [[1]], max_new_tokens=4)


@pytest.mark.parametrize(
    "text, draft_length, beta", [("tidar", SIZE, 1.0), ("tidar:7", 7, 1.0), ("tidar:2:0.5", 2, 0.5)]
)
def test_tidar_binds_drafts_and_beta(text, draft_length, beta, monkeypatch):
    calls: list[dict[str, Any]] = []

    def generate(model, prompts, **options) -> Generation:
        calls.append({"model": model, "prompts": prompts, **options})
        return Generation(results=[], forwards=0, seconds=0.0)

    monkeypatch.setattr(self_speculative, "generate", generate)
    model = masked_model()
    decoder_of(parse(text), model)(model, [[1]], max_new_tokens=3)
    assert calls == [
        {
            "model": model,
            "prompts": [[1]],
            "max_new_tokens": 3,
            "mask_id": MASK,
            "draft_length": draft_length,
            "beta": beta,
        }
    ]


def test_tidar_needs_causal_clean_tokens():
    with pytest.raises(UserError, match="tidar:8.*clean_attention = 'block'"):
        decoder_of(parse("tidar:8"), masked_model(clean_attention="block"))


def test_tidar_decodes_as_ar_does():
    """Drafts that the autoregressive head verifies leave its greedy text as it is."""
    model, prompts = masked_model(), [[1, 2, 3, 4, 5], [3]]
    want = autoregressive.generate(model, prompts, max_new_tokens=9)
    got = decoder_of(parse("tidar:3"), model)(model, prompts, max_new_tokens=9)
    assert [row.new_tokens for row in got] == [row.new_tokens for row in want]
