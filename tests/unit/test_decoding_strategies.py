"""Names of decoding strategies, and what they bind."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_ext import backbones, registry
from torchtitan_ext.decoding import (
    autoregressive,
    block_diffusion,
    clean_stream,
    masked_diffusion,
    self_speculative,
)
from torchtitan_ext.decoding.choice import reports_steps
from torchtitan_ext.decoding.depth_cache import cost_report
from torchtitan_ext.decoding.interface import Generation, decoder_for
from torchtitan_ext.decoding.strategies import FORMS, KINDS, Strategy, decoder_of, family_of, parse
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.alodlm.decode import LoopedPasses

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
        ("one_token", Strategy(kind="one_token"), "One token a forward"),
        ("entropy", Strategy(kind="entropy"), "Entropy < 0.5"),
        ("entropy:1.5", Strategy(kind="entropy", nats=1.5), "Entropy < 1.5"),
        ("stream", Strategy(kind="stream"), "Streaming"),
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
        ("entropy:0.50", "entropy"),
        (" ar ", "ar"),
    ],
)
def test_other_spellings_have_one_name(text, name):
    assert parse(text).name == name


@given(
    kind=st.sampled_from(list(FORMS)),
    count=st.integers(1, 64),
    draft=st.none() | st.integers(1, 64),
    number=st.floats(0, 1),
    nats=st.floats(0, 100),
)
def test_every_name_reads_as_its_strategy(kind, count, draft, number, nats):
    values: dict[str, Any] = {
        "ar": {},
        "tidar": {"draft_length": draft, "beta": number},
        "confidence": {"tokens_per_forward": count},
        "left_to_right": {"tokens_per_forward": count},
        "threshold": {"threshold": number},
        "one_token": {},
        "entropy": {"nats": nats},
        "stream": {},
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
        ("one_token:2", r"'one_token:2' has too many values \(allowed: one_token\)"),
        ("stream:4", r"too many values \(allowed: stream\)"),
        ("entropy:-1", "NATS must be a number of at least 0, got '-1'"),
        ("entropy:inf", "NATS must be a number of at least 0, got 'inf'"),
        ("one-token", "did you mean 'one_token'"),
        ("tidar:8:high", "BETA must be a number between 0 and 1, got 'high'"),
    ],
)
def test_wrong_names_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_ar_needs_no_mask_token():
    assert decoder_of(parse("ar"), random_model()) is autoregressive.generate


@pytest.mark.parametrize("text", ["tidar", "confidence", "threshold", "left_to_right"])
def test_the_others_do(text):
    with pytest.raises(
        UserError, match=f"'{text}' needs a model trained with a mask token; this Backbone has"
    ):
        decoder_of(parse(text), random_model())
    with pytest.raises(
        UserError, match=f"'{text}' needs a model trained on masked blocks.*has no block_size"
    ):
        decoder_of(parse(text), random_model(mask_token_id=MASK))


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


# --- methods with a decoder of their own -----------------------------------------------

MODELS = {
    "looped": ("smollm2-debug", {"kind": "middle", "start": 1, "end": 2, "loops": 2}),
    "mdlm": ("llada-debug", {"block_size": SIZE}),
    "tdlm": ("llada-debug", {"block_size": SIZE, "layers": [0, 1], "heads": 2, "head_dim": 6}),
    "wedlm": ("smollm2-debug", {"window": 3}),
    "alodlm": ("smollm2-debug", {"start": 1, "end": 3, "passes": 2, "window": 3}),
}


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setitem(registry.METHODS, "tdlm", "torchtitan_ext.methods.tdlm")


@functools.cache
def trained(method: str) -> Any:
    """A tiny random model of a method."""
    flavor, knobs = MODELS[method]
    module = registry.method(method)
    mask = {} if method == "looped" else {"mask_token_id": 200}
    model = module.model_registry(
        flavor, attention="dense", section=module.Section(**mask, **knobs)
    ).model.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_weights()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or "gate" in name:
                parameter.normal_(std=0.2, generator=generator)
    return model.eval().requires_grad_(False)


def decoded(method: str, decode) -> tuple[list[Any], Any]:
    """New tokens and forwards of each row, and what the decoder reports."""
    generation = decode(trained(method), [[1, 2, 3, 4, 5, 6], [3]], max_new_tokens=9)
    return [(row.new_tokens, row.forwards) for row in generation], generation.extra


@pytest.mark.parametrize(
    "method, family",
    [("looped", "plain"), ("mdlm", "denoising"), ("tdlm", "denoising"), ("wedlm", "streaming"),
     ("alodlm", "streaming")],
)  # fmt: skip
def test_families(method, family):
    assert family_of(trained(method)) == family


def test_a_family_of_every_other_model():
    assert family_of(masked_model()) == family_of(masked_model(clean_attention="block")) == "blocks"
    assert family_of(random_model()) == "plain" and {k for kinds in KINDS.values() for k in kinds} == set(
        FORMS
    )


@pytest.mark.parametrize(
    "text, options",
    [
        ("one_token", {"policy": "one_token"}),
        ("confidence", {"policy": "one_token"}),
        ("confidence:1", {"policy": "one_token"}),
        ("threshold", {"policy": "threshold", "tau": 0.9}),
        ("threshold:0.03", {"policy": "threshold", "tau": 0.03}),
        ("entropy", {"policy": "entropy", "tau": 0.5}),
        ("entropy:4", {"policy": "entropy", "tau": 4.0}),
    ],
)
def test_policies_of_masked_diffusion(text, options):
    model = trained("mdlm")
    got = decoded("mdlm", decoder_of(parse(text), model, method="mdlm"))
    bound = functools.partial(
        masked_diffusion.generate, mask_id=200, block_size=SIZE, prediction=model.config.prediction, **options
    )
    assert got == decoded("mdlm", bound)
    traces = got[1]["traces"]
    assert {trace["policy"] for trace in traces} == {options["policy"]}
    assert reports_steps(decoder_of(parse(text), model, method="mdlm"), model)


def test_a_method_reveals_with_its_own_memory():
    """The decoder is the method's, not that of the family."""
    bound = decoder_of(parse("threshold:0.03"), trained("tdlm"), method="tdlm")
    decode: Any = decoder_for("tdlm")
    own = functools.partial(decode, policy="threshold", tau=0.03)
    assert decoded("tdlm", bound) == decoded("tdlm", own)
    assert decoded("tdlm", bound) != decoded("tdlm", functools.partial(own, window="off"))


@pytest.mark.parametrize("method", ["wedlm", "alodlm"])
def test_stream_is_the_methods_own_decoder(method):
    assert decoder_of(parse("stream"), trained(method), method=method) is decoder_for(method)


def test_ar_of_a_streaming_model_of_one_pass_is_the_plain_decoder():
    tokens, extra = decoded("wedlm", decoder_of(parse("ar"), trained("wedlm")))
    assert tokens == decoded("wedlm", autoregressive.generate)[0]
    assert set(extra) == set(cost_report(trained("wedlm").config.size, [], prompt_layers=1))
    assert not reports_steps(decoder_of(parse("ar"), trained("wedlm"), method="wedlm"), trained("wedlm"))


def test_ar_of_a_recurrent_core_makes_all_passes():
    bound = functools.partial(clean_stream.generate, passes=LoopedPasses)
    got = decoded("alodlm", decoder_of(parse("ar"), trained("alodlm"), method="alodlm"))
    assert got == decoded("alodlm", bound)
    with pytest.raises(ValueError, match="name it"):
        decoder_of(parse("ar"), trained("alodlm"))


def test_ar_without_a_mask_token_is_the_methods_own_decoder():
    assert decoder_of(parse("ar"), trained("looped"), method="looped") is decoder_for("looped")
    assert decoder_of(parse("ar"), random_model(), method="ar") is decoder_for("ar")


DENOISING = r"\(allowed: confidence:1, entropy, one_token, threshold\)"


@pytest.mark.parametrize(
    "method, text, allowed",
    [
        ("mdlm", "ar", DENOISING),
        ("mdlm", "tidar:4", DENOISING),
        ("mdlm", "confidence:2", DENOISING),
        ("mdlm", "left_to_right", DENOISING),
        ("tdlm", "stream", DENOISING),
        ("wedlm", "tidar", r"\(allowed: ar, stream\)"),
        ("wedlm", "threshold", r"\(allowed: ar, stream\)"),
        ("alodlm", "entropy", r"\(allowed: ar, stream\)"),
    ],
)
def test_wrong_combinations_say_what_the_method_has(method, text, allowed):
    with pytest.raises(UserError, match=f"^method '{method}' has no decoding strategy '{text}' {allowed}$"):
        decoder_of(parse(text), trained(method), method=method)


@pytest.mark.parametrize("text", ["one_token", "entropy", "stream"])
def test_models_of_blocks_and_plain_ones_have_none_of_these(text):
    allowed = r"\(allowed: ar, confidence, left_to_right, threshold, tidar\)"
    with pytest.raises(UserError, match=f"method 'tidar' has no decoding strategy '{text}' {allowed}"):
        decoder_of(parse(text), masked_model(), method="tidar")
    with pytest.raises(
        UserError, match=rf"'{text}' needs .* mask token; method 'looped' has none \(allowed: ar\)"
    ):
        decoder_of(parse(text), trained("looped"), method="looped")


def test_the_methods_own_decoder_needs_its_name():
    with pytest.raises(ValueError, match="name it"):
        decoder_of(parse("stream"), trained("wedlm"))
