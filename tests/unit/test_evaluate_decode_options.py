"""Words of a command line as options of a decoder."""

from __future__ import annotations

import functools
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext import registry
from torchtitan_ext.decoding import decoder_for
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.decode_options import available, parse_options


def decode(
    model, prompts, *, max_new_tokens: int, stop_ids=(), bos_id: int | None = None, on_token: object = None,
    steps: int = 4, beta: float = 1.0, depth: int | None = None, how: Literal["fast", "exact"] = "fast",
    policy: str | None = None, cached: bool = True, seeds: list[int] | None = None, **kwargs: object,
) -> None:  # fmt: skip
    """A decoder with an option of every type."""


def test_options_are_what_a_word_can_express_and_evaluation_does_not_give():
    assert list(available(decode)) == ["steps", "beta", "depth", "how", "policy", "cached"]
    assert "steps" in available(functools.partial(decode, beta=0.5))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        (" ", {}),
        ("steps=8", {"steps": 8}),
        (" steps = 8 , beta = 0.5", {"steps": 8, "beta": 0.5}),
        ("beta=1", {"beta": 1.0}),
        ("depth=none,policy=none", {"depth": None, "policy": None}),
        ("depth=3,policy=3", {"depth": 3, "policy": "3"}),
        ("how=exact,cached=false", {"how": "exact", "cached": False}),
    ],
)
def test_values_have_the_types_of_the_signature(text, options):
    got = parse_options(text, decode)
    assert got == options and [type(v) for v in got.values()] == [type(v) for v in options.values()]


@settings(deadline=None, max_examples=40)
@given(steps=st.integers(), beta=st.floats(allow_nan=False))
def test_numbers_come_back_as_they_were(steps, beta):
    assert parse_options(f"steps={steps},beta={beta!r}", decode) == {"steps": steps, "beta": beta}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps", "got 'steps', expected key=value,key=value"),
        ("steps=", "got 'steps=', expected key=value"),
        ("steps=1,", "got '', expected key=value"),
        (
            "step=1",
            r"unknown key in --decode-options 'step'; did you mean 'steps'\? \(allowed: beta, cached,",
        ),
        ("max_new_tokens=1", "unknown key in --decode-options 'max_new_tokens'"),
        ("steps=1,steps=2", "steps comes twice"),
        ("steps=1.5", "steps is '1.5', expected an integer"),
        ("beta=big", "beta is 'big', expected a number"),
        ("how=slow", "how is 'slow', expected 'fast' or 'exact'"),
        ("cached=maybe", "cached is 'maybe', expected true or false"),
    ],
)
def test_anything_else_is_one_line(text, message):
    with pytest.raises(UserError, match=message) as error:
        parse_options(text, decode)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", list(registry.METHODS))
def test_every_decoder_has_a_signature_that_can_be_read(method):
    assert not {"max_new_tokens", "stop_ids", "bos_id"} & set(available(decoder_for(method)))


def test_options_of_a_method():
    assert available(decoder_for("t2mlr")).keys() == {"prefill", "depth"}
    assert parse_options("prefill=exact,depth=2", decoder_for("t2mlr")) == {"prefill": "exact", "depth": 2}
