"""Sums and differences of whole numbers, drawn by the library reasoning-gym (its ``chain_sum``).

One object of the library stands for its whole data set: item i of it comes from a generator
seeded with i, so a sample costs one draw of i and no new object. All numbers of a sample have
the same number of digits.

The same question may be drawn twice where the numbers are small, so the splits are told apart by
the question itself (:meth:`ChainSum.identity`): what training sees is in no other split, whatever
the seeds.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from torchtitan_ext.data.order import derive_seed
from torchtitan_ext.data.tasks.config import TaskSection
from torchtitan_ext.data.tasks.interface import TextTask
from torchtitan_ext.errors import UserError

ITEMS = 2**62
"""Items of the library's data set that samples are drawn from."""

LARGEST = {"max_terms": 1000, "max_digits": 1000}
"""Beyond these no model's context would hold a sample."""


class ChainSum(TextTask):
    """What a chain of additions and subtractions comes to."""

    name = "chain_sum"
    knobs_used = ("min_terms", "max_terms", "min_digits", "max_digits", "style")
    length_is = "terms"
    least_length = 2
    library = "reasoning_gym"

    def __init__(self, knobs: TaskSection) -> None:
        super().__init__(knobs)
        self.check_installed()
        for what in ("terms", "digits"):
            low, high = getattr(knobs, f"min_{what}"), getattr(knobs, f"max_{what}")
            if low > high:
                raise UserError(
                    f"{self.name}: min_{what} is {low}, expected at most max_{what}, which is {high}"
                )
            if high > LARGEST[f"max_{what}"]:
                raise UserError(
                    f"{self.name}: max_{what} is {high}, expected at most {LARGEST[f'max_{what}']}"
                )
        self._data = _library().create_dataset(
            "chain_sum",
            seed=0,
            size=ITEMS,
            min_terms=knobs.min_terms,
            max_terms=knobs.max_terms,
            min_digits=knobs.min_digits,
            max_digits=knobs.max_digits,
        )

    @property
    def longest(self) -> int:
        return self.knobs.max_terms

    @staticmethod
    def knobs_at(knobs: TaskSection, length: int) -> TaskSection:
        return replace(knobs, min_terms=length, max_terms=length)

    def sample(self, rng: np.random.Generator) -> dict[str, str]:
        """Prompt and answer, and the ``expression`` alone."""
        item = self._data[int(rng.integers(ITEMS))]
        return self._in_words(item["question"], item["metadata"]["expression"], item["answer"])

    def longest_sample(self) -> dict[str, str]:
        terms, digits = self.knobs.max_terms, self.knobs.max_digits
        least, most = 0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1
        # The largest value, and the smallest, which is longer where its sign adds a character.
        sums = {
            " + ".join([str(most)] * terms): most * terms,
            " - ".join([str(least), *[str(most)] * (terms - 1)]): least - most * (terms - 1),
        }
        expression, value = max(sums.items(), key=lambda pair: len(str(pair[1])))
        item = self._data[0]
        question = item["question"].replace(item["metadata"]["expression"], expression)
        return self._in_words(question, expression, str(value))

    def _in_words(self, question: str, expression: str, answer: str) -> dict[str, str]:
        prompt = question if self.knobs.style == "question" else f"{expression} ="
        return {"prompt": prompt, "answer": f" {answer}", "expression": expression}

    def identity(self, sample: dict[str, Any]) -> str:
        """The expression as written: ``1 + 2`` and ``2 + 1`` are two."""
        return sample["expression"]

    def score(self, answer: str, sample: dict[str, Any]) -> float:
        """The library's: numbers are compared as numbers, and one inside other text counts for its share."""
        return float(self._data.score_answer(self.final_answer(answer), {"answer": sample["answer"].strip()}))

    def library_probe(self) -> dict[str, Any]:
        """A number that changes when another version of the library draws other samples."""
        texts = [self.sample(np.random.default_rng(i))["prompt"] for i in range(4)]
        return {"library_probe": derive_seed(*texts)}


@functools.cache
def _library() -> ModuleType:
    """reasoning-gym, imported when the first task asks for it: that takes seconds."""
    # Some of its modules draw from Python's own generator when they are imported; a run's must not notice.
    state = random.getstate()
    try:
        import reasoning_gym
    finally:
        random.setstate(state)
    return reasoning_gym
