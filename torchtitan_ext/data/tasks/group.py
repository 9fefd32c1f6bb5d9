"""The symmetric group S_n.

An element is named by its rank among the permutations of 0..n-1 in lexicographic
order; rank 0 is the identity. Composition applies the right element first,
``(a o b)(x) = a(b(x))``, as in the example of the T2MLR paper (Table 15), where
54213 o 43125 = 12543.
"""

from __future__ import annotations

import functools
import itertools
from math import factorial

import numpy as np


@functools.cache
def permutations(n: int) -> np.ndarray:
    """Images of 0..n-1 under every element, by rank, int64 [n!, n]."""
    table = np.array(list(itertools.permutations(range(n))), dtype=np.int64)
    table.setflags(write=False)
    return table


@functools.cache
def compositions(n: int) -> np.ndarray:
    """Rank of a o b at [rank of a, rank of b], int64 [n!, n!]."""
    images = permutations(n)
    # Digits in base n order permutations as their ranks do, so a search finds the rank.
    weights = n ** np.arange(n - 1, -1, -1)
    composed = images[:, images] @ weights
    table = np.searchsorted(images @ weights, composed)
    assert table.shape == (factorial(n), factorial(n))
    table.setflags(write=False)
    return table


def running_products(actions: np.ndarray, n: int) -> np.ndarray:
    """Ranks of a_1, a_1 o a_2, ..., a_1 o ... o a_N, int64 [N] like ``actions``."""
    table = compositions(n)
    return np.array(
        list(itertools.accumulate(actions.tolist(), lambda a, b: int(table[a, b]))), dtype=np.int64
    )
