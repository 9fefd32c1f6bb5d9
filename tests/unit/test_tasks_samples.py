"""Samples of every task, read back without the code that made them."""

from __future__ import annotations

import itertools
import re
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext.data.tasks import (
    BoundedCounter,
    GroupRetrieval,
    ProsQA,
    TaskSection,
    TaskSource,
    VariableAssignment,
)
from torchtitan_ext.data.tasks.prosqa import draw_graph
from torchtitan_ext.errors import UserError

IGNORE = -100
SEEDS = st.integers(0, 2**32)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- group_retrieval -------------------------------------------------------------------


def solve(tokens: list[int], *, n: int, keys: int) -> list[int]:
    """Targets worked out from the input alone; -100 up to the delimiter."""
    elements = list(itertools.permutations(range(n)))
    width, middle = 1 + keys, tokens.index(ord("|"))
    entries = [tokens[i : i + width] for i in range(0, middle, width)]
    dictionary = {entry[0]: entry[1:] for entry in entries}
    assert len(dictionary) == (factorial(n) if keys else 0) == len(entries)
    targets, state = [IGNORE] * (middle + 1), tuple(range(n))
    for i in range(middle + 1, len(tokens), width):
        assert tokens[i + 1 : i + width] == [ord("_")] * keys
        action = elements[tokens[i] - 128]
        state = tuple(state[x] for x in action)
        rank = 128 + elements.index(state)
        targets += [rank, *(dictionary[rank] if keys else [])]
    return targets


@settings(deadline=None, max_examples=60)
@given(
    n=st.sampled_from([3, 4, 5]),
    keys=st.integers(0, 5),
    longest=st.integers(1, 40),
    alphabet=st.integers(2, 62),
    seed=SEEDS,
)
def test_the_input_gives_the_targets(n, keys, longest, alphabet, seed):
    knobs = TaskSection(group=n, key_length=keys, max_length=longest, alphabet=alphabet)
    task = GroupRetrieval(knobs)
    tokens, labels = task.document(task.sample(rng(seed)))
    assert labels.tolist() == solve(tokens.tolist(), n=n, keys=keys)
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.min() >= 0 and max(tokens.max(), labels.max()) < task.vocabulary == 248
    head = tokens[: tokens.tolist().index(ord("|"))].tolist()
    assert {chr(t) for t in head if t < 128} <= set(map(chr, range(48, 123)))
    actions = (len(tokens) - len(head) - 1) // (1 + keys)
    assert 1 <= actions <= longest
    assert len(tokens) == task.tokens_of_length(actions) <= task.tokens_of_length(task.longest)


def test_numbers_of_tokens_are_as_documented():
    assert GroupRetrieval(TaskSection()).tokens_of_length(32) == 120 * 5 + 1 + 32 * 5
    plain = GroupRetrieval(TaskSection(group=3, key_length=0, fixed_length=16))
    assert plain.tokens_of_length(16) == 17 == len(plain.document(plain.sample(rng())).tokens)
    for knobs in (TaskSection(), plain.knobs):
        task = GroupRetrieval(knobs)
        assert eval(task.size_in_words().replace("5!", "120")) == task.tokens_of_length(task.longest)


def test_lengths_are_uniform_and_actions_cover_the_group():
    task = GroupRetrieval(TaskSection(group=3, key_length=0, max_length=4))
    samples = [task.sample(rng(i))["actions"] for i in range(800)]
    lengths = np.bincount([len(a) for a in samples], minlength=5)
    assert lengths[0] == 0 and lengths[1:].min() > 150 and len(lengths) == 5
    ranks = np.bincount(np.concatenate(samples), minlength=6)
    assert len(ranks) == 6 and ranks.min() > 0.8 * ranks.mean()
    assert {len(task.at_length(7).sample(rng(i))["actions"]) for i in range(20)} == {7}


def test_the_dictionary_is_drawn_for_every_sample_in_a_random_order():
    task = GroupRetrieval(TaskSection(fixed_length=1))
    samples = [task.sample(rng(i)) for i in range(30)]
    assert len({s["keys"].tobytes() for s in samples}) == 30
    assert len({s["dictionary_order"].tobytes() for s in samples}) == 30
    characters = np.bincount(np.concatenate([s["keys"].ravel() for s in samples]), minlength=62)
    assert len(characters) == 62 and characters.min() > 0.6 * characters.mean()
    # A random mapping, not an injection: a small alphabet must repeat entries.
    small = GroupRetrieval(TaskSection(alphabet=2, key_length=2)).sample(rng())["keys"]
    assert len(np.unique(small, axis=0)) == 4


# --- variable_assignment ---------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(depth=st.integers(1, 8), chains=st.integers(1, 5), seed=SEEDS)
def test_following_the_assignments_gives_the_number(depth, chains, seed):
    task = VariableAssignment(TaskSection(depth=depth, chains=chains))
    sample = task.sample(rng(seed))
    first, *lines, asked, last = sample["prompt"].split("\n")
    assert first == "Variable assignment. Follow the assignments and fill in the blank."
    assert last == "Answer:" and asked.endswith("=___")
    values: dict[str, str] = {}
    depths: dict[str, int] = {}
    for line in lines:
        name, value = line.split("=")
        assert name not in values
        values[name], depths[name] = (value, 0) if value.isdigit() else (values[value], depths[value] + 1)
    assert sample["answer"] == f" {values[asked[0]]}"
    assert depths[asked[0]] == depth
    assert len(values) == chains * (depth + 1) and len(set(values.values())) == chains
    text = sample["prompt"] + sample["answer"]
    assert len(text) == len("".join(task.longest_sample().values()))


def test_the_asked_chain_is_not_given_away_by_its_place():
    task = VariableAssignment(TaskSection(depth=2, chains=3))
    prompts = [task.sample(rng(i))["prompt"].split("\n") for i in range(90)]
    # Which of the numbers at the top the answer is.
    places = []
    for i, lines in enumerate(prompts):
        answer = task.sample(rng(i))["answer"].strip()
        places.append([line.split("=")[1] for line in lines[1:4]].index(answer))
    assert min(np.bincount(places, minlength=3)) > 15


# --- bounded_counter -------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(moves=st.integers(1, 60), limit=st.integers(1, 9), seed=SEEDS)
def test_the_counter_follows_its_moves_and_stays_in_its_bounds(moves, limit, seed):
    task = BoundedCounter(TaskSection(moves=moves, limit=limit))
    sample = task.sample(rng(seed))
    ups, start = sample["prompt"].split("=")
    values = [int(c) for c in start + sample["answer"]]
    assert len(ups) == len(sample["answer"]) == moves and 0 <= values[0] <= limit
    for move, before, after in zip(ups, values, values[1:], strict=False):
        wanted = before + {"+": 1, "-": -1}[move]
        assert after == (wanted if 0 <= wanted <= limit else before)
    assert len(task.longest_sample()["prompt"] + task.longest_sample()["answer"]) == 2 * (moves + 1)


def test_the_counter_starts_anywhere_and_moves_both_ways():
    task = BoundedCounter(TaskSection(moves=5, limit=3))
    prompts = [task.sample(rng(seed))["prompt"] for seed in range(400)]
    assert len({p[:5] for p in prompts}) == 32 and {p[6:] for p in prompts} == set("0123")


# --- prosqa_hard -----------------------------------------------------------------------


def reachable(edges: set[tuple[str, str]], start: str) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        node = todo.pop()
        new = {b for a, b in edges if a == node} - seen
        seen |= new
        todo += new
    return seen


def paths(edges: set[tuple[str, str]], start: str, end: str) -> list[list[str]]:
    if start == end:
        return [[start]]
    return [[start, *rest] for a, b in edges if a == start for rest in paths(edges, b, end)]


@settings(deadline=None, max_examples=40)
@given(nodes=st.integers(25, 70), length=st.integers(3, 9), spread=st.integers(0, 2), seed=SEEDS)
def test_the_answer_is_the_only_path(nodes, length, spread, seed):
    knobs = TaskSection(nodes=nodes, path_length=length, path_spread=spread)
    task = ProsQA(knobs)
    sample = task.sample(rng(seed))
    edges = set(re.findall(r"Every (\w+) is a (\w+)\.", sample["prompt"]))
    assert len({name for edge in edges for name in edge}) == nodes
    person, start = re.findall(r"(?<= )(\w+) is a (\w+)\. Is ", sample["prompt"])[0]
    choices = re.findall(rf"Is {person} a (\w+) or a (\w+)\?\n$", sample["prompt"])[0]
    reached = [c for c in choices if c in reachable(edges, start)]
    assert len(reached) == 1
    (path,) = paths(edges, start, reached[0])
    assert length - spread <= len(path) - 1 <= length + spread
    steps = [f"{person} is a {start}."]
    steps += [f"Every {a} is a {b}." for a, b in itertools.pairwise(path)]
    assert sample["answer"] == "Steps: " + "\n".join([*steps, f"Output: {person} is a {reached[0]}."])
    assert task.final_answer(sample["answer"]) == f"{person} is a {reached[0]}."
    # Neither choice leads on, and both are ends of a chain.
    assert not {a for a, _ in edges} & set(choices)
    longest = task.longest_sample()
    assert len(sample["prompt"]) <= len(longest["prompt"]) and len(sample["answer"]) <= len(longest["answer"])


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 9), more=st.integers(0, 40), seed=SEEDS)
def test_graphs_have_no_cycle_and_a_number_of_edges_of_their_own(length, more, seed):
    nodes = 2 * length + 3 + more
    graph = draw_graph(rng(seed), nodes=nodes, length=length)
    assert len(set(graph.edges)) == len(graph.edges) == nodes - 2 + nodes // 8
    into = {node: {a for a, b in graph.edges if b == node} for node in range(nodes)}
    left = set(range(nodes))
    while free := {node for node in left if not into[node] & left}:
        left -= free
    assert not left


def test_the_right_choice_is_named_first_half_of_the_time():
    task = ProsQA(TaskSection(nodes=30, path_length=4))
    first = 0
    for i in range(100):
        sample = task.sample(rng(i))
        right = sample["answer"].rstrip(".").split()[-1]
        first += f" a {right} or " in sample["prompt"]
    assert 30 < first < 70


# --- sources and knobs -----------------------------------------------------------------


@pytest.mark.parametrize("cls", [GroupRetrieval, VariableAssignment, BoundedCounter, ProsQA])
def test_a_sample_depends_on_seed_split_and_index_alone(cls):
    def text(seed: int, split: str, index: int) -> str:
        return repr(TaskSource(cls(TaskSection()), seed=seed, split=split).read(index))

    assert text(1, "train", 5) == text(1, "train", 5)
    source = TaskSource(cls(TaskSection()), seed=1, split="train")
    backwards = [repr(source.read(i)) for i in (9, 5)]
    assert backwards[1] == text(1, "train", 5)
    everything = [
        text(s, split, i) for s in (0, 1) for split in ("train", "validation", "test") for i in range(9)
    ]
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"group": 6}, "group is 6, allowed: 3, 4, 5"),
        ({"key_length": -1}, "key_length is -1, expected 0 or more"),
        ({"alphabet": 63}, "alphabet is 63, expected 2 to 62"),
        ({"max_length": 0}, "max_length is 0"),
        ({"fixed_length": -2}, "fixed_length is -2"),
        ({"depth": 0}, "depth is 0"),
        ({"moves": 0}, "moves is 0"),
        ({"limit": 0}, "limit is 0"),
        ({"samples": -1}, "samples is -1"),
        ({"path_spread": -1}, "path_spread is -1"),
    ],
)
def test_knobs_out_of_range(kwargs, message):
    with pytest.raises(UserError, match=message):
        TaskSection(**kwargs)


def test_knobs_that_do_not_fit_each_other():
    with pytest.raises(UserError, match="3 chains of depth 17 need 54 variables, there are 52"):
        VariableAssignment(TaskSection(depth=17))
    with pytest.raises(UserError, match="chains is 11, expected 1 to 10"):
        VariableAssignment(TaskSection(chains=11))
    with pytest.raises(UserError, match="nodes is 22, expected 23 or more for paths of 10 edges"):
        ProsQA(TaskSection(nodes=22))
    with pytest.raises(UserError, match="path_spread is 2, expected 0 to 1 with path_length = 2"):
        ProsQA(TaskSection(path_length=2))
    with pytest.raises(UserError, match="limit is 10, expected at most 9"):
        BoundedCounter(TaskSection(limit=10))
