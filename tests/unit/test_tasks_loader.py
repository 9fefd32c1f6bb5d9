"""Tasks through the loader, the config front and the registry."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_data_common import (
    IGNORE,
    byte_tokenizer,
    documents_of,
    finite_rows,
    loader,
    run_ranks,
)
from tests.unit.test_tasks_samples import solve
from torchtitan_ext import config as front
from torchtitan_ext.data.config import Source
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.tasks import TASKS, TaskSection
from torchtitan_ext.errors import UserError
from torchtitan_ext.trainer import default_config

SEQ_LEN = {
    "group_retrieval": 64,
    "variable_assignment": 192,
    "bounded_counter": 64,
    "prosqa_hard": 1024,
    "chain_sum": 64,
}
KNOBS = {
    "group_retrieval": {"group": 3, "key_length": 2, "max_length": 8},
    "variable_assignment": {"depth": 3},
    "bounded_counter": {"moves": 16},
    "prosqa_hard": {"nodes": 20, "path_length": 3, "path_spread": 1},
    "chain_sum": {"min_digits": 5, "max_digits": 6, "max_terms": 3},
}
INSTALLED = [n for n, t in TASKS.items() if t.library is None or importlib.util.find_spec(t.library)]


def config(name: str = "group_retrieval", *, knobs: dict | None = None, **kwargs) -> DataLoader.Config:
    task = TaskSection(**{**KNOBS[name], **(knobs or {})})
    return DataLoader.Config(dataset=name, task=task, **{"prefetch": 0, **kwargs})


@pytest.mark.parametrize("name", INSTALLED)
def test_rows_do_not_depend_on_ranks(name):
    seq_len = SEQ_LEN[name]
    reference, _ = run_ranks(config(name), world=1, batch=1, steps=12, seq_len=seq_len)
    assert len({str(row) for row in reference}) == 12
    for world, batch in [(1, 4), (2, 3), (3, 2)]:
        rows, _ = run_ranks(config(name), world=world, batch=batch, steps=2, seq_len=seq_len)
        assert rows == reference[: len(rows)], (world, batch)


@settings(deadline=None, max_examples=15)
@given(before=st.integers(1, 3), after=st.integers(1, 4), steps=st.integers(0, 4))
def test_resume_under_any_number_of_ranks(before, after, steps):
    first, state = run_ranks(config(), world=before, batch=2, steps=steps, seq_len=64)
    second, _ = run_ranks(config(), world=after, batch=1, steps=3, state=state, seq_len=64)
    reference, _ = run_ranks(config(), world=1, batch=1, steps=len(first) + len(second), seq_len=64)
    assert first + second == reference


def test_documents_in_rows_are_whole_samples():
    rows, _ = run_ranks(config(), world=1, batch=8, steps=8, seq_len=64)
    found = 0
    for tokens, labels in documents_of(rows):
        if ord("|") in tokens:
            assert labels == solve(tokens, n=3, keys=2)
            found += 1
        else:
            assert set(labels) == {IGNORE} and set(tokens) == {byte_tokenizer().pad_id}
    assert found > 64  # several short samples share a row


@pytest.mark.parametrize("name", ["variable_assignment", "prosqa_hard"])
def test_labels_of_texts_are_the_next_tokens_of_the_answer(name):
    tokenizer = byte_tokenizer()
    rows, _ = run_ranks(config(name), world=1, batch=4, steps=2, seq_len=SEQ_LEN[name])
    for tokens, labels in documents_of(rows):
        if set(labels) == {IGNORE}:
            continue
        supervised = [i for i, label in enumerate(labels) if label != IGNORE]
        assert [labels[i] for i in supervised] == [tokens[i + 1] for i in supervised]
        assert supervised == list(range(supervised[0], len(tokens) - 1))
        assert labels[supervised[-1]] == tokenizer.eos_id
        prompt = tokenizer.decode(tokens[: supervised[0] + 1])
        answer = tokenizer.decode(tokens[supervised[0] + 1 :])
        if name == "variable_assignment":
            assert prompt.endswith("Answer:") and answer.strip().isdigit()
        elif name == "bounded_counter":
            assert set(prompt[:-2]) <= set("+-") and prompt[-2] == "=" and answer.isdigit()
        else:
            assert prompt.endswith("?\n") and answer.startswith("Steps: ") and "\nOutput: " in answer


@pytest.mark.parametrize("name", INSTALLED)
def test_validation_draws_other_samples(name):
    texts = {}
    for split in ("train", "validation", "test"):
        rows, _ = run_ranks(config(name, split=split), world=1, batch=8, steps=2, seq_len=SEQ_LEN[name])
        documents = [d for d in documents_of(rows) if set(d[1]) != {IGNORE}]
        # The few shortest samples of the group task may be equal by chance.
        texts[split] = {str(tokens) for tokens, _ in documents}
        assert len(texts[split]) == len(documents)
    assert not texts["train"] & texts["validation"] and not texts["test"] & texts["validation"]


def test_a_finite_set_is_read_once_an_epoch():
    setup = config(knobs={"samples": 21}, infinite=False, split="validation")
    documents = [d for d in documents_of(finite_rows(setup, batch=2, seq_len=64)) if ord("|") in d[0]]
    again = [d for d in documents_of(finite_rows(setup, batch=3, seq_len=64)) if ord("|") in d[0]]
    assert len(documents) == 21 and sorted(map(str, documents)) == sorted(map(str, again))


def test_a_mixture_of_tasks():
    sources = [
        Source(dataset="group_retrieval", task=TaskSection(group=3, key_length=0, fixed_length=5)),
        Source(dataset="variable_assignment", task=TaskSection(depth=1, chains=2), weight=2.0),
    ]
    setup = DataLoader.Config(sources=sources, prefetch=0)
    rows, _ = run_ranks(setup, world=1, batch=8, steps=4, seq_len=128)
    documents = [tokens for tokens, labels in documents_of(rows) if set(labels) != {IGNORE}]
    group = [d for d in documents if d[0] == ord("|")]
    assert all(len(d) == 6 for d in group)
    assert 0.15 < len(group) / len(documents) < 0.55


@pytest.mark.parametrize(
    ("kwargs", "knobs", "seq_len", "message"),
    [
        ({}, {"group": 5, "key_length": 4, "max_length": 32}, 760,
         r"up to 761 tokens \(5! \* \(1 \+ 4\) \+ 1 \+ 32 \* \(1 \+ 4\)\), but training.seq_len is 760"),
        ({}, {"key_length": 0, "max_length": 64}, 64, r"up to 65 tokens \(1 \+ 64\)"),
        ({"dataset_path": "x"}, {}, 64, "takes no dataset_path"),
        ({"held_out": 0.1}, {}, 64, "takes no held_out"),
        ({"packing": "concatenate"}, {}, 64, "would cut samples"),
        ({"infinite": False}, {}, 64, "infinite = false needs task.samples"),
        ({}, {"nodes": 50}, 64, r"task: nodes belongs to another task; group_retrieval has group,"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_at_construction(kwargs, knobs, seq_len, message):
    with pytest.raises(UserError, match=message):
        loader(config(knobs=knobs, **kwargs), seq_len=seq_len)


def test_a_row_that_just_holds_the_longest_sample_is_enough():
    setup = config(knobs={"fixed_length": 8})
    loader(setup, seq_len=6 * 3 + 1 + 8 * 3)
    with pytest.raises(UserError, match="43 tokens"):
        loader(setup, seq_len=42)


@pytest.mark.parametrize("name", ["variable_assignment", "prosqa_hard"])
def test_short_rows_are_refused_for_texts(name):
    with pytest.raises(UserError, match=r"a sample has \d+ tokens, but training.seq_len is 50"):
        loader(config(name), seq_len=50)


def test_knobs_for_data_that_is_no_task_are_refused():
    with pytest.raises(UserError, match="section task belongs to the data sets group_retrieval"):
        loader(DataLoader.Config(dataset="stdlib", task=TaskSection(group=3)))


def test_other_knobs_are_other_data():
    one = loader(config(), seq_len=64)
    next(iter(one))
    other = loader(config(knobs={"max_length": 7}), seq_len=64)
    with pytest.raises(UserError, match="task.max_length: 8 in the checkpoint, 7 now"):
        other.load_state_dict(one.state_dict())


# --- the config front ------------------------------------------------------------------

TOML = """
[model]
name = "ar"
[dataloader]
dataset = "group_retrieval"
[dataloader.task]
group = 4
key_length = 2
[[dataloader.sources]]
dataset = "variable_assignment"
[dataloader.sources.task]
depth = 3
[validation.dataloader]
dataset = "group_retrieval"
[validation.dataloader.task]
samples = 128
"""


def parse(tmp_path, text: str, *options: str):
    (tmp_path / "run.toml").write_text(text)
    return front.parse(
        ["--job.config_file", str(tmp_path / "run.toml"), *options], make_default=default_config
    )


def test_toml_and_command_line_reach_the_task(tmp_path):
    parsed = parse(tmp_path, TOML, "--dataloader.task.key_length", "3")
    assert parsed.dataloader.task == TaskSection(group=4, key_length=3)
    assert parsed.dataloader.sources[0].task == TaskSection(depth=3)
    assert parsed.validator.dataloader.task == TaskSection(samples=128)
    front.save(parsed, tmp_path / "resolved.toml")
    again = front.load_toml(tmp_path / "resolved.toml", make_default=default_config)
    assert again.dataloader == parsed.dataloader and again.validator == parsed.validator


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("group = 4", "group = 7", r"dataloader\.task\.group: got 7 .*allowed: 3, 4 or 5"),
        ("group = 4", "groups = 4", r"unknown key dataloader\.task\.groups; did you mean '.*task\.group'"),
        ("key_length = 2", "key_length = 2.5", r"task\.key_length: got 2\.5"),
        ("key_length = 2", "key_length = -2", r"\[dataloader\.task\] key_length is -2, expected 0 or more"),
        ("depth = 3", "depth = 0", r"dataloader\.sources\[0\]\.task\] depth is 0"),
        ("samples = 128", 'samples = "128"', r"validation\.dataloader\.task\.samples: got '128'"),
    ],
)  # fmt: skip
def test_bad_knobs_are_one_line_with_the_key(tmp_path, old, new, message):
    with pytest.raises(UserError, match=message) as error:
        parse(tmp_path, TOML.replace(old, new))
    assert "\n" not in str(error.value)
