"""State tracking in S_n with retrieval from a dictionary in the context (T2MLR, Section 3.1).

A sample of N actions a_1 ... a_N with entries D(a) of K characters::

    input    a D(a) ... for all n! elements   |   a_1  _ ... _   a_2       _ ... _
    target   none                                 a_1  D(a_1)    a_1oa_2   D(a_1oa_2)

Targets stand at the positions of the inputs: the running product at an action,
the characters of its entry at the K padding tokens behind it. The dictionary is
drawn anew for every sample, in a random order, its characters independent of
each other (so two elements may share an entry). With K = 0 there is no
dictionary and the sample starts with the delimiter.

Token ids: the characters 0-9, A-Z, a-z, the delimiter ``|`` and the padding ``_``
are their ASCII codes, the element of rank r is 128 + r. All are below 248, so
any vocabulary that holds 256 bytes does.
"""

from __future__ import annotations

import string
from dataclasses import replace
from math import factorial
from typing import Any

import numpy as np
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_ext.data.packing import Document
from torchtitan_ext.data.tasks.config import TaskSection
from torchtitan_ext.data.tasks.group import running_products
from torchtitan_ext.data.tasks.interface import TokenTask

CHARACTERS = np.frombuffer(
    (string.digits + string.ascii_uppercase + string.ascii_lowercase).encode(), dtype=np.uint8
).astype(np.int64)
DELIMITER = ord("|")
PADDING = ord("_")
FIRST_ELEMENT = 128


class GroupRetrieval(TokenTask):
    """The running product of actions in S_n, and its entry in a dictionary."""

    name = "group_retrieval"
    knobs_used = ("group", "key_length", "alphabet", "max_length", "fixed_length")
    length_is = "actions"
    vocabulary = FIRST_ELEMENT + factorial(5)

    def __init__(self, knobs: TaskSection) -> None:
        super().__init__(knobs)
        self.order = factorial(knobs.group)

    @property
    def longest(self) -> int:
        return self.knobs.fixed_length or self.knobs.max_length

    @staticmethod
    def knobs_at(knobs: TaskSection, length: int) -> TaskSection:
        return replace(knobs, fixed_length=length)

    def tokens_of_length(self, length: int) -> int:
        width = 1 + self.knobs.key_length
        dictionary = self.order * width if self.knobs.key_length else 0
        return dictionary + 1 + length * width

    def size_in_words(self) -> str:
        n, keys = self.knobs.group, self.knobs.key_length
        if not keys:
            return f"1 + {self.longest}"
        return f"{n}! * (1 + {keys}) + 1 + {self.longest} * (1 + {keys})"

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """``actions`` [N] and ``dictionary_order`` [n!] as ranks, ``keys`` [n!, K] as characters."""
        knobs = self.knobs
        length = knobs.fixed_length or int(rng.integers(1, knobs.max_length + 1))
        return {
            "actions": rng.integers(self.order, size=length),
            "keys": rng.integers(knobs.alphabet, size=(self.order, knobs.key_length)),
            "dictionary_order": rng.permutation(self.order),
        }

    def document(self, sample: dict[str, Any]) -> Document:
        actions, order = sample["actions"], sample["dictionary_order"]
        entries = CHARACTERS[sample["keys"]]
        states = running_products(actions, self.knobs.group)
        parts = [np.array([DELIMITER]), self._with_entries(actions, np.full_like(entries, PADDING)[actions])]
        if self.knobs.key_length:
            parts.insert(0, self._with_entries(order, entries[order]))
        tokens = np.concatenate(parts)
        targets = self._with_entries(states, entries[states])
        labels = np.full(len(tokens), IGNORE_INDEX, dtype=np.int64)
        labels[-len(targets) :] = targets
        return Document(tokens=tokens, labels=labels)

    @staticmethod
    def _with_entries(ranks: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Every element followed by its characters."""
        return np.concatenate([FIRST_ELEMENT + ranks[:, None], entries], axis=1).reshape(-1)
