"""Scores of models whose right and wrong answers are known."""

from __future__ import annotations

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.unit.test_data_common import byte_tokenizer
from tests.unit.test_tasks_samples import solve
from torchtitan_ext import backbones, models
from torchtitan_ext.data.config import Source
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.tasks import (
    TASKS,
    GroupRetrieval,
    ProsQA,
    Task,
    TaskSection,
    TaskSource,
    VariableAssignment,
)
from torchtitan_ext.decoding import Generation, GenerationResult
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import plots, tasks
from torchtitan_ext.evaluation.tasks import LengthResult, TextSetup, evaluate_lengths, parse_lengths
from torchtitan_ext.trainer import default_config

S3 = TaskSection(group=3, key_length=0, max_length=8)
VOCABULARY = 264


class Model(nn.Module):
    """Predicts what ``answer`` says of a row's tokens."""

    def __init__(self, answer) -> None:
        super().__init__()
        self.answer = answer
        self.batches: list[int] = []

    def get_attention_masks(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def forward(self, tokens, positions, attention_masks):
        assert torch.equal(positions, torch.arange(tokens.shape[1]).expand_as(tokens))
        assert torch.equal(attention_masks, positions)
        self.batches.append(len(tokens))
        predicted = torch.tensor([self.answer(row.tolist()) for row in tokens])
        return nn.functional.one_hot(predicted.clamp(min=0), VOCABULARY).float()


def oracle(n: int, keys: int) -> Model:
    return Model(lambda tokens: solve(tokens, n=n, keys=keys))


def guess(tokens: list[int]) -> list[int]:
    return torch.randint(128, 134, (len(tokens),)).tolist()


@pytest.mark.parametrize(
    "knobs", [S3, TaskSection(group=3, key_length=2), TaskSection(group=4, key_length=1)]
)
def test_an_oracle_is_always_right(knobs):
    model = oracle(knobs.group, knobs.key_length)
    results = evaluate_lengths(model, GroupRetrieval(knobs), [1, 3, 9], samples=10, batch_size=4)
    assert [r.length for r in results] == [1, 3, 9]
    for result in results:
        assert (result.token_accuracy, result.exact_match, result.samples) == (1.0, 1.0, 10)
        assert result.answer_accuracy is None and result.trained is None
    assert model.batches == [4, 4, 2] * 3


def test_a_guess_is_right_one_time_in_six():
    torch.manual_seed(0)
    one, two, long = evaluate_lengths(Model(guess), GroupRetrieval(S3), [1, 2, 40], samples=600)
    assert one.token_accuracy == one.exact_match == pytest.approx(1 / 6, abs=0.05)
    assert two.exact_match == pytest.approx(1 / 36, abs=0.02)
    assert long.token_accuracy == pytest.approx(1 / 6, abs=0.01) and long.exact_match == 0


def test_one_wrong_token_costs_the_exact_match_alone():
    def almost(tokens: list[int]) -> list[int]:
        return [*solve(tokens, n=3, keys=1)[:-1], 0]

    (result,) = evaluate_lengths(Model(almost), GroupRetrieval(TaskSection(group=3, key_length=1)), [5])
    assert result.token_accuracy == pytest.approx(0.9) and result.exact_match == 0
    assert result.samples == 256


def test_what_stands_before_the_delimiter_does_not_count():
    def right_behind(tokens: list[int]) -> list[int]:
        return [max(target, 7) for target in solve(tokens, n=3, keys=1)]

    (result,) = evaluate_lengths(Model(right_behind), GroupRetrieval(TaskSection(group=3, key_length=1)), [4])
    assert result.exact_match == 1


def test_samples_are_the_same_in_any_batch_and_new_ones():
    seen: list[list[int]] = []

    def remember(tokens: list[int]) -> list[int]:
        seen.append(tokens)
        return tokens

    knobs = TaskSection(group=3, key_length=2)
    results = [
        evaluate_lengths(Model(remember), GroupRetrieval(knobs), [3], samples=12, batch_size=size, seed=seed)
        for size, seed in ((5, 0), (12, 0), (12, 1))
    ]
    assert results[0] == results[1]
    assert seen[:12] == seen[12:24] != seen[24:]
    task = GroupRetrieval(knobs).at_length(3)
    for split in ("train", "validation"):
        source = TaskSource(task, seed=0, split=split)
        trained = [task.document(source.read(i)).tokens.tolist() for i in range(12)]
        assert not any(tokens in seen for tokens in trained)


def test_lengths_beyond_training_are_marked():
    marks = evaluate_lengths(oracle(3, 0), GroupRetrieval(S3), [7, 8, 9], samples=2, trained_maximum=8)
    assert [r.trained for r in marks] == [True, True, False]
    lines = [tasks.row(r) for r in marks]
    assert lines[0].split() == ["7", "2", "100.00%", "100.00%", "trained"] and lines[2].endswith("beyond")
    assert tasks.header(marks[0]).split() == [
        "length",
        "samples",
        "token",
        "accuracy",
        "exact",
        "match",
        "range",
    ]


# --- real models -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flavor"), [("ar", "smollm2-debug"), ("t2mlr", "smollm2-debug"), ("llama3", "debugmodel")]
)
def test_models_of_every_kind_give_logits_at_the_same_positions(name, flavor):
    config = default_config({"name": name})
    config.model.flavor, config.model.attention = flavor, "dense"
    if name == "t2mlr":
        config.t2mlr.start, config.t2mlr.end, config.t2mlr.forward_depth = 2, 3, 3
        config.t2mlr.backward_depth = 1
    model = models.build_spec(config).model.build()
    torch.manual_seed(0)
    model.init_states()
    (result,) = evaluate_lengths(model.eval(), GroupRetrieval(S3), [6], samples=4, batch_size=4)
    assert result.samples == 4 and 0 <= result.token_accuracy < 0.9


def test_lengths_that_do_not_fit_the_model_are_refused():
    config = backbones.build_config(backbones.lookup("smollm2-debug"), attention="dense")
    model = config.build()
    with pytest.raises(
        UserError, match=r"length 2048 needs 2049 tokens \(1 \+ 2048\), the model's context has 2048"
    ):
        evaluate_lengths(model, GroupRetrieval(S3), [2, 2048])
    text = TextSetup(tokenizer=byte_tokenizer(), decode=None)  # type: ignore
    with pytest.raises(UserError, match=r"length 8 needs 2\d\d\d tokens, the model's context has 2048"):
        evaluate_lengths(model, ProsQA(TaskSection()), [8], text=text)
    model.config.vocab_size = 200
    with pytest.raises(UserError, match="needs a vocabulary of 248, the model has 200"):
        evaluate_lengths(model, GroupRetrieval(S3), [2])


@pytest.mark.parametrize("kwargs", [{"samples": 0}, {"batch_size": 0}])
def test_nothing_to_measure_is_refused(kwargs):
    with pytest.raises(UserError, match="1 or more"):
        evaluate_lengths(oracle(3, 0), GroupRetrieval(S3), [1], **kwargs)


# --- tasks in words --------------------------------------------------------------------


def spoken(task: Task, length: int, change) -> TextSetup:
    """A decoder that knows the answers and says ``change`` of them."""
    tokenizer = byte_tokenizer()
    source = TaskSource(task.at_length(length), seed=0, split=tasks.SPLIT)
    known = {s["prompt"]: s["answer"] for s in (source.read(i) for i in range(8))}

    def decode(model, prompts, *, max_new_tokens, stop_ids=(), bos_id=None, **_):
        answers = [change(known[tokenizer.decode(p)]) for p in prompts]
        new = [[*tokenizer.encode(a), tokenizer.eos_id][:max_new_tokens] for a in answers]
        assert set(stop_ids) == {tokenizer.eos_id}
        rows = [GenerationResult(tokens=[], new_tokens=n, finish_reason="stop", forwards=1) for n in new]
        return Generation(results=rows, forwards=1, seconds=1.0)

    return TextSetup(tokenizer=tokenizer, decode=decode, stop_ids={tokenizer.eos_id})


@pytest.mark.parametrize(
    "task", [VariableAssignment(TaskSection()), ProsQA(TaskSection(nodes=30, path_length=4))]
)
def test_texts_are_scored_by_what_is_decoded(task):
    def result(change) -> LengthResult:
        text = spoken(task, 3, change)
        return evaluate_lengths(nn.Module(), task, [3], samples=8, batch_size=3, text=text)[0]

    right = result(lambda answer: answer)
    assert (right.token_accuracy, right.exact_match, right.answer_accuracy) == (1, 1, 1)
    short = result(lambda answer: answer[:-1])
    assert 0 < short.token_accuracy < 1 and short.exact_match == short.answer_accuracy == 0
    longer = result(lambda answer: answer + " x")
    assert longer.exact_match == 0


def test_a_right_answer_after_wrong_steps():
    task = ProsQA(TaskSection(nodes=30, path_length=4))
    text = spoken(task, 4, lambda answer: answer.replace("Steps", "steps"))
    (result,) = evaluate_lengths(nn.Module(), task, [4], samples=8, text=text)
    assert result.answer_accuracy == 1 and result.exact_match == 0 and 0.9 < result.token_accuracy < 1


def test_costs_are_of_all_batches_together():
    task = VariableAssignment(TaskSection())
    text = spoken(task, 3, lambda answer: answer)
    asked = []

    def decode(model, prompts, *, threshold=0.5, **kwargs):
        asked.append(threshold)
        rows = text.decode(model, prompts, **kwargs).results
        # Rows of the first batch take 1, 2, 3 forwards, those of the others one each.
        rows = [replace(r, forwards=1 + i * (len(asked) == 1)) for i, r in enumerate(rows)]
        return Generation(results=rows, forwards=3, seconds=1.0)

    setup = replace(text, decode=decode, options={"threshold": 0.75})
    (result,) = evaluate_lengths(nn.Module(), task, [3], samples=8, batch_size=3, text=setup)
    assert asked == [0.75] * 3
    # " 7" and EOS: three bytes a sample.
    assert result.forwards_per_sample == 11 / 8 and result.tokens_per_forward == 24 / 11
    assert result.score is None and "score" not in tasks.header(result)
    assert tasks.header(result).split()[-4:] == ["answer", "tokens/forward", "forwards/sample", "range"]
    assert tasks.row(result).split()[-4:] == ["100.00%", "2.182", "1.38", "-"]


def test_the_task_s_own_score():
    pytest.importorskip("reasoning_gym")
    task = TASKS["chain_sum"](TaskSection(min_digits=2))

    def result(change) -> LengthResult:
        return evaluate_lengths(nn.Module(), task, [3], samples=8, text=spoken(task, 3, change))[0]

    right = result(lambda answer: answer)
    assert (right.exact_match, right.answer_accuracy, right.score) == (1, 1, 1)
    assert tasks.row(right).split()[4:6] == ["100.00%", "1.0000"]
    # " 012": the same number in other words, with the same number of tokens where EOS is left out.
    zero = result(lambda answer: f" {int(answer):0{len(answer)}d}")
    assert zero.exact_match == zero.answer_accuracy == 0 and zero.score == 1
    wrong = result(lambda answer: " " + "x" * (len(answer) - 1))
    assert wrong.score == 0


def test_a_single_term_is_no_length():
    pytest.importorskip("reasoning_gym")
    task = TASKS["chain_sum"](TaskSection())
    with pytest.raises(UserError, match="min_terms is 1, expected 2 or more"):
        evaluate_lengths(nn.Module(), task, [1], text=TextSetup(tokenizer=byte_tokenizer(), decode=None))  # type: ignore


def test_texts_need_a_decoder():
    with pytest.raises(ValueError, match="needs a tokenizer and a decoder"):
        evaluate_lengths(nn.Module(), VariableAssignment(TaskSection()), [2])


# --- lengths, knobs, files -------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("16", [16]),
        ("1:4", [1, 2, 3, 4]),
        ("1,2,8", [1, 2, 8]),
        ("4:10:3", [4, 7, 10]),
        (" 3, 1:2 ,2", [1, 2, 3]),
    ],
)
def test_lengths_as_text(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize("text", ["", "a", "1:", "0", "5:2", "1:2:0", "1:2:3:4", "-1", "1,,2", "²"])
def test_lengths_that_are_none(text):
    with pytest.raises(UserError, match="lengths"):
        parse_lengths(text)


def run_config(**kwargs) -> SimpleNamespace:
    return SimpleNamespace(dataloader=DataLoader.Config(**kwargs))


def test_knobs_come_from_the_run():
    config = run_config(dataset="group_retrieval", task=S3)
    task, trained = tasks.task_of_run("group_retrieval", config)
    assert task.knobs == S3 and trained == 8
    task, trained = tasks.task_of_run("group_retrieval", config, length=30)
    assert task.longest == 30 and trained == 8
    task, trained = tasks.task_of_run("group_retrieval", config, overrides={"group": 4})
    assert task.knobs.group == 4 and trained is None
    task, trained = tasks.task_of_run("group_retrieval", config, overrides={"group": 3})
    assert trained == 8
    task, trained = tasks.task_of_run("variable_assignment", config)
    assert task.knobs == TaskSection() and trained is None


def test_knobs_come_from_the_task_in_a_mixture():
    config = run_config(sources=[Source(), Source(dataset="prosqa_hard", task=TaskSection(nodes=50))])
    task, trained = tasks.task_of_run("prosqa_hard", config)
    assert task.knobs.nodes == 50 and trained == 10


def test_a_small_graph_is_fine_for_short_paths():
    config = run_config()
    with pytest.raises(UserError, match="nodes is 12"):
        tasks.task_of_run("prosqa_hard", config, overrides={"nodes": 12})
    task, _ = tasks.task_of_run("prosqa_hard", config, overrides={"nodes": 12}, length=2)
    assert task.longest == 2
    with pytest.raises(UserError, match="did you mean 'prosqa_hard'"):
        tasks.task_of_run("prosqa_hart", config, length=2)


RESULTS = [
    LengthResult(length=1, samples=4, token_accuracy=1.0, exact_match=0.75, trained=True),
    LengthResult(length=2, samples=4, token_accuracy=0.5, exact_match=0.25, trained=False),
]


def test_csv(tmp_path):
    path = tmp_path / "new" / "a.csv"
    tasks.write_csv(path, RESULTS)
    lines = list(csv.DictReader(path.open()))
    assert [line["exact_match"] for line in lines] == ["0.75", "0.25"]
    assert [line["trained"] for line in lines] == ["True", "False"] and lines[0]["answer_accuracy"] == ""
    assert [p.name for p in path.parent.iterdir()] == ["a.csv"]


def test_an_interrupted_file_leaves_the_old_one(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), tasks.whole_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="cannot be written"):
        tasks.write_csv(path / "below", RESULTS)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder cannot be written"):
        tasks.write_csv(tmp_path / "folder", RESULTS)
    assert len(list(tmp_path.iterdir())) == 2


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    plots.draw_lengths(path, {"ours": RESULTS, "theirs": RESULTS[:1]}, trained_maximum=1, title="S3")
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]


def test_the_picture_shows_what_was_measured(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (figures.append(self), path.touch()))
    plots.draw_lengths(tmp_path / "a.png", {"ours": RESULTS}, trained_maximum=1)
    upper, lower = figures[0].axes
    for axes, values in ((upper, [75, 25]), (lower, [100, 50])):
        curve, mark = axes.lines
        assert list(curve.get_xdata()) == [1, 2] and list(curve.get_ydata()) == values
        assert set(mark.get_xdata()) == {1}
    assert upper.get_ylabel() == "exact match (%)" and lower.get_ylabel() == "token accuracy (%)"
