"""S_n against permutations as plain tuples."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext.data.tasks.group import compositions, permutations, running_products

GROUPS = (3, 4, 5)


def compose(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """a o b: b first."""
    return tuple(a[x] for x in b)


@pytest.mark.parametrize("n", GROUPS)
def test_ranks_and_compositions_are_those_of_tuples(n):
    elements = list(itertools.permutations(range(n)))
    assert [tuple(p) for p in permutations(n).tolist()] == elements
    rank = {p: i for i, p in enumerate(elements)}
    table = compositions(n)
    for a, b in itertools.product(elements[:: 1 if n < 5 else 7], elements):
        assert table[rank[a], rank[b]] == rank[compose(a, b)]


@pytest.mark.parametrize("n", GROUPS)
def test_group_axioms(n):
    table = compositions(n)
    ranks = np.arange(len(table))
    assert (table[0] == ranks).all() and (table[:, 0] == ranks).all()
    assert (np.sort(table, axis=0) == ranks[:, None]).all() and (np.sort(table, axis=1) == ranks).all()
    a, b, c = (x.ravel() for x in np.meshgrid(ranks[::3], ranks, ranks[::2]))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    assert (table != table.T).any()


@settings(deadline=None, max_examples=60)
@given(n=st.sampled_from(GROUPS), data=st.data())
def test_running_products_compose_from_the_left(n, data):
    elements = list(itertools.permutations(range(n)))
    ranks = data.draw(st.lists(st.integers(0, len(elements) - 1), min_size=1, max_size=40))
    got = running_products(np.array(ranks), n)
    state, expected = elements[ranks[0]], [ranks[0]]
    for rank in ranks[1:]:
        state = compose(state, elements[rank])
        expected.append(elements.index(state))
    assert got.tolist() == expected and got.dtype == np.int64


def test_the_example_of_the_paper():
    """Table 15: 54213, 43125, 52314 lead to 54213, 12543, 32514."""
    rank = {"".join(str(x + 1) for x in p): i for i, p in enumerate(permutations(5).tolist())}
    states = running_products(np.array([rank[p] for p in ("54213", "43125", "52314")]), 5)
    assert states.tolist() == [rank[p] for p in ("54213", "12543", "32514")]


def test_tables_cannot_be_changed():
    with pytest.raises(ValueError):
        compositions(3)[0, 0] = 1
