"""ProsQA-Hard: which of two nodes is reached in a graph of made-up kinds, with the path as steps.

After Hao et al. (2024) at the size of the T2MLR paper (Section 4.3, Table 15).

Nodes are of two sides. The side of the start is a tree, so the path to the right
choice is the only one. The other side holds the wrong choice at the end of a
chain of about the same length; edges lead from it into either side and none
into it, so the wrong choice is never reached from the start. Both choices are
sinks, and the facts stand in random order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from torchtitan_ext.data.tasks.config import TaskSection
from torchtitan_ext.data.tasks.interface import TextTask
from torchtitan_ext.errors import UserError

PEOPLE = (
    *("Alex", "Avery", "Blake", "Casey", "Charlie", "Drew", "Ellis", "Emery", "Finley", "Harper", "Hayden"),
    *("Jamie", "Jordan", "Kai", "Logan", "Morgan", "Parker", "Quinn", "Reese", "Riley", "Robin", "Taylor"),
)
_CONSONANTS, _VOWELS = "bcdfglmnprstvz", "aeiou"
_EXTRA_EDGES_FOR_NODES = 8
"""One edge beyond the trees for so many nodes."""


class Graph(NamedTuple):
    """Edges between nodes 0..n-1, and what the question is about."""

    edges: list[tuple[int, int]]
    """(from, to): every "from" is a "to"."""

    path: list[int]
    """From the start to the right choice."""

    wrong: int
    """The wrong choice."""


class ProsQA(TextTask):
    """Is the start one kind of thing or the other, and by which steps?"""

    name = "prosqa_hard"
    knobs_used = ("nodes", "path_length", "path_spread")
    length_is = "edges of the path"

    def __init__(self, knobs: TaskSection) -> None:
        super().__init__(knobs)
        self.shortest = knobs.path_length - knobs.path_spread
        if self.shortest < 1:
            raise UserError(
                f"{self.name}: path_spread is {knobs.path_spread}, expected 0 to {knobs.path_length - 1} "
                f"with path_length = {knobs.path_length}"
            )
        least = 2 * self.longest + 3  # the path, and a wrong chain that may be one edge longer
        if knobs.nodes < least:
            raise UserError(
                f"{self.name}: nodes is {knobs.nodes}, expected {least} or more for paths of "
                f"{self.longest} edges"
            )

    @property
    def longest(self) -> int:
        return self.knobs.path_length + self.knobs.path_spread

    @staticmethod
    def knobs_at(knobs: TaskSection, length: int) -> TaskSection:
        return replace(knobs, path_length=length, path_spread=0)

    def sample(self, rng: np.random.Generator) -> dict[str, str]:
        length = int(rng.integers(self.shortest, self.longest + 1))
        graph = draw_graph(rng, nodes=self.knobs.nodes, length=length)
        names = _names(rng, len_syllables=(2, 3), count=self.knobs.nodes)
        person = PEOPLE[int(rng.integers(len(PEOPLE)))]
        return _in_words(rng, graph, names=names, person=person)

    def longest_sample(self) -> dict[str, str]:
        rng = np.random.default_rng(0)
        graph = draw_graph(rng, nodes=self.knobs.nodes, length=self.longest)
        names = _names(rng, len_syllables=(3,), count=self.knobs.nodes)
        return _in_words(rng, graph, names=names, person=max(PEOPLE, key=len))

    def final_answer(self, answer: str) -> str:
        return answer.rpartition("Output:")[2].strip()


def draw_graph(rng: np.random.Generator, *, nodes: int, length: int) -> Graph:
    """A graph of ``nodes`` nodes with one path of ``length`` edges to the right choice.

    Needs ``nodes >= 2 * length + 3``. The number of edges depends on ``nodes`` alone.
    """
    wrong_length = int(rng.integers(max(1, length - 1), length + 2))
    path = list(range(length + 1))
    chain = list(range(length + 1, length + 2 + wrong_length))
    edges = list(zip([*path[:-1], *chain[:-1]], [*path[1:], *chain[1:]], strict=True))
    # What may get a child: the choices stay sinks.
    start_side, other_side = path[:-1], chain[:-1]
    for node in range(len(path) + len(chain), nodes):
        side = start_side if rng.random() < 0.5 else other_side
        edges.append((side[int(rng.integers(len(side)))], node))
        side.append(node)
    known, wanted = set(edges), len(edges) + nodes // _EXTRA_EDGES_FOR_NODES
    others = set(chain) | set(other_side)
    while len(known) < wanted:
        begin, end = other_side[int(rng.integers(len(other_side)))], int(rng.integers(nodes))
        # On the other side edges go from lower to higher numbers: no cycles.
        if end not in others or end > begin:
            known.add((begin, end))
    return Graph(edges=sorted(known), path=path, wrong=chain[-1])


def _names(rng: np.random.Generator, *, len_syllables: tuple[int, ...], count: int) -> list[str]:
    """Distinct names such as ``gedatus`` and ``zolufibus``."""
    names: dict[str, None] = {}
    while len(names) < count:
        size = len_syllables[int(rng.integers(len(len_syllables)))]
        consonants = rng.integers(len(_CONSONANTS), size=size + 1)
        vowels = rng.integers(len(_VOWELS), size=size)
        syllables = [_CONSONANTS[c] + _VOWELS[v] for c, v in zip(consonants, vowels, strict=False)]
        names["".join(syllables) + _CONSONANTS[consonants[-1]] + "us"] = None
    return list(names)


def _in_words(rng: np.random.Generator, graph: Graph, *, names: list[str], person: str) -> dict[str, str]:
    facts = [f"Every {names[a]} is a {names[b]}." for a, b in graph.edges]
    facts = [facts[i] for i in rng.permutation(len(facts))]
    right, wrong = names[graph.path[-1]], names[graph.wrong]
    first, second = (right, wrong) if rng.random() < 0.5 else (wrong, right)
    start = f"{person} is a {names[graph.path[0]]}."
    prompt = " ".join([*facts, start, f"Is {person} a {first} or a {second}?"])
    hops = zip(graph.path[:-1], graph.path[1:], strict=True)
    steps = [start, *(f"Every {names[a]} is a {names[b]}." for a, b in hops)]
    return {
        "prompt": prompt + "\n",
        "answer": "Steps: " + "\n".join([*steps, f"Output: {person} is a {right}."]),
    }
