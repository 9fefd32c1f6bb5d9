"""tools/generate.py with decoding strategies: colours by forward, statistics."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import ROOT
from tests.unit.test_load import random_model, write_checkpoint
from torchtitan_ext import backbones
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.decoding import autoregressive, colour, self_speculative
from torchtitan_ext.decoding.choice import reports_steps
from torchtitan_ext.decoding.interface import decoder_for
from torchtitan_ext.errors import UserError

TIDAR = '[model]\nname = "tidar"\nflavor = "smollm2-debug"\n\n[tidar]\nblock_size = 4\n'
CODES = "|".join(re.escape(code) for code in colour.ALTERNATING)
PAINTED = re.compile(rf"({CODES})(.*?){re.escape(colour.RESET)}", re.DOTALL)


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import generate as module
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run") / "step-1"
    write_checkpoint(path, random_model(backbones.lookup("smollm2-debug")))
    (path / "config.toml").write_text(TIDAR)
    return path


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder)


def plain(text: str) -> str:
    """Without colours."""
    return PAINTED.sub(r"\2", text)


def runs(text: str) -> list[str]:
    """The text of each stretch of one colour."""
    return [
        "".join(piece for _, piece in group) for _, group in groupby(PAINTED.findall(text), lambda m: m[0])
    ]


def drafted(loaded, prompt: str, **options):
    ids = loaded.tokenizer.encode(prompt, add_bos=True)
    config = loaded.model.config
    return self_speculative.generate(
        loaded.model, [ids], mask_id=config.mask_token_id, draft_length=3, stop_ids=loaded.stop_ids, **options
    )


def test_each_forward_has_a_colour_that_differs_from_the_one_before(tool, folder, loaded, capsys):
    argv = [str(folder), "--prompt", "ab", "--max-new-tokens", "24", "--decode", "tidar:3"]
    tool.main([*argv, "--colour", "always"])
    out, err = capsys.readouterr()
    tool.main([*argv, "--colour", "never"])
    without = capsys.readouterr().out
    assert "\x1b" not in without and plain(out) == without and out.startswith("ab\x1b")
    result = drafted(loaded, "ab", max_new_tokens=24)
    sizes, texts = [1, *result.extra["accepted"][0]], []
    stream, tokens = tool.TextStream(loaded.tokenizer), iter(result[0].new_tokens)
    for size in sizes:
        texts.append("".join(stream.push(token) for _, token in zip(range(size), tokens, strict=False)))
    texts[-1] += stream.flush()
    assert runs(out) == [text for text in texts if text]
    assert f"{result.tokens_per_forward:.2f} tokens/forward" in err


def test_statistics_are_one_line_on_stderr(tool, folder, loaded, capsys):
    tool.main([str(folder), "--prompt", "ab", "--max-new-tokens", "24", "--decode", "tidar:3"])
    (line,) = capsys.readouterr().err.splitlines()
    counts = Counter(drafted(loaded, "ab", max_new_tokens=24).extra["accepted"][0])
    mean = sum(n * times for n, times in counts.items()) / counts.total()
    shown = ", ".join(f"{n}: {counts[n]}" for n in sorted(counts))
    assert line.endswith(f"; accepted {mean:.2f} a forward (forwards by number: {shown})")
    tool.main([str(folder), "--prompt", "ab", "--max-new-tokens", "8", "--decode", "ar"])
    assert capsys.readouterr().err.endswith("8 forwards, 1.00 tokens/forward)\n")
    tool.main([str(folder), "--prompt", "ab", "--max-new-tokens", "8", "--decode", "left_to_right:2"])
    assert capsys.readouterr().err.endswith("revealed 2.00 a forward (forwards by number: 2: 4)\n")


def test_json_has_the_counts_and_no_colour(tool, folder, loaded, capsys):
    argv = [str(folder), "--prompt", "ab", "--max-new-tokens", "24", "--json", "--colour", "always"]
    tool.main([*argv, "--decode", "tidar:3"])
    one = json.loads(capsys.readouterr().out)
    result = drafted(loaded, "ab", max_new_tokens=24)
    assert one["accepted"] == result.extra["accepted"][0]
    assert one["mean_accepted"] == pytest.approx(sum(one["accepted"]) / len(one["accepted"]), abs=1e-5)
    assert one["tokens_per_forward"] == pytest.approx(24 / result.forwards, abs=1e-5)
    tool.main([*argv, "--decode", "ar"])
    plain_text = json.loads(capsys.readouterr().out)
    assert plain_text["text"] == one["text"] and "accepted" not in plain_text
    tool.main([*argv, "--prompt", "abc", "--decode", "tidar:3"])
    many = json.loads(capsys.readouterr().out)["results"]
    assert many[0]["accepted"] == one["accepted"] and many[1]["prompt"] == "abc"
    tool.main(argv)
    own = json.loads(capsys.readouterr().out)
    assert own["text"] == one["text"] and max(own["accepted"]) <= 4


def test_several_prompts_are_coloured_too(tool, folder, capsys):
    argv = [str(folder), "--prompt", "ab", "--prompt", "xyz", "--max-new-tokens", "12", "--decode", "tidar:3"]
    tool.main([*argv, "--colour", "always"])
    out = capsys.readouterr().out
    tool.main(argv)
    assert plain(out) == capsys.readouterr().out and len(runs(out)) > 4


def test_the_default_colours_a_terminal_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert colour.wanted("auto", Terminal()) and not colour.wanted("auto", io.StringIO())
    assert colour.wanted("always", io.StringIO()) and not colour.wanted("never", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not colour.wanted("auto", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.wanted("auto", Terminal()) and colour.wanted("always", io.StringIO())
    monkeypatch.setenv("NO_COLOR", "")  # set but empty does not count
    assert colour.wanted("auto", Terminal())


def test_a_character_of_two_forwards_has_the_colour_of_the_second(tool, loaded):
    row = tool.Row(loaded, [], coloured=True)
    first, second = "né".encode()[:2], "né".encode()[2:] + b"!"
    offset = loaded.tokenizer.encode("n")[0] - ord("n")
    row.painter.step()
    before = "".join(row.push(byte + offset) for byte in first)
    row.painter.step()
    after = "".join(row.push(byte + offset) for byte in second)
    assert runs(before) == ["n"] and runs(after) == ["é!"] and row.flush() == ""
    assert runs(row.shown) == ["n", "é!"]


def test_steps_that_show_nothing_do_not_bring_the_same_colour_back():
    painter = colour.StepPainter(enabled=True)
    painter.step()
    first = painter.paint("a")
    painter.step()
    assert painter.paint("") == ""
    painter.step()
    assert PAINTED.findall(first)[0][0] != PAINTED.findall(painter.paint("b"))[0][0]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.text("ab\né", max_size=3), max_size=3), max_size=8))
def test_colours_change_the_text_in_nothing_and_part_it_by_step(steps):
    painter, off = colour.StepPainter(enabled=True), colour.StepPainter(enabled=False)
    shown = ""
    for pieces in steps:
        painter.step()
        shown += "".join(painter.paint(piece) for piece in pieces)
        assert [off.paint(piece) for piece in pieces] == pieces
    texts = ["".join(pieces) for pieces in steps]
    assert plain(shown) == "".join(texts) and runs(shown) == [text for text in texts if text]


def test_which_decoders_report_their_steps(loaded):
    ar = SimpleNamespace(config=SimpleNamespace())
    assert reports_steps(decoder_for("tidar"), loaded.model)
    assert reports_steps(self_speculative.generate, loaded.model)
    assert not reports_steps(autoregressive.generate, loaded.model)
    assert not reports_steps(decoder_for("t2mlr"), ar)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--decode", "tidor"], "unknown decoding strategy 'tidor'; did you mean 'tidar'"),
        (["--decode", "tidar:4:2"], "BETA must be a number between 0 and 1"),
        (["--colour", "sometimes"], "unknown --colour 'sometimes'.*allowed: always, auto, never"),
    ],
)
def test_refusals_before_a_model_is_loaded(tool, folder, argv, message, monkeypatch):
    monkeypatch.setattr(tool, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=message):
        tool.main([str(folder), "--prompt", "x", *argv])


def test_a_strategy_that_the_model_cannot_follow(tool, folder, capsys):
    with pytest.raises(UserError, match="between 1 and the block size 4, got 9"):
        tool.main([str(folder), "--prompt", "x", "--decode", "confidence:9", "--json"])
    assert capsys.readouterr().out == ""
