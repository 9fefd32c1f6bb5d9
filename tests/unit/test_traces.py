"""Files and pictures of commit traces."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext.decoding.masked_diffusion import Trace
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
