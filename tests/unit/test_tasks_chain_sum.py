"""Sums of reasoning-gym: right answers, knobs, and splits that share no question."""

from __future__ import annotations

import importlib.util
import random
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_data_common import IGNORE, byte_tokenizer, documents_of, loader, run_ranks
from torchtitan_ext import config as front
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.tasks import TaskSection, TaskSource
from torchtitan_ext.data.tasks.build import HELD_OUT, split_of
from torchtitan_ext.data.tasks.chain_sum import ChainSum, _library
from torchtitan_ext.errors import UserError
from torchtitan_ext.trainer import default_config

reasoning_gym = pytest.importorskip("reasoning_gym")

SPLITS = ("train", "validation", "test")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@st.composite
def knobs(draw) -> TaskSection:
    terms, digits = draw(st.integers(2, 7)), draw(st.integers(1, 6))
    return TaskSection(
        min_terms=terms,
        max_terms=terms + draw(st.integers(0, 3)),
        min_digits=digits,
        max_digits=digits + draw(st.integers(0, 3)),
        style=draw(st.sampled_from(["plain", "question"])),
    )


@settings(deadline=None, max_examples=80)
@given(knobs=knobs(), seed=st.integers(0, 2**32))
def test_samples_are_right_and_keep_to_the_knobs(knobs, seed):
    task = ChainSum(knobs)
    sample = task.sample(rng(seed))
    expression, prompt, answer = sample["expression"], sample["prompt"], sample["answer"]
    assert answer == f" {eval(expression)}"
    assert prompt.endswith(f"{expression} =")
    assert (prompt == f"{expression} =") == (knobs.style == "plain")
    numbers = re.split(r" [+-] ", expression)
    assert knobs.min_terms <= len(numbers) <= knobs.max_terms
    (digits,) = {len(number) for number in numbers}
    assert knobs.min_digits <= digits <= knobs.max_digits
    assert sample == ChainSum(knobs).sample(rng(seed))
    longest = task.longest_sample()
    assert len(prompt) <= len(longest["prompt"]) and len(answer) <= len(longest["answer"])
    assert task.final_answer(answer) == answer.strip() and task.score(answer, sample) == 1.0


@settings(deadline=None, max_examples=30)
@given(knobs=knobs())
def test_the_longest_sample_is_one_of_them(knobs):
    longest = ChainSum(knobs).longest_sample()
    numbers = re.split(r" [+-] ", longest["expression"])
    assert int(longest["answer"]) == eval(longest["expression"])
    assert len(numbers) == knobs.max_terms and {len(n) for n in numbers} == {knobs.max_digits}
    assert longest["prompt"].endswith(f"{longest['expression']} =")


def test_no_answer_of_a_small_space_is_longer():
    for terms in (2, 3, 12):
        task = ChainSum(TaskSection(min_terms=terms, max_terms=terms, max_digits=1))
        found = {len(task.sample(rng(i))["answer"]) for i in range(400)}
        assert max(found) == len(task.longest_sample()["answer"])


def test_samples_are_the_library_s():
    data = reasoning_gym.create_dataset(
        "chain_sum", seed=0, size=2**62, min_terms=3, max_terms=5, min_digits=2, max_digits=3
    )
    task = ChainSum(TaskSection(min_terms=3, max_terms=5, min_digits=2, max_digits=3, style="question"))
    for seed in range(20):
        item = data[int(rng(seed).integers(2**62))]
        sample = task.sample(rng(seed))
        assert (sample["prompt"], sample["answer"]) == (item["question"], f" {item['answer']}")


def test_terms_and_digits_take_every_value():
    task = ChainSum(TaskSection(min_terms=2, max_terms=4, min_digits=1, max_digits=3))
    seen = set()
    for i in range(300):
        numbers = re.split(r" [+-] ", task.sample(rng(i))["expression"])
        seen.add((len(numbers), len(numbers[0])))
    assert seen == {(n, d) for n in (2, 3, 4) for d in (1, 2, 3)}
    assert task.longest == 4 and task.at_length(9).longest == 9
    lengths = {len(task.at_length(9).sample(rng(i))["expression"].split()) for i in range(20)}
    assert lengths == {17}


@pytest.mark.parametrize(
    ("said", "exact", "score"),
    [(" 12", True, 1.0), ("+12.0", False, 1.0), ("012", False, 1.0), ("13", False, 0.0), ("", False, 0.0),
     ("is 12", False, 0.4)],
)  # fmt: skip
def test_scores(said, exact, score):
    task, sample = ChainSum(TaskSection()), {"prompt": "5 + 7 =", "answer": " 12"}
    assert (task.final_answer(said) == task.final_answer(sample["answer"])) is exact
    assert task.score(said, sample) == pytest.approx(score)


# --- splits ----------------------------------------------------------------------------

SMALL = TaskSection(min_terms=2, max_terms=2, max_digits=1)


def expressions(split: str, *, seed: int = 0, count: int = 600, knobs: TaskSection = SMALL) -> set[str]:
    source = TaskSource(ChainSum(knobs), seed=seed, split=split)
    return {source.read(i)["expression"] for i in range(count)}


def test_splits_of_200_questions_share_none_and_cover_all():
    found = {split: expressions(split) | expressions(split, seed=1) for split in SPLITS}
    everything = {f"{a} {op} {b}" for a in range(10) for b in range(10) for op in "+-"}
    assert found["validation"] and found["test"]
    assert sum(map(len, found.values())) == len(set().union(*found.values()))
    assert set().union(*found.values()) <= everything
    assert len(found["train"]) > 0.8 * len(everything)


def test_other_knobs_and_styles_do_not_leak_what_is_held_out():
    wide = TaskSection(min_terms=2, max_terms=3, max_digits=2, style="question")
    trained = expressions("train", knobs=wide, count=1500, seed=5)
    assert not trained & (expressions("validation") | expressions("test"))
    assert len(trained & expressions("train")) > 20


def test_the_held_out_share():
    splits = [split_of("chain_sum", f"{i} + 1") for i in range(4000)]
    for split, share in HELD_OUT.items():
        assert splits.count(split) / len(splits) == pytest.approx(share, abs=0.015)


def test_a_split_without_a_sample_ends_the_run_at_its_start(monkeypatch):
    monkeypatch.setattr("torchtitan_ext.data.tasks.build.HELD_OUT", {"test": 0.0})
    monkeypatch.setattr("torchtitan_ext.data.tasks.build.TRIES", 50)
    with pytest.raises(UserError, match=r"none is in split 'test' \(min_terms = 2, max_terms = 4"):
        loader(DataLoader.Config(dataset="chain_sum", split="test"), seq_len=64)


# --- the loader ------------------------------------------------------------------------


def config(**kwargs) -> DataLoader.Config:
    task = TaskSection(max_terms=3, max_digits=3)
    return DataLoader.Config(dataset="chain_sum", task=task, **{"prefetch": 0, **kwargs})


@settings(deadline=None, max_examples=8)
@given(before=st.integers(1, 3), after=st.integers(1, 3), steps=st.integers(0, 3))
def test_resume_gives_the_same_samples(before, after, steps):
    first, state = run_ranks(config(), world=before, batch=2, steps=steps, seq_len=64)
    second, _ = run_ranks(config(), world=after, batch=1, steps=3, state=state, seq_len=64)
    reference, _ = run_ranks(config(), world=1, batch=1, steps=len(first) + len(second), seq_len=64)
    assert first + second == reference


def test_documents_are_sums_whose_result_alone_is_a_target():
    tokenizer = byte_tokenizer()
    rows, _ = run_ranks(config(), world=1, batch=4, steps=3, seq_len=64)
    found = 0
    for tokens, labels in documents_of(rows):
        targets = [label for label in labels if label != IGNORE]
        if targets:
            expression, answer = tokenizer.decode(tokens).split(" =")
            assert targets[-1] == tokenizer.eos_id and tokenizer.decode(targets) == answer
            assert eval(expression) == int(answer)
            found += 1
    assert found > 24  # several share a row


def test_training_goes_on_without_end_and_validation_may_be_finite():
    source = TaskSource(ChainSum(TaskSection(min_digits=5, max_digits=6)), seed=0, split="train")
    assert source.size is None
    assert len({source.read(i)["expression"] for i in (*range(500), *range(10**15, 10**15 + 500))}) == 1000
    finite = TaskSource(ChainSum(TaskSection(samples=7)), seed=0, split="validation")
    assert finite.size == 7


def test_another_version_of_the_library_is_other_data_only_if_it_draws_others(monkeypatch):
    one = loader(config(), seq_len=64)
    next(iter(one))
    loader(config(), seq_len=64).load_state_dict(one.state_dict())
    cls = type(reasoning_gym.create_dataset("chain_sum"))
    draw = cls.__getitem__
    monkeypatch.setattr(cls, "__getitem__", lambda self, i: draw(self, i + 1))
    with pytest.raises(UserError, match=r"task\.library_probe"):
        loader(config(), seq_len=64).load_state_dict(one.state_dict())


# --- knobs, the config front, the library ------------------------------------------------

TOML = """
[model]
name = "ar"
[dataloader]
dataset = "chain_sum"
[dataloader.task]
max_terms = 5
style = "question"
"""


def parse(tmp_path, text: str):
    (tmp_path / "run.toml").write_text(text)
    return front.load_toml(tmp_path / "run.toml", make_default=default_config)


def test_toml(tmp_path):
    assert parse(tmp_path, TOML).dataloader.task == TaskSection(max_terms=5, style="question")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ('style = "plane"', r"task\.style: got 'plane'.*did you mean 'plain'"),
        ("min_terms = 1", "min_terms is 1, expected 2 or more"),
        ("min_digits = 0", "min_digits is 0, expected 1 or more"),
    ],
)
def test_knobs_out_of_range(tmp_path, new, message):
    with pytest.raises(UserError, match=message):
        parse(tmp_path, TOML.replace('style = "question"', new))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_terms": 5}, "min_terms is 5, expected at most max_terms, which is 4"),
        ({"min_digits": 3}, "min_digits is 3, expected at most max_digits, which is 2"),
        ({"max_digits": 1001}, "max_digits is 1001, expected at most 1000"),
    ],
)
def test_knobs_that_do_not_fit_each_other(kwargs, message):
    with pytest.raises(UserError, match=message):
        ChainSum(TaskSection(**kwargs))


def test_short_rows_and_foreign_knobs_are_refused():
    with pytest.raises(UserError, match=r"a sample has \d+ tokens, but training.seq_len is 16"):
        loader(config(), seq_len=16)
    foreign = DataLoader.Config(dataset="chain_sum", task=TaskSection(depth=3))
    with pytest.raises(UserError, match="depth belongs to another task; chain_sum has min_terms"):
        loader(foreign, seq_len=64)
    with pytest.raises(UserError, match="style is 'x', allowed: plain, question"):
        TaskSection(style="x")  # type: ignore


def test_a_missing_library_is_one_line(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "reasoning_gym" else real(n, *a)
    )
    with pytest.raises(
        UserError, match=r"'chain_sum' needs reasoning-gym: pip install \"torchtitan-ext\[tasks\]\""
    ):
        loader(config(), seq_len=64)


def test_importing_the_library_leaves_random_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "reasoning_gym.py").write_text("import random\ndrawn = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reasoning_gym")
    before = random.getstate()
    assert _library.__wrapped__().drawn >= 0 and random.getstate() == before
