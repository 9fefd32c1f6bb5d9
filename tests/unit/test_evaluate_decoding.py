"""Decoding strategies side by side: measures, prompts, tools/evaluate.py --decode."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import ROOT
from tests.unit.test_load import random_model, write_checkpoint, write_hf
from torchtitan_ext import backbones, models
from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.data.sources import held_out
from torchtitan_ext.decoding import autoregressive, block_diffusion, decoder_for, self_speculative
from torchtitan_ext.decoding.choice import chosen_decoder
from torchtitan_ext.decoding.strategies import parse
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import decoding
from torchtitan_ext.evaluation.prompts import held_out_prompts
from torchtitan_ext.trainer import default_config

PROMPT, NEW, COUNT, SEED = 6, 14, 3, 2
TIDAR = """
[model]
name = "tidar"
flavor = "smollm2-debug"

[tidar]
block_size = 4

[dataloader]
dataset = "text"
dataset_path = "{data}"
txt_documents = "line"
held_out = 0.4
"""
STRATEGIES = "ar,tidar:3,confidence,left_to_right:2,threshold:0.5"
OPTIONS = ("--prompt-tokens", str(PROMPT), "--max-new-tokens", str(NEW), "--seed", str(SEED))


def documents() -> list[str]:
    """Lines of many lengths, each different from the start."""
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefgh ", k=rng.randrange(5, 60))) for _ in range(40)]


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import evaluate as module
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return module


@pytest.fixture(scope="module")
def weights() -> backbones.Backbone:
    torch.manual_seed(0)
    return random_model(backbones.lookup("smollm2-debug"))


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    """A TiDAR checkpoint trained on part of a file."""
    dump = tmp_path_factory.mktemp("run")
    (dump / "data.txt").write_text("\n".join(documents()))
    return checkpoint(dump / "step-1", weights, TIDAR.format(data=dump / "data.txt"))


def checkpoint(path, weights, toml: str):
    write_checkpoint(path, weights)
    (path / "config.toml").write_text(toml)
    return path


@pytest.fixture(scope="module")
def loaded(folder) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def prompts(loaded):
    return held_out_prompts(loaded, count=COUNT, prompt_tokens=PROMPT, new_tokens=NEW, seed=SEED)[0]


@pytest.fixture(scope="module")
def report(tool, folder) -> dict[str, Any]:
    """The JSON of one run."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr(
            "builtins.print", lambda *a, file=None, **k: lines.append(str(a[0])) if not file else None
        )
        tool.main([str(folder), "--decode", STRATEGIES, *OPTIONS, "--prompts", str(COUNT), "--json"])
    return json.loads(lines[-1])


# --- measures --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, share",
    [([], None), ([1, 2, 3], None), ([1, 2, 3, 4], 0.0), ([1] * 7, 0.75), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)],
)
def test_repetition_of_known_texts(tokens, share):
    assert decoding.repetition(tokens) == pytest.approx(share)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=4, max_size=40))
def test_repetition_counts_the_runs_that_came_before(tokens):
    runs = [tokens[i : i + 4] for i in range(len(tokens) - 3)]
    seen = sum(run in runs[:i] for i, run in enumerate(runs))
    assert decoding.repetition(tokens) == pytest.approx(seen / len(runs))


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), max_size=8), st.lists(st.integers(0, 1), max_size=8))
def test_prefixes_and_matches(a, b):
    n = decoding.common_prefix(a, b)
    assert a[:n] == b[:n] and (n in (len(a), len(b)) or a[n] != b[n])
    places = min(len(a), len(b))
    assert decoding.matches(a, b) == (len([i for i in range(places) if a[i] == b[i]]), places)


def test_halves_by_repetition():
    texts = [[1] * 9, [1, 2, 3, 4, 5], [1, 2], [1, 2, 1, 2, 1, 2], [5, 6, 7, 8]]
    assert decoding.split_by_repetition(texts) == ([1, 4], [3, 0])
    assert decoding.split_by_repetition(texts[:1]) == ([0], [])


def test_nats_are_those_of_a_plain_forward_over_the_text(loaded, weights):
    prompt, new = [70, 80, 90], [75, 75, 99, 260]
    text = torch.tensor([prompt + new])
    positions = torch.arange(text.shape[1])[None]
    with torch.no_grad():
        logprobs = weights(text, positions, weights.get_attention_masks(positions)).log_softmax(-1)
    want = -sum(float(logprobs[0, i - 1, text[0, i]]) for i in range(3, 7))
    assert decoding.text_nats(loaded.model, prompt, new) == pytest.approx(want, rel=1e-5)
    assert loaded.model._skip_lm_head is False


@pytest.mark.parametrize("method", ["looped", "t2mlr"])
def test_the_judge_is_the_model_that_decodes(method):
    """Greedy text with another last token is less probable, whatever the method does besides attention."""
    config: Any = default_config({"name": method})
    config.model.name, config.model.flavor, config.model.attention = method, "smollm2-debug", "dense"
    section = getattr(config, method)
    section.start, section.end = 2, 3
    model = models.build_spec(config).model.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
    model.eval().requires_grad_(False)
    (row,) = decoder_for(method)(model, [[70, 80, 90]], max_new_tokens=6)
    best = decoding.text_nats(model, [70, 80, 90], row.new_tokens)
    others = [token for token in range(60, 260, 9) if token != row.new_tokens[-1]]
    assert all(best < decoding.text_nats(model, [70, 80, 90], [*row.new_tokens[:-1], t]) for t in others)


def test_which_models_have_a_causal_pass(loaded, weights):
    assert decoding.has_causal_pass(loaded.model) and decoding.has_causal_pass(weights)
    assert not decoding.has_causal_pass(random_model(backbones.lookup("llada-debug")))
    assert not decoding.has_causal_pass(torch.nn.Linear(2, 2))
    for field in ({"clean_attention": "block"}, {"pause_tokens": 2}):
        model = random_model(backbones.lookup("smollm2-debug"))
        model.config = SimpleNamespace(size=model.config.size, **field)
        assert not decoding.has_causal_pass(model)


def test_ar_of_a_model_without_a_mask_token_is_its_methods_decoder(loaded, weights):
    plain = parse("ar")
    assert chosen_decoder(plain, weights, method="t2mlr") is decoder_for("t2mlr")
    assert chosen_decoder(None, loaded.model, method="tidar") is decoder_for("tidar")
    assert chosen_decoder(plain, loaded.model, method="tidar") is autoregressive.generate


# --- prompts ---------------------------------------------------------------------------


def test_prompts_begin_held_out_documents(loaded, prompts):
    kept = {text for i, text in enumerate(documents()) if held_out(str(i), 0.4)}
    bos, decode = [loaded.tokenizer.bos_id], loaded.tokenizer.decode
    assert len(prompts) == COUNT
    for prompt in prompts:
        assert prompt.tokens[:1] == bos and len(prompt.tokens) == PROMPT and len(prompt.continuation) == NEW
        whole = decode(prompt.tokens + prompt.continuation)
        assert [text for text in kept if text.startswith(decode(prompt.tokens[1:]))]
        assert any(text.startswith(whole) or whole.startswith(text) for text in kept)


def test_the_seed_picks_them(loaded, prompts):
    options = {"count": COUNT, "prompt_tokens": PROMPT, "new_tokens": NEW}
    assert held_out_prompts(loaded, seed=SEED, **options) == (prompts, "text")
    assert held_out_prompts(loaded, seed=SEED + 1, **options)[0] != prompts


def test_the_validation_section_comes_first(loaded, tmp_path):
    (tmp_path / "own.txt").write_text("validation text of its own\n" * 2)
    config = dataclasses.replace(loaded.config, validator=dataclasses.replace(loaded.config.validator))
    config.validator.enable = True
    config.validator.dataloader = dataclasses.replace(
        loaded.config.dataloader, dataset_path=str(tmp_path / "own.txt"), held_out=None
    )
    own = dataclasses.replace(loaded, config=config)
    found, _ = held_out_prompts(own, count=2, prompt_tokens=5, new_tokens=4, seed=0)
    assert {loaded.tokenizer.decode(p.tokens[1:]) for p in found} == {"vali"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"held_out": None}, "'text' has no held-out part .*give --prompts-file FILE"),
        ({"dataset": "stdlib", "dataset_path": None, "held_out": 0.0}, "'stdlib' has no held-out part"),
        (
            {"dataset": "variable_assignment"},
            "the task 'variable_assignment': give --task, or --prompts-file",
        ),
        ({}, r"only \d+ of \d+ held-out documents \(text\) have 6 \+ 40 tokens, but 9 .*--prompts-file"),
    ],
)
def test_data_without_prompts_is_refused(loaded, changes, message):
    config = dataclasses.replace(
        loaded.config, dataloader=dataclasses.replace(loaded.config.dataloader, **changes)
    )
    with pytest.raises(UserError, match=message) as error:
        held_out_prompts(
            dataclasses.replace(loaded, config=config), count=9, prompt_tokens=6, new_tokens=40, seed=0
        )
    assert "\n" not in str(error.value)


def test_a_folder_names_its_splits_or_has_no_held_out_part(loaded, tmp_path):
    def prompts_of(path) -> list[str]:
        loader = dataclasses.replace(loaded.config.dataloader, dataset_path=str(path), held_out=None)
        own = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, dataloader=loader))
        found, _ = held_out_prompts(own, count=1, prompt_tokens=5, new_tokens=4, seed=0)
        return [loaded.tokenizer.decode(p.tokens[1:]) for p in found]

    (tmp_path / "train-0.txt").write_text("training text of a folder")
    with pytest.raises(UserError, match="no file of split 'validation'.*give --prompts-file FILE"):
        prompts_of(tmp_path)
    (tmp_path / "validation-0.txt").write_text("validation text of a folder")
    assert prompts_of(tmp_path) == ["vali"]


def test_a_hugging_face_folder_names_no_data(weights, tmp_path):
    loaded = load_model(write_hf(tmp_path / "hf", weights))
    with pytest.raises(UserError, match="does not say what it was trained on: give --prompts-file FILE"):
        held_out_prompts(loaded, count=1, prompt_tokens=2, new_tokens=2, seed=0)


# --- the table -------------------------------------------------------------------------


def decoded(loaded, prompts, name: str, **options) -> list[Any]:
    """Prompt by prompt, with the decoders themselves."""
    found = []
    for prompt in prompts:
        common = {"max_new_tokens": NEW, "stop_ids": loaded.stop_ids, **options}
        mask_id, start = loaded.model.config.mask_token_id, [prompt.tokens]
        if name == "ar":
            found.append(autoregressive.generate(loaded.model, start, **common))
        elif name == "tidar:3":
            found.append(
                self_speculative.generate(loaded.model, start, mask_id=mask_id, draft_length=3, **common)
            )
        else:
            policy, per, tau = {
                "confidence": ("confidence", 1, 0.9),
                "left_to_right:2": ("left_to_right", 2, 0.9),
                "threshold:0.5": ("threshold", 1, 0.5),
            }[name]
            found.append(
                block_diffusion.generate(
                    loaded.model, start, mask_id=mask_id, block_size=4, policy=policy,
                    tokens_per_forward=per, threshold=tau, **common,
                )
            )  # fmt: skip
    return found


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("number, name", enumerate(STRATEGIES.split(",")))
def test_every_number_of_a_row(report, loaded, prompts, number, name):
    row = report["results"][number]
    runs = decoded(loaded, prompts, name)
    plain = [run[0].new_tokens for run in decoded(loaded, prompts, "ar")]
    texts, forwards = [run[0].new_tokens for run in runs], [run.forwards for run in runs]
    tokens = sum(map(len, texts))
    assert (row["strategy"], row["label"]) == (name, parse(name).label) and row["prompts"] == COUNT
    assert (row["new_tokens"], row["forwards"]) == (tokens, sum(forwards))
    assert row["tokens_per_forward"] == pytest.approx(tokens / sum(forwards))
    assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
    assert row["same_as_ar"] == pytest.approx(mean(a == b for a, b in zip(texts, plain, strict=True)))
    prefixes = [
        max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])
        for a, b in zip(texts, plain, strict=True)
    ]
    assert row["common_prefix"] == pytest.approx(mean(prefixes))
    repeated = [1 - len({tuple(t[i : i + 4]) for i in range(len(t) - 3)}) / (len(t) - 3) for t in texts]
    assert row["repetition"] == pytest.approx(mean(repeated))
    order = sorted(range(COUNT), key=lambda i: repeated[i])
    for half, rows in (("low", order[:2]), ("high", order[2:])):
        rate = sum(len(texts[i]) for i in rows) / sum(forwards[i] for i in rows)
        assert row[f"tokens_per_forward_{half}"] == pytest.approx(rate)
        assert row[f"{half}_repetition"] == pytest.approx(mean(repeated[i] for i in rows))
    nats = sum(decoding.text_nats(loaded.model, p.tokens, t) for p, t in zip(prompts, texts, strict=True))
    assert row["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
    right = [
        a == b for p, t in zip(prompts, texts, strict=True) for a, b in zip(t, p.continuation, strict=False)
    ]
    assert row["accuracy"] == pytest.approx(mean(right))


def test_drafts_are_counted_and_leave_the_text_as_it_is(report, loaded, prompts):
    row = report["results"][1]
    counts = [n for run in decoded(loaded, prompts, "tidar:3") for n in run.extra["accepted"][0]]
    assert row["mean_accepted"] == pytest.approx(mean(counts))
    assert row["accepted_histogram"] == {str(n): counts.count(n) for n in sorted(set(counts))}
    assert row["same_as_ar"] == 1.0 and row["common_prefix"] == NEW
    assert all(r["mean_accepted"] is None for i, r in enumerate(report["results"]) if i != 1)


def test_the_report_says_how_it_came_about(report, folder, loaded, prompts):
    assert {k: v for k, v in report.items() if k not in ("results", "reference")} == {
        "checkpoint": str(folder), "method": "tidar", "data": "text", "prompts": COUNT,
        "prompt_tokens": [PROMPT] * COUNT, "max_new_tokens": NEW, "batch_size": 1, "temperature": 0.0,
        "top_k": 0, "top_p": 1.0, "seed": SEED,
    }  # fmt: skip
    nats = sum(decoding.text_nats(loaded.model, p.tokens, p.continuation) for p in prompts)
    assert report["reference"]["nats_per_token"] == pytest.approx(nats / (COUNT * NEW), rel=1e-5)
    assert report["reference"]["repetition"] == pytest.approx(
        mean(decoding.repetition(p.continuation) for p in prompts)
    )
    assert set(report["results"][0]) == {field.name for field in dataclasses.fields(decoding.StrategyResult)}
    assert report["results"][0]["speed_vs_ar"] == 1.0
    assert all(row["speed_vs_ar"] > 0 for row in report["results"])


def test_the_ratio_of_speeds_is_the_median_over_batches(prompts):
    def trial(name: str, rates: list[float]) -> decoding.Trial:
        rows = len(prompts)
        return decoding.Trial(
            strategy=parse(name), decode=autoregressive.generate, new=[[1]] * rows, forwards=[1] * rows,
            seconds=[1.0] * rows, rates=rates,
        )  # fmt: skip

    plain, other = trial("ar", [2.0, 1.0, 4.0]), trial("tidar", [1.0, 3.0, 8.0])
    result = decoding.StrategyResult.of(other, prompts, plain=plain, judge=None, is_greedy=True)
    assert result.speed_vs_ar == 2.0 and result.nats_per_token is None and result.repetition is None


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    timed = ("seconds", "tokens_per_second", "speed_vs_ar")
    rounded = {"nats_per_token": round(row["nats_per_token"], 4)}
    return {k: v for k, v in {**row, **rounded}.items() if k not in timed}


def test_batches_change_nothing_but_the_time(tool, folder, report, capsys):
    tool.main(
        [
            str(folder),
            "--decode",
            STRATEGIES,
            *OPTIONS,
            "--prompts",
            str(COUNT),
            "--json",
            "--batch-size",
            "2",
        ]
    )
    again = json.loads(capsys.readouterr().out)
    for row, before in zip(again["results"], report["results"], strict=True):
        assert timeless(row) == timeless(before)


def test_table_and_csv(tool, folder, report, tmp_path, capsys):
    file = tmp_path / "new" / "a.csv"
    tool.main([str(folder), "--decode", "ar, tidar:3", *OPTIONS, "--prompts", "3", "--csv", str(file)])
    captured = capsys.readouterr()
    title, header, *rows, own = captured.out.splitlines()
    assert title == f"{folder}: 3 prompts (text), {NEW} new tokens, greedy"
    assert header.split()[:4] == ["strategy", "T/NFE", "tokens", "forwards"] and len(rows) == 2
    assert len({len(line) for line in (header, *rows)}) == 1  # aligned
    assert [row.split()[0] for row in rows] == ["ar", "tidar:3"]
    assert rows[1].split()[1] == f"{report['results'][1]['tokens_per_forward']:.2f}"
    assert rows[0].split()[-1] == "-" and header.split()[-1] == "accepted"
    assert own.startswith("the documents' own text: repeated ") and own.endswith(" nats/token")
    assert captured.err.splitlines()[-1] == "3 of 3 prompts"
    lines = list(csv.DictReader(file.open()))
    assert [line["strategy"] for line in lines] == ["ar", "tidar:3"]
    assert json.loads(lines[1]["accepted_histogram"]) == report["results"][1]["accepted_histogram"]
    assert float(lines[1]["repetition"]) == pytest.approx(report["results"][1]["repetition"])
    assert lines[0]["mean_accepted"] == "" and [p.name for p in file.parent.iterdir()] == ["a.csv"]


def test_sampled_text_is_not_compared_with_greedy(tool, folder, loaded, prompts, capsys):
    options = [
        *OPTIONS,
        "--prompts",
        "3",
        "--json",
        "--temperature",
        "0.8",
        "--top-k",
        "20",
        "--top-p",
        "0.9",
    ]
    tool.main([str(folder), "--decode", "ar,tidar:2", *options])
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["same_as_ar"] for row in rows] == [None, None] and rows[1]["common_prefix"] is None
    sampling = decoding.SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
    texts = [
        decoded(loaded, [prompt], "ar", sampling=sampling, seeds=[SEED + i])[0][0].new_tokens
        for i, prompt in enumerate(prompts)
    ]
    known = [value for t in texts if (value := decoding.repetition(t)) is not None]  # one ends early
    assert len(known) == 2 and rows[0]["repetition"] == pytest.approx(mean(known))
    assert rows[0]["new_tokens"] == sum(map(len, texts))


def test_prompts_of_a_file_have_no_known_continuation(tool, folder, tmp_path, capsys):
    (tmp_path / "prompts").write_text("def f\n\nclass\nimport os\n")
    argv = [
        str(folder),
        "--decode",
        "tidar",
        "--prompts-file",
        str(tmp_path / "prompts"),
        "--max-new-tokens",
        "5",
    ]
    tool.main([*argv, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["prompt_tokens"] == [6, 6, 10] and report["reference"] is None
    row = report["results"][0]
    assert row["accuracy"] is row["same_as_ar"] is row["speed_vs_ar"] is None and row["nats_per_token"] > 0
    tool.main([*argv, "--prompts", "2"])
    _, header, line = capsys.readouterr().out.splitlines()
    assert "accuracy" not in header and "as ar" not in header and line.split()[2] == "10"


def test_a_model_without_a_mask_token_decodes_as_its_method_does(tool, weights, tmp_path, capsys):
    path = checkpoint(tmp_path / "step-1", weights, '[model]\nname = "ar"\nflavor = "smollm2-debug"\n')
    (tmp_path / "prompts").write_text("ab\n")
    argv = [str(path), "--prompts-file", str(tmp_path / "prompts"), "--max-new-tokens", "4", "--json"]
    tool.main([*argv, "--decode", "ar"])
    assert json.loads(capsys.readouterr().out)["results"][0]["tokens_per_forward"] == 1.0
    with pytest.raises(UserError, match="'tidar:4' needs a model trained with a mask token"):
        tool.main([*argv, "--decode", "ar,tidar:4"])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--decode", "ar,tidor"], "unknown decoding strategy 'tidor'; did you mean 'tidar'"),
        (["--decode", "ar,"], "unknown decoding strategy ''"),
        (["--decode", "tidar:8:1.5"], "BETA must be a number between 0 and 1, got '1.5'"),
        (["--decode", "tidar:0"], "DRAFT must be a whole number of at least 1"),
        (["--decode", "ar,tidar:4,tidar:4:1"], "tidar:4 comes twice"),
        (["--decode", "ar", "--prompts", "0"], "--prompts must be at least 1, got 0"),
        (["--decode", "ar", "--prompt-tokens", "0"], "--prompt-tokens must be at least 1"),
        (["--decode", "ar", "--max-new-tokens", "-3"], "--max-new-tokens must be at least 1, got -3"),
        (["--decode", "ar", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["--decode", "ar", "--temperature", "-1"], "temperature must be"),
        (["--decode", "ar", "--csv", "."], "--csv . is a folder"),
        (["--decode", "ar", "--lengths", "3"], "--lengths belongs to --task"),
        (["--decode", "ar", "--png", "a.png"], "--png belongs to --task"),
        (["--decode", "ar", "--min-digits", "0"], "--min-digits belongs to --task"),
        (["--decode", "tidar", "--decode-options", "beta=1"], "--decode-options belongs to --task"),
        (["--decode", "ar", "--prompts-file", "a", "--prompt-tokens", "3"], "--prompt-tokens has no use"),
        (["--decode", "ar", "--task", "group_retrieval"], "'group_retrieval', which is not decoded"),
        (["--decode", "ar", "--task", "variable_assignment", "--top-k", "2"], "--top-k belongs to --decode"),
        (["--decode", "ar", "--task", "variable_assignment", "--decode-options", "a=1"], "it or --decode"),
    ],
)  # fmt: skip
def test_refusals_before_a_model_is_loaded(tool, folder, argv, message, monkeypatch, capsys):
    monkeypatch.setattr(tool, "load_model", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=message) as error:
        tool.main([str(folder), *argv])
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "argv, message",
    [
        (["confidence:5"], "tokens_per_forward must be between 1 and the block size 4, got 5"),
        (["ar", "--prompts-file", "absent"], "--prompts-file absent: No such file"),
        (["ar", "--prompts", "3", "--max-new-tokens", "3000"], "only 0 of .* have 64 .* 3000 tokens"),
        (["ar", "--prompts-file", str(ROOT / "LICENSE"), "--max-new-tokens", "2040"],
         r"\d+ tokens of a prompt and --max-new-tokens 2040 are 2\d\d\d, the model's context has 2048"),
    ],
)  # fmt: skip
def test_refusals_before_anything_is_measured(tool, folder, argv, message, capsys):
    name, *rest = argv
    given = rest or ["--prompt-tokens", "4", "--max-new-tokens", "6", "--prompts", "2"]
    with pytest.raises(UserError, match=message):
        tool.main([str(folder), "--decode", name, *given])
    assert capsys.readouterr() == ("", "")


# --- with a task -----------------------------------------------------------------------


def test_a_task_with_every_strategy(tool, folder, tmp_path, capsys):
    argv = [
        str(folder),
        "--task",
        "variable_assignment",
        "--chains",
        "2",
        "--lengths",
        "1,2",
        "--samples",
        "3",
    ]
    tool.main([*argv, "--json"])
    (own,) = [json.loads(capsys.readouterr().out)["results"]]
    tool.main([*argv, "--decode", "ar,tidar:4,threshold", "--csv", str(tmp_path / "a.csv")])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert "variable_assignment" in title and header.split()[:2] == ["strategy", "length"]
    names = ["ar", "tidar:4", "threshold"]
    assert [row.split()[:2] for row in rows] == [[name, n] for name in names for n in ("1", "2")]
    lines = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [line["strategy"] for line in lines] == [name for name in names for _ in range(2)]
    tool.main([*argv, "--decode", "ar,tidar:4,threshold", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert list(report["results"]) == names and report["results"]["tidar:4"] == own
    for plain, drafted in zip(report["results"]["ar"], own, strict=True):
        assert plain["tokens_per_forward"] == 1.0 and drafted["answer_accuracy"] == plain["answer_accuracy"]
        assert drafted["token_accuracy"] == plain["token_accuracy"]
