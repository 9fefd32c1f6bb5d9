"""Files and pictures of commit traces, and tools/generate.py --trace."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.hf_exports import native
from tools import generate as tool
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.decoding.interface import decoder_for
from torchtitan_ext.decoding.trace import Trace
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import traces as module
from torchtitan_ext.evaluation.traces import (
    confidence_grid,
    draw_trace,
    masked_grid,
    read_traces,
    write_traces,
)


def trace(**change) -> Trace:
    values = {
        "policy": "threshold",
        "tau": 0.9,
        "block_size": 2,
        "prompt_tokens": 3,
        "forwards": 3,
        "tokens": [7, 8, 9, None],
        "steps": [2, 1, 3, None],
        "confidence": [0.5, 0.95, 1.0, None],
    }
    return Trace(**{**values, **change})


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.lists(
            st.one_of(st.none(), st.tuples(st.integers(0, 99), st.floats(0, 1))), min_size=1, max_size=6
        ),
        max_size=4,
    )
)
def test_a_file_holds_the_traces_exactly(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    given_traces = [
        trace(
            tokens=[None if c is None else c[0] for c in row],
            steps=[None if c is None else i + 1 for i, c in enumerate(row)],
            confidence=[None if c is None else c[1] for c in row],
            forwards=len(row),
        )
        for row in rows
    ]
    write_traces(path, given_traces)
    assert read_traces(path) == given_traces
    assert [p.name for p in path.parent.iterdir()] == ["t.jsonl"]


def test_grids():
    confidence, masked = confidence_grid(trace()), masked_grid(trace())
    assert [[None if math.isnan(v) else v for v in row] for row in confidence] == [
        [None, 0.95, None, None],
        [0.5, None, None, None],
        [None, None, 1.0, None],
    ]
    assert masked == [
        [True, False, True, True],
        [False, False, True, True],
        [False, False, False, True],
    ]


def test_a_picture_shows_what_was_revealed_where(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.image import imread

    shown, ticks, lines = [], [], []
    imshow, axvline, set_xticks = Axes.imshow, Axes.axvline, Axes.set_xticks

    def keep(into, method):
        def call(self, *args, **kwargs):
            into.append(args)
            return method(self, *args, **kwargs)

        return call

    monkeypatch.setattr(Axes, "imshow", keep(shown, imshow))
    monkeypatch.setattr(Axes, "axvline", keep(lines, axvline))
    monkeypatch.setattr(Axes, "set_xticks", keep(ticks, set_xticks))
    path = tmp_path / "deep" / "trace.png"
    draw_trace(path, trace(), texts=["a", " ", "\n", ""], title="three forwards")
    picture = imread(path)
    assert picture.shape[0] > 100 and len({tuple(p) for p in picture[::7, ::7].reshape(-1, 4).tolist()}) > 5
    assert str(shown[0][0]) == str(confidence_grid(trace()))
    assert ticks[0][1] == ["a", "\u2423", "\\n", ""]
    assert [args[0] for args in lines] == [1.5]


@pytest.mark.parametrize("positions", [3, 100])
def test_every_label_is_whole_and_apart_from_its_neighbours(positions, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []

    def lay_out(self, path, **_):
        figures.append(self)
        self.draw_without_rendering()
        path.touch()

    monkeypatch.setattr(Figure, "savefig", lay_out)
    values = list(range(1, positions + 1))
    long = trace(tokens=values, steps=values, confidence=[0.5] * positions, forwards=positions)
    draw_trace(tmp_path / "t.png", long, texts=["<|a very long token|>"] * positions)
    (figure,) = figures
    labels = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert len(labels) == positions
    assert all(label.y0 >= 0 and figure.bbox.x0 <= label.x0 < label.x1 <= figure.bbox.x1 for label in labels)
    assert all(left.x1 <= right.x0 for left, right in pairwise(labels))
    title = figure.axes[0].title.get_window_extent()
    assert figure.bbox.x0 <= title.x0 and title.x1 <= figure.bbox.x1 and title.y1 <= figure.bbox.y1


def test_labels_show_what_a_token_is(tmp_path, recwarn):
    pytest.importorskip("matplotlib")
    texts = ["\u4f60", "$$", "\x00\r", "  " + "a" * 20]
    assert [module._visible(text) for text in texts] == [
        "\\u4f60",
        "$$",
        "\\x00\\r",
        "\u2423\u2423" + "a" * 13 + "\u2026",
    ]
    draw_trace(tmp_path / "t.png", trace(), texts=texts, title="$$")  # a formula would be an error
    assert not recwarn.list  # nor is a glyph missing


# --- tools/generate.py -----------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A dump folder with a checkpoint of mdlm."""
    dump = tmp_path_factory.mktemp("run")
    native(dump / "checkpoint" / "step-3", "mdlm")
    return dump


def test_generate_draws_the_decoding_of_each_prompt(run, tmp_path, monkeypatch, capsys):
    drawn = {}
    monkeypatch.setattr(
        module, "draw_trace", lambda path, trace, texts: drawn.update({path.name: (trace, texts)})
    )
    options = [str(run), "--max-new-tokens", "6", "--decode", "threshold:0.02"]
    tool.main([*options, "--prompt", "ab", "--trace", str(tmp_path / "t.png")])
    batch = ["--prompt", "x", "--prompt", "ab", "--prompt", "y", "--batch-size", "2"]
    tool.main([*options, *batch, "--trace", str(tmp_path / "s.png")])
    assert list(drawn) == ["t.png", "s-1.png", "s-2.png", "s-3.png"]
    loaded = load_model(run)
    ids = loaded.tokenizer.encode("ab", add_bos=loaded.add_bos)
    rules = {"policy": "threshold", "tau": 0.02, "stop_ids": loaded.stop_ids}
    (want,) = decoder_for("mdlm")(loaded.model, [ids], max_new_tokens=6, **rules).extra["traces"]
    assert 1 <= want["forwards"] < 6
    for name in ("t.png", "s-2.png"):
        found, texts = drawn[name]
        assert {**found, "confidence": pytest.approx(want["confidence"], rel=1e-4)} == found
        assert (found["tokens"], found["steps"]) == (want["tokens"], want["steps"])
        assert texts == ["" if t is None else loaded.tokenizer.decode([t]) for t in want["tokens"]]
    capsys.readouterr()


def test_an_empty_prompt_has_a_trace_too(run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tool, "encode", lambda *args, **kwargs: [])  # a tokenizer that adds no BOS by itself
    picture = tmp_path / "t.png"
    tool.main([str(run), "--prompt", "", "--max-new-tokens", "2", "--trace", str(picture)])
    assert picture.is_file()
    capsys.readouterr()


def test_generate_shows_its_pictures_in_tensorboard(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    picture = tmp_path / "t.png"
    tool.main([str(run), "--prompt", "a", "--max-new-tokens", "4", "--trace", str(picture), "--tensorboard"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(run / "tb" / "evaluation")).Reload()
    assert [image.step for image in events.Images("trace/t")] == [3]
    capsys.readouterr()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--tensorboard"], "--tensorboard shows the pictures of --trace"),
        (["--trace", "{tmp}"], "is a folder, expected a file"),
        (["--trace", "{tmp}/t.png", "--tensorboard", "{tmp}/file"], "is a file, expected a folder"),
    ],
)
def test_generate_refuses_traces_before_a_model_is_loaded(options, message, tmp_path):
    (tmp_path / "file").touch()
    argv = [word.format(tmp=tmp_path) for word in options]
    with pytest.raises(UserError, match=message):
        tool.main(["absent", "--prompt", "a", *argv])


@pytest.mark.parametrize("case", ["tidar", "t2mlr"])
def test_generate_refuses_a_trace_of_a_decoder_without_one(case, tmp_path, monkeypatch):
    native(tmp_path / "step-1", case)
    monkeypatch.setattr(tool, "run", None)  # so that decoding would be another error
    with pytest.raises(UserError, match=f"method '{case}' has no trace to draw") as caught:
        tool.main([str(tmp_path), "--prompt", "a", "--trace", str(tmp_path / "t.png")])
    assert "\n" not in str(caught.value) and not (tmp_path / "t.png").exists()


def test_what_cannot_be_drawn_or_read_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="without a forward"):
        draw_trace(tmp_path / "a.png", trace(forwards=0))
    with pytest.raises(UserError, match="2 texts for a response of 4"):
        draw_trace(tmp_path / "a.png", trace(), texts=["a", "b"])
    with pytest.raises(UserError, match="cannot be read"):
        read_traces(tmp_path / "none.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(trace()) + "\n{")
    with pytest.raises(UserError, match="bad.jsonl, line 2: not valid JSON"):
        read_traces(bad)
    bad.write_text('{"steps": []}\n')
    with pytest.raises(UserError, match="line 1: not a trace"):
        read_traces(bad)
    monkeypatch.setattr(module, "check_can_draw", lambda: (_ for _ in ()).throw(UserError("pip install")))
    with pytest.raises(UserError, match="pip install"):
        draw_trace(tmp_path / "a.png", trace())
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("case", ["block_diffusion", "wedlm", "alodlm"])
def test_a_trace_is_the_decoding(case, tmp_path):
    """Every place is revealed once, in the forward that counts it, with the token that was given out."""
    loaded = load_model(native(tmp_path / "step-1", case))
    options = {"policy": "threshold", "threshold": 0.02} if case == "block_diffusion" else {"tau": 5.0}
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    found = decoder_for(case)(loaded.model, prompts, max_new_tokens=11, **options)
    for prompt, row, traced, revealed in zip(
        prompts, found.results, found.extra["traces"], found.extra["revealed"], strict=True
    ):
        assert traced["prompt_tokens"] == len(prompt)
        assert traced["tokens"] == row.new_tokens
        assert [traced["steps"].count(step + 1) for step in range(traced["forwards"])] == revealed
        assert all(0 < value <= 1 for value in traced["confidence"])
    assert any(max(revealed) > 1 for revealed in found.extra["revealed"])


def test_generate_refuses_the_trace_of_a_strategy_without_one(tmp_path):
    native(tmp_path / "step-1", "tidar")
    target = str(tmp_path / "t.png")
    with pytest.raises(UserError, match="decoding strategy 'ar' has no trace to draw"):
        tool.main([str(tmp_path), "--prompt", "a", "--decode", "ar", "--trace", target])
