"""A decoder over a grid of its options: parsing, numbers, order, frontier, tools/evaluate.py --sweep."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.paths import ROOT
from tests.unit.test_load import write_checkpoint
from torchtitan_ext import config as front
from torchtitan_ext import models, registry
from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.data.tasks import TaskSource
from torchtitan_ext.data.tasks.build import encode_text
from torchtitan_ext.decoding import Generation, decoder_for
from torchtitan_ext.decoding.interface import GenerationResult
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import plots, sweep, tasks
from torchtitan_ext.trainer import default_config

TOML = """
[model]
name = "{method}"
flavor = "{flavor}"
attention = "dense"

[{method}]
{section}

[dataloader]
dataset = "variable_assignment"

[dataloader.task]
depth = 2
chains = 3
"""
SECTIONS = {
    "alodlm": ("smollm2-debug", "start = 1\nend = 3\npasses = 3\nblock_size = 4\nwindow = 3"),
    "wedlm": ("smollm2-debug", "block_size = 4\nwindow = 3"),
    "mdlm": ("llada-debug", "block_size = 4"),
    "tdlm": ("llada-debug", "block_size = 4\nlayers = [0]\nheads = 2\nhead_dim = 6"),
}
TASK = ("--task", "variable_assignment", "--lengths", "1,2")
SAMPLES = 3
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


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
    """The checkpoint of a method, with weights in which every parameter has an effect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.METHODS, "tdlm", "torchtitan_ext.methods.tdlm")
        made: dict[str, Any] = {}

        def make(method: str):
            if method not in made:
                made[method] = checkpoint(tmp_path_factory.mktemp(method) / "step-2", method)
            return made[method]

        yield make


def checkpoint(path, method: str):
    flavor, section = SECTIONS[method]
    toml = TOML.format(method=method, flavor=flavor, section=section)
    path.mkdir()
    (path / "config.toml").write_text(toml)
    model = models.build_spec(
        front.load_toml(path / "config.toml", make_default=default_config)
    ).model.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_weights()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or "gate" in name:
                parameter.normal_(std=0.2, generator=generator)
    write_checkpoint(path, model)
    (path / "config.toml").write_text(toml)
    return path


@pytest.fixture(scope="module")
def loaded(folder) -> LoadedModel:
    return load_model(folder("alodlm"))


def single_runs(loaded: LoadedModel, **options: Any) -> list[Generation]:
    """Every sample of both lengths by itself."""
    task, _ = tasks.task_of_run("variable_assignment", loaded.config)
    setup, runs = tasks.TextSetup.of(loaded), []
    for length in (1, 2):
        source = TaskSource(task.at_length(length), seed=0, split="test")
        for sample in (source.read(i) for i in range(SAMPLES)):
            prompt, answer = encode_text(loaded.tokenizer, sample, add_bos=loaded.add_bos)
            stops = {"stop_ids": setup.stop_ids, "bos_id": loaded.tokenizer.bos_id}
            runs.append(
                decoder_for(loaded.method)(
                    loaded.model, [prompt], max_new_tokens=len(answer), **stops, **options
                )
            )
    return runs


def report_of(tool, capsys, path, *argv: str) -> dict[str, Any]:
    tool.main([str(path), *TASK, "--samples", str(SAMPLES), "--json", *argv])
    return json.loads(capsys.readouterr().out)


# --- the grid --------------------------------------------------------------------------


def test_values_have_the_types_of_the_decoder():
    grid = sweep.parse_grid("tau=0.1,1; window=4 ;left1=true,false", decoder_for("alodlm"))
    assert (
        grid == {"tau": [0.1, 1.0], "window": [4], "left1": [True, False]} and type(grid["tau"][1]) is float
    )
    assert [tuple(s.values()) for s in sweep.settings_of(grid)] == [
        (0.1, 4, True), (0.1, 4, False), (1.0, 4, True), (1.0, 4, False),
    ]  # fmt: skip
    assert list(sweep.settings_of(grid)[0]) == ["tau", "window", "left1"]


def test_a_value_may_be_a_word_or_a_number(folder):
    folder("tdlm")  # makes the method known
    grid = sweep.parse_grid("window=current,1,full", decoder_for("tdlm"))
    assert grid == {"window": ["current", 1, "full"]} and type(grid["window"][1]) is int


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=3, unique=True), min_size=1, max_size=3))
def test_every_combination_comes_once(values):
    grid = {f"k{i}": column for i, column in enumerate(values)}
    found = [tuple(setting.values()) for setting in sweep.settings_of(grid)]
    assert len(set(found)) == len(found) == math.prod(map(len, values))
    order = [tuple(column.index(v) for column, v in zip(values, one, strict=True)) for one in found]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tau", r"--sweep 'tau': got 'tau', expected key=value,value;key=value"),
        ("", "got ''"),
        ("tau=", "got 'tau='"),
        ("tau=0.1,", "got 'tau=0.1,'"),
        ("tau=0.1;", "got ''"),
        ("=1", "got '=1'"),
        ("tao=0.1", r"unknown key in --sweep 'tao'; did you mean 'tau'\? \(allowed: feedback, left1, "),
        ("tau=low", "--sweep: tau is 'low', expected a number or none"),
        ("window=1.5", "--sweep: window is '1.5', expected an integer or none"),
        ("feedback=cumulativ", "feedback is 'cumulativ'"),
        ("tau=0.1;tau=0.2", "tau comes twice"),
        ("tau=0.1,0.10", "tau = 0.1 comes twice"),
    ],
)
def test_wrong_grids_are_refused(text, message):
    with pytest.raises(UserError, match=message) as error:
        sweep.parse_grid(text, decoder_for("alodlm"))
    assert "\n" not in str(error.value)


# --- numbers, with a decoder that knows the answers ------------------------------------


class Oracle:
    """Right on the samples whose number is divisible by ``every``; reports numbers of its own."""

    def __init__(self, task, tokenizer, lengths, count: int) -> None:
        self.samples, self.calls = {}, []
        for length in lengths:
            source = TaskSource(task.at_length(length), seed=3, split=tasks.SPLIT)
            for i in range(count):
                prompt, answer = encode_text(tokenizer, source.read(i), add_bos=False)
                self.samples[tuple(prompt)] = (i, answer)

    def __call__(self, model, prompts, *, max_new_tokens, stop_ids, bos_id, every=1, cost=1) -> Generation:
        self.calls.append((len(prompts), every, cost))
        rows = []
        for i, answer in (self.samples[tuple(prompt)] for prompt in prompts):
            # The space before an answer does not decide; alone it is a wrong one, with fewer tokens.
            new = list(answer[1:]) if i % every == 0 else [answer[0]]
            rows.append(GenerationResult(tokens=new, new_tokens=new, finish_reason="stop", forwards=cost + i))
        new, forwards = sum(len(r.new_tokens) for r in rows), sum(r.forwards for r in rows)
        extra = {
            "tokens_per_forward": -1.0,
            "gflop_per_token": 60 / new,
            "mean_passes": 2 * len(rows) / forwards,
        }
        return Generation(
            results=rows, forwards=1, seconds=0.25 * cost, extra={**extra, "flag": True, "list": [1.0]}
        )


@pytest.fixture(scope="module")
def oracle(loaded):
    task, _ = tasks.task_of_run("variable_assignment", loaded.config)
    decode: Any = Oracle(task, loaded.tokenizer, (1, 2), 5)
    return task, decode, tasks.TextSetup(tokenizer=loaded.tokenizer, decode=decode)


def run_oracle(oracle, grid: list[dict[str, Any]], **options: Any) -> list[sweep.SettingResult]:
    task, decode, text = oracle
    decode.calls.clear()
    given: Any = {"samples": 5, "batch_size": 2, "seed": 3, **options}
    return sweep.evaluate(nn.Module(), task, [1, 2], grid, text=text, **given)


def test_numbers_of_a_setting(oracle):
    (result,) = run_oracle(oracle, [{"every": 2, "cost": 3}])
    # Samples 0, 2 and 4 of 5 are right, for each of two lengths; "7" and EOS are two tokens.
    new, forwards = 2 * (3 * 2 + 2 * 1), 2 * sum(3 + i for i in range(5))
    assert (result.samples, result.accuracy) == (10, 0.6)
    assert result.standard_error == pytest.approx(math.sqrt(0.6 * 0.4 / 10))
    assert result.tokens_per_forward == pytest.approx(new / forwards)
    assert result.forwards_per_sample == pytest.approx(forwards / 10)
    assert result.seconds == pytest.approx(6 * 0.75)  # batches of 2, 2, 1, twice
    assert result.reported == {
        "gflop_per_token": pytest.approx(6 * 60 / new), "mean_passes": pytest.approx(2 * 10 / forwards),
    }  # fmt: skip
    assert result.steps_per_sample == result.forwards_per_sample  # it does not tell its passes
    assert result.cost("passes") == pytest.approx(2.0) and result.cost("nfe") == forwards / 10
    assert result.cost("gflop") == result.reported["gflop_per_token"] and result.cost("seconds") == 4.5


def test_settings_take_turns_batch_by_batch(oracle):
    grid, done = [{"cost": 1}, {"cost": 2}, {"cost": 3}], []
    run_oracle(oracle, grid, on_batch=lambda *at: done.append(at))
    warm, calls = oracle[1].calls[:6], oracle[1].calls[6:]
    assert [call[0] for call in warm] == [1] * 6  # one sample of both lengths each
    assert [call[0] for call in calls] == [2] * 6 + [1] * 3 + [2] * 6 + [1] * 3
    assert [call[2] for call in calls] == [1, 2, 3, 3, 2, 1] * 3
    assert done == [(n, 6) for n in range(1, 7)]


def test_batches_change_nothing_but_the_time(oracle):
    grid = [{"every": 2}, {"every": 3, "cost": 2}]
    few, many = (run_oracle(oracle, grid, batch_size=size) for size in (1, 5))
    for a, b in zip(few, many, strict=True):
        assert (a.accuracy, a.forwards_per_sample) == (b.accuracy, b.forwards_per_sample)
        assert a.tokens_per_forward == b.tokens_per_forward and a.seconds > b.seconds


def test_the_frontier_is_weighed_against_the_chosen_cost(oracle):
    grid = [{"every": 1, "cost": 3}, {"every": 2, "cost": 1}, {"every": 2, "cost": 2}]
    marked = {cost: [r.frontier for r in run_oracle(oracle, grid, cost=cost)] for cost in ("nfe", "gflop")}
    assert marked["nfe"] == [True, True, False]
    # All take 60 GFLOP a batch, and the first spreads them over more tokens.
    assert marked["gflop"] == [True, False, False]
    assert [r.frontier for r in run_oracle(oracle, grid)] == marked["gflop"]


def test_options_for_all_settings(oracle):
    task, decode, text = oracle
    both = tasks.TextSetup(tokenizer=text.tokenizer, decode=decode, options={"every": 5})
    (result,) = run_oracle((task, decode, both), [{"cost": 2}])
    assert result.accuracy == 0.2 and result.setting == {"cost": 2}
    with pytest.raises(UserError, match="--sweep varies every, which --decode-options sets to 5"):
        run_oracle((task, decode, both), [{"every": 2}])


points = st.tuples(st.integers(0, 4), st.integers(0, 4))


@settings(deadline=None)
@given(st.lists(points, min_size=1, max_size=8))
def test_the_frontier_is_what_no_other_setting_dominates(found):
    results = [
        sweep.SettingResult(
            setting={"i": i}, samples=4, accuracy=right / 4, standard_error=0.0, tokens_per_forward=1.0,
            forwards_per_sample=float(cost), steps_per_sample=1.0, seconds=1.0, reported={},
        )
        for i, (cost, right) in enumerate(found)
    ]  # fmt: skip
    for result, (cost, right) in zip(sweep.mark_frontier(results, cost="nfe"), found, strict=True):
        cheaper = max((r for c, r in found if c < cost), default=-1)
        equal = max(r for c, r in found if c == cost)
        assert result.frontier == (right == equal and right > cheaper)


# --- real decoders ---------------------------------------------------------------------


def test_every_number_of_alodlm(tool, folder, loaded, capsys):
    argv = ("--sweep", "tau=0.0,100.0;q=0.0,1.0", "--batch-size", "2")
    report = report_of(tool, capsys, folder("alodlm"), *argv)
    assert report["sweep"] == {"tau": [0.0, 100.0], "q": [0.0, 1.0]} and report["cost"] == "gflop"
    assert (report["method"], report["lengths"], report["decode_options"]) == ("alodlm", [1, 2], {})
    for row in report["results"]:
        runs = single_runs(loaded, tau=row["tau"], q=row["q"])
        passes = [n for run in runs for n in run.extra["passes"][0]]
        new = sum(run.new_tokens for run in runs)
        assert row["samples"] == len(runs) == 2 * SAMPLES
        # The prompt of each sample is a forward, but no step.
        assert row["forwards_per_sample"] == pytest.approx(len(passes) / len(runs) + 1)
        assert row["tokens_per_forward"] == pytest.approx(new / (len(passes) + len(runs)))
        assert row["tokens_per_step"] == pytest.approx(new / len(passes))
        assert row["mean_passes"] == pytest.approx(sum(passes) / len(passes))
        assert row["passes_per_sample"] == pytest.approx(sum(passes) / len(runs))
        # Prelude 1, core 2, coda 1 layers: counted from the passes.
        assert row["path_layers"] == pytest.approx(sum(1 + 3 * n for n in passes) / len(passes))
        layers = sum(run.extra["layer_evaluations"][0] for run in runs)
        assert row["layer_evaluations_per_token"] == pytest.approx(layers / new)
        gflop = sum(run.extra["gflop_per_token"] * run.new_tokens for run in runs)
        assert row["gflop_per_token"] == pytest.approx(gflop / new)
    one, all_passes = report["results"][0], report["results"][1]
    assert one["mean_passes"] == 1.0 and all_passes["mean_passes"] > 1.0
    # One token a step, but what stands behind a stop token is not new.
    assert report["results"][2]["tokens_per_step"] > 1.0 >= one["tokens_per_step"]


def test_a_setting_is_what_the_plain_table_says(tool, folder, capsys):
    report = report_of(tool, capsys, folder("wedlm"), "--sweep", "tau=0.5,100;window=2", "--batch-size", "3")
    for row in report["results"]:
        options = f"tau={row['tau']},window=2"
        plain = report_of(tool, capsys, folder("wedlm"), "--decode-options", options)["results"]
        assert row["accuracy"] == sum(r["answer_accuracy"] for r in plain) / 2
        assert row["forwards_per_sample"] == pytest.approx(sum(r["forwards_per_sample"] for r in plain) / 2)


def test_policies_of_masked_diffusion(tool, folder, capsys):
    report = report_of(
        tool, capsys, folder("mdlm"), "--sweep", "policy=one_token,threshold", "--decode-options", "tau=0.0"
    )
    one, threshold = report["results"]
    assert [row["policy"] for row in report["results"]] == ["one_token", "threshold"]
    assert (report["cost"], report["decode_options"]) == ("nfe", {"tau": 0.0})
    # Three masks in one block: a forward each, or (every confidence is above 0) one for all.
    assert one["tokens_per_forward"] == 1.0 and threshold["forwards_per_sample"] == 1.0
    assert threshold["frontier"] and not any(name.endswith("_per_token") for name in one)


def test_windows_of_history(tool, folder, capsys):
    path = folder("tdlm")
    report = report_of(tool, capsys, path, "--sweep", "window=current,1,full", "--decode-options", "tau=0.02")
    loaded = load_model(path)
    assert [row["window"] for row in report["results"]] == ["current", 1, "full"]
    for row in report["results"]:
        runs = single_runs(loaded, window=row["window"], tau=0.02)
        assert row["forwards_per_sample"] == pytest.approx(sum(run.forwards for run in runs) / len(runs))


def test_sums_of_the_library(tool, folder, capsys):
    pytest.importorskip("reasoning_gym")
    argv = ["--task", "chain_sum", "--lengths", "2", "--samples", "2", "--sweep", "tau=100", "--json"]
    tool.main([str(folder("wedlm")), *argv])
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["samples"] == 2 and row["mean_passes"] == 1.0 and row["frontier"]


# --- table, files, errors --------------------------------------------------------------


@needs_matplotlib
def test_table_csv_and_picture(tool, folder, tmp_path, capsys):
    out = tmp_path / "out"
    files = ["--csv", str(out / "a.csv"), "--png", str(out / "a.png")]
    argv = ["--samples", "2", "--sweep", "tau=0.0,100.0;left1=true,false", "--cost", "passes", *files]
    tool.main([str(folder("alodlm")), *TASK, *argv])
    captured = capsys.readouterr()
    title, header, *rows, legend = captured.out.splitlines()
    assert title.endswith("variable_assignment (chains 3); copies 1, 2; 2 samples each")
    assert header.split()[:4] == ["tau", "left1", "accuracy", "+-"] and header.split()[-1] == "frontier"
    assert [row.split()[:2] for row in rows] == [
        ["0", "true"], ["0", "false"], ["100", "true"], ["100", "false"],
    ]  # fmt: skip
    assert len({len(line) for line in (header, *rows)}) == 1  # aligned
    assert legend == "* on the frontier of accuracy and passes per sample"
    lines = list(csv.DictReader((out / "a.csv").open()))
    at = header.split().index("passes/sample")
    assert [f"{float(line['passes_per_sample']):.2f}" for line in lines] == [row.split()[at] for row in rows]
    assert [line["frontier"] == "True" for line in lines] == [row.endswith("*") for row in rows]
    assert captured.err.splitlines()[-1] == "2 of 2 batches"
    assert sorted(path.name for path in out.iterdir()) == ["a.csv", "a.png"]
    assert_picture(out / "a.png")


def assert_picture(path) -> None:
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(path)
    assert min(pixels.shape[:2]) > 300 and 0.005 < (pixels[..., :3].min(axis=-1) < 0.5).mean() < 0.5


def test_options_are_shown_as_they_are_written():
    values = [0.1, 1.0, 1e-05, 0.123456789, 3, True, None, "full"]
    shown = ["0.1", "1", "1e-05", "0.123456789", "3", "true", "none", "full"]
    assert [sweep.shown(value) for value in values] == shown


@needs_matplotlib
def test_settings_at_one_place_share_a_label(tmp_path):
    from matplotlib.figure import Figure

    written: list[str] = []
    places = [(1.0, 0.5, "a"), (2.0, 0.5, "b"), (1.0, 0.5, "c")]
    curves = {name: [plots.FrontierPoint(*place, True) for place in places] for name in ("x", "y")}
    real = Figure.savefig

    def savefig(self, *args, **options) -> None:
        written.extend(text.get_text() for text in self.axes[0].texts)
        real(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        plots.draw_frontier(tmp_path / "a.png", curves, cost_is="NFE")
    assert written == ["a / c", "b"] * 2


@needs_matplotlib
@pytest.mark.parametrize("grid", [{"policy": ["a", "b"]}, {"tau": [0.1, 0.2], "q": [0.1], "left1": [True]}])
def test_pictures_have_a_curve_for_each_value_of_the_first_option(grid, tmp_path, monkeypatch):
    drawn: dict[str, Any] = {}
    real = plots.draw_frontier
    monkeypatch.setattr(plots, "draw_frontier", lambda *a, **k: (drawn.update(k, curves=a[1]), real(*a, **k)))
    numbers = {"standard_error": 0.0, "tokens_per_forward": 1.0, "forwards_per_sample": 2.0}
    numbers |= {"steps_per_sample": 2.0, "reported": {}}
    results = [
        sweep.SettingResult(setting=setting, samples=1, accuracy=1.0, seconds=float(i), **numbers)
        for i, setting in enumerate(sweep.settings_of(grid))
    ]
    sweep.draw(tmp_path / "a.png", results, cost="seconds", title="t")
    assert_picture(tmp_path / "a.png")
    labels = {name: [p.label for p in curve] for name, curve in drawn["curves"].items()}
    if "policy" in grid:
        assert labels == {"policy": ["a", "b"]} and not drawn["joined"]
    else:
        assert labels == {"tau = 0.1": ["0.1, true"], "tau = 0.2": ["0.1, true"]} and drawn["joined"]
        assert drawn["labels_are"] == "q, left1"
    assert [p.cost for curve in drawn["curves"].values() for p in curve] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--task", "variable_assignment", "--sweep", "tao=1"], "unknown key in --sweep 'tao'; did you mean"),
        (["--task", "variable_assignment", "--sweep", "q=1,x"], "--sweep: q is 'x', expected a number"),
        (["--task", "variable_assignment", "--sweep", "q=1", "--decode-options", "p=1"],
         "unknown key in --decode-options 'p'"),
        (["--task", "group_retrieval", "--sweep", "q=1"], "--sweep has no use for the task 'group_ret"),
        (["--task", "variable_assignment", "--sweep", "q=1", "--decode", "stream"], "give it or --decode"),
        (["--task", "variable_assignment", "--cost", "nfe"], "--cost belongs to --sweep"),
        (["--task", "variable_assignment", "--sweep", "q=1", "--cost", "nef"],
         "unknown --cost 'nef'; did you mean 'nfe'"),
        (["--decode", "ar", "--sweep", "q=1"], "--sweep belongs to --task"),
        (["--task", "variable_assignment", "--sweep", "q=1", "--step", "9"], "no step-9|no step 9"),
    ],
)  # fmt: skip
def test_refusals_before_the_weights_are_loaded(tool, folder, argv, message, monkeypatch, capsys):
    monkeypatch.setattr(tool, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=message) as error:
        tool.main([str(folder("alodlm")), *argv])
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("method", "argv", "message"),
    [
        ("alodlm", ["--sweep", "q=0.5,1.5"], "q must be between 0 and 1, got 1.5"),
        ("alodlm", ["--sweep", "window=3,0"], "window must be at least 1, got 0"),
        ("mdlm", ["--sweep", "tau=0.5", "--cost", "gflop"],
         r"--cost gflop is not reported by the decoder of this method \(allowed: nfe, seconds\)"),
        ("mdlm", ["--sweep", "tau=0.5", "--decode-options", "tau=0.4"], "--decode-options sets to 0.4"),
    ],
)  # fmt: skip
def test_refusals_before_anything_is_measured(tool, folder, method, argv, message, capsys):
    with pytest.raises(UserError, match=message):
        tool.main([str(folder(method)), *TASK, "--samples", "2", *argv])
    captured = capsys.readouterr()
    assert captured.out == "" and "batches" not in captured.err


def test_the_method_is_known_without_the_weights(folder, tmp_path):
    assert sweep.method_of(folder("alodlm")) == "alodlm"
    (tmp_path / "config.json").write_text("{}")
    assert sweep.method_of(tmp_path) == "ar"
