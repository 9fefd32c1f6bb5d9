"""Passes by kind of token: kinds, counting, tools/evaluate.py --depths."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import ROOT
from tests.unit.test_evaluate_sweep import (
    SAMPLES,
    TASK,
    assert_picture,
    checkpoint,
    needs_matplotlib,
    single_runs,
)
from torchtitan_ext import registry
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import depths
from torchtitan_ext.evaluation.depths import KindResult, Tally, kind_of, places_of


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import evaluate as module
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint of a method."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.METHODS, "tdlm", "torchtitan_ext.methods.tdlm")
        made: dict[str, Any] = {}

        def make(method: str):
            if method not in made:
                made[method] = checkpoint(tmp_path_factory.mktemp(method) / "step-2", method)
            return made[method]

        yield make


# --- kinds -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, kind",
    [("7", "digit"), ("12", "digit"), (" 7", "digit"), ("-", "sign"), (" +", "sign"), ("\u2212", "sign"),
     (" ", "space"), ("\n", "space"), ("", "other"), ("a", "other"), ("1a", "other"), ("--", "other"),
     ("\u00b2", "other"), (None, "end of text")],
)  # fmt: skip
def test_kinds(text, kind):
    assert kind_of(text) == kind


def test_places_in_numbers():
    only, first, inner, last = "only digit", "first digit", "inner digit", "last digit"
    texts = [" ", "1", "2", "3", "-", "4", " 5", "6", None]
    assert places_of(texts) == [None, first, inner, last, None, only, first, last, None]
    assert places_of(["1 ", "2"]) == [only, only] and places_of(["12", "3"]) == [first, last]
    assert places_of([]) == []


PIECES = st.sampled_from(["1", "23", " 4", "5 ", "-", " ", "x", None])


@given(st.lists(PIECES, max_size=12))
def test_every_number_has_a_first_and_a_last_digit_or_is_one(texts):
    places = places_of(texts)
    written = "".join("|" if text is None else text for text in texts)
    numbers = "".join(c if c.isdigit() else " " for c in written).split()
    count = Counter(places)
    assert count["first digit"] == count["last digit"]
    assert count["first digit"] + count["only digit"] == len(numbers)
    assert [kind_of(text) == "digit" for text in texts] == [place is not None for place in places]


# --- counting --------------------------------------------------------------------------


def test_a_hand_written_row():
    tally = Tally()
    tally.add([" ", "-", "1", "2", None], [1, 2, 1, 3, 1], [0.9, 0.5, 0.4, 0.2, 0.7])
    tally.add(["3", None], [2, 1], [0.3, 0.5])
    results = tally.results(passes=3, setting={"q": 0.5})
    assert [result.kind for result in results] == [
        "digit", "only digit", "first digit", "last digit", "sign", "space", "end of text", "all",
    ]  # fmt: skip
    digit, end, everything = results[0], results[-2], results[-1]
    assert (digit.tokens, digit.mean_pass, digit.first_hazard) == (3, 2.0, pytest.approx(0.3))
    assert digit.shares == [pytest.approx(1 / 3)] * 3
    assert (end.tokens, end.mean_pass, end.first_hazard) == (2, 1.0, pytest.approx(0.6))
    assert (everything.tokens, everything.mean_pass) == (7, pytest.approx(11 / 7))
    assert results[3].record() == {
        "q": 0.5, "kind": "last digit", "tokens": 1, "mean_pass": 3.0, "pass_1": 0.0, "pass_2": 0.0,
        "pass_3": 1.0, "first_hazard": 0.2,
    }  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.tuples(PIECES, st.integers(1, 4), st.floats(0, 1)), min_size=1, max_size=12))
def test_kinds_add_up_to_all(row):
    tally = Tally()
    tally.add(*zip(*row, strict=True))
    found = {result.kind: result for result in tally.results(passes=4, setting={})}
    for result in found.values():
        assert sum(result.shares) == pytest.approx(1)
        mean = sum(share * depth for depth, share in enumerate(result.shares, start=1))
        assert result.mean_pass == pytest.approx(mean)
    whole = [one for kind, one in found.items() if kind != "all" and kind not in depths.PLACES]
    for parts, total in ((whole, "all"), ([found[k] for k in depths.PLACES if k in found], "digit")):
        if parts:
            assert sum(one.tokens for one in parts) == found[total].tokens
            weighted = sum(one.mean_pass * one.tokens for one in parts)
            assert weighted == pytest.approx(found[total].mean_pass * found[total].tokens)


# --- tools/evaluate.py -----------------------------------------------------------------


def report_of(tool, capsys, folder, *argv: str) -> dict[str, Any]:
    tool.main([str(folder), *TASK, "--samples", str(SAMPLES), "--depths", "--json", *argv])
    return json.loads(capsys.readouterr().out)


def test_counts_are_those_of_single_runs(tool, folder, capsys):
    """In batches, over both lengths; the stop token is the end of text."""
    loaded = load_model(folder("alodlm"))
    report = report_of(
        tool, capsys, folder("alodlm"), "--sweep", "q=0.0,0.6,1.0", "--decode-options", "tau=1.0"
    )
    assert (report["sweep"], report["lengths"]) == ({"q": [0.0, 0.6, 1.0]}, [1, 2])
    assert report["decode_options"] == {"tau": 1.0}
    means = []
    for q in (0.0, 0.6, 1.0):
        runs = single_runs(loaded, q=q, tau=1.0)
        made = [depth for run in runs for depth in run.extra["depths"][0]]
        hazards = [hazard for run in runs for hazard in run.extra["first_hazards"][0]]
        rows = {row["kind"]: row for row in report["results"] if row["q"] == q}
        everything = rows["all"]
        assert everything["tokens"] == len(made) == sum(run.new_tokens for run in runs)
        assert everything["mean_pass"] == pytest.approx(sum(made) / len(made))
        for depth in (1, 2, 3):
            assert everything[f"pass_{depth}"] == pytest.approx(made.count(depth) / len(made))
        assert everything["first_hazard"] == pytest.approx(sum(hazards) / len(hazards), abs=1e-5)
        ends = sum(run[0].finish_reason == "stop" for run in runs)
        assert rows.get("end of text", {"tokens": 0})["tokens"] == ends
        means.append(everything["mean_pass"])
    assert means[0] == 1.0 < means[1] < means[2]


@needs_matplotlib
def test_table_csv_and_picture(tool, folder, tmp_path, capsys):
    argv = [
        *TASK,
        "--samples",
        "2",
        "--depths",
        "--sweep",
        "q=0.0,1.0;tau=1",
        "--csv",
        str(tmp_path / "a.csv"),
    ]
    tool.main([str(folder("alodlm")), *argv, "--png", str(tmp_path / "a.png")])
    out = capsys.readouterr().out.splitlines()
    assert "variable_assignment" in out[0] and out[1] == "q = 0, tau = 1"
    assert out[2].split() == ["kind", "tokens", "mean", "pass", "pass", "1", "pass", "2", "pass", "3",
                              "hazard", "1"]  # fmt: skip
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["q"] for row in rows} == {"0.0", "1.0"}
    assert [row["pass_1"] for row in rows if row["q"] == "0.0" and row["kind"] == "all"] == ["1.0"]
    assert sum(line.startswith("all") for line in out) == 2 and "100.0%" in out[3]
    assert_picture(tmp_path / "a.png")


@needs_matplotlib
def test_the_picture_has_a_bar_for_each_kind_and_a_part_for_each_pass(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn: list[Any] = []
    real = Axes.barh
    monkeypatch.setattr(Axes, "barh", lambda self, *a, **k: (drawn.append((a, k)), real(self, *a, **k))[1])
    results = [
        KindResult(
            setting={"q": q}, kind=kind, tokens=4, mean_pass=1.5, shares=[0.5, 0.5, 0.0], first_hazard=0.25
        )
        for q in (0.1, 0.2)
        for kind in ("digit", "last digit", "all")
    ]
    depths.draw(tmp_path / "a.png", results, title="t")
    assert_picture(tmp_path / "a.png")
    assert [k["label"] for _, k in drawn] == ["pass 1", "pass 2", "pass 3"] * 2
    (places, widths), keywords = drawn[1]
    assert list(places) == [0, 1, 2] and widths == [50.0] * 3 and keywords["left"] == [50.0] * 3


@pytest.mark.parametrize(
    "method, argv, message",
    [
        ("wedlm", [], "--depths needs a decoder that commits tokens in several passes .* is 'wedlm'$"),
        ("mdlm", [], "--depths needs a decoder .* is 'mdlm'$"),
        ("alodlm", ["--decode", "stream"], "--decode has no use with --depths"),
        ("alodlm", ["--sweep", "q=0.5", "--cost", "nfe"], "--cost has no use with --depths"),
        ("alodlm", ["--sweep", "q=0.5,0.6", "--decode-options", "q=1.0"], "--sweep varies q, which"),
        ("alodlm", ["--sweep", "q=2.0"], "q must be between 0 and 1, got 2.0"),
        ("alodlm", ["--sweep", "k=2.0"], "unknown key in --sweep"),
    ],
)
def test_refusals(tool, folder, method, argv, message, capsys):
    with pytest.raises(UserError, match=message) as error:
        tool.main([str(folder(method)), *TASK, "--depths", *argv])
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


def test_refusals_of_other_tasks_and_of_none(tool, folder):
    with pytest.raises(UserError, match="--depths has no use for the task 'group_retrieval'"):
        tool.main([str(folder("alodlm")), "--task", "group_retrieval", "--depths"])
    with pytest.raises(UserError, match="--depths belongs to --task"):
        tool.main([str(folder("alodlm")), "--decode", "stream", "--depths"])


# --- the same weights, decoded plainly ---------------------------------------------------


@pytest.mark.parametrize("method, layers", [("wedlm", 4), ("alodlm", 1 + 3 * 2 + 1)])
def test_plain_decoding_stands_beside_streaming(tool, folder, method, layers, capsys):
    """One token a forward through every layer of every pass; the first token is the prompt's."""
    argv = [*TASK, "--samples", "2", "--decode", "ar,stream"]
    tool.main([str(folder(method)), *argv, "--json"])
    results = json.loads(capsys.readouterr().out)["results"]
    for plain, stream in zip(results["ar"], results["stream"], strict=True):
        assert plain["tokens_per_forward"] == 1.0
        forwards = plain["forwards_per_sample"]
        assert plain["layer_evaluations_per_token"] == pytest.approx(layers * (forwards - 1) / forwards)
        assert stream["layer_evaluations_per_token"] > 0 and stream["forwards_per_sample"] >= 2
    tool.main([str(folder(method)), *argv])
    assert "layers/token" in capsys.readouterr().out.splitlines()[1]
