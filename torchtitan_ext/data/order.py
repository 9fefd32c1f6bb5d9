"""Seeded orders of documents, as pure functions of (seed, epoch, position)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import numpy as np

Shuffle = Literal["none", "buffer", "full"]
_KEPT = 4


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed from any parts; the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def uniform(*parts: int | str) -> float:
    """A number in [0, 1) that depends on ``parts`` alone, so it needs no saved generator."""
    return (derive_seed(*parts) >> 11) / (1 << 53)


def choose(weights: Sequence[float], *parts: int | str) -> int:
    """An index drawn with probability proportional to ``weights``, depending on ``parts`` alone."""
    point = uniform(*parts) * sum(weights)
    for i, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return i
    return max(i for i, weight in enumerate(weights) if weight > 0)


class Order:
    """Which document stands at each place of an epoch of ``size`` documents.

    ``full`` permutes all; ``buffer`` permutes inside consecutive blocks of
    ``block`` documents, which keeps reads near each other; ``none`` keeps the
    order of the data.
    """

    def __init__(self, size: int, *, shuffle: Shuffle, block: int, seed: int) -> None:
        self._size = size
        self._block = size if shuffle == "full" else min(block, size)
        self._shuffled = shuffle != "none" and self._block > 1
        self._seed = seed
        self._cache: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()

    def document(self, epoch: int, place: int) -> int:
        """Index of the document at ``place`` (0 <= place < size) of ``epoch``."""
        if not self._shuffled:
            return place
        number, inside = divmod(place, self._block)
        key = (epoch, number)
        permutation = self._cache.get(key)
        if permutation is None:
            length = min(self._block, self._size - number * self._block)
            permutation = np.random.default_rng(derive_seed(self._seed, epoch, number)).permutation(length)
            self._cache[key] = permutation
            # Streams pass the end of an epoch or block at different times, so a few are alive at once.
            while len(self._cache) > _KEPT:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return number * self._block + int(permutation[inside])
