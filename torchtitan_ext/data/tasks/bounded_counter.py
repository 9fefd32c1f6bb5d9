"""A counter that goes up and down between 0 and a limit, written out after every move.

A value is certain once its neighbour is known: it differs by the move between them, unless the
counter stood at a bound. Far from a known value only the sum of the moves is left to go by, which
the bounds make unreliable. So a decoder that reveals several tokens at once is sure of a few near
what it knows and has to wait with the others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchtitan_ext.data.tasks.config import TaskSection
from torchtitan_ext.data.tasks.interface import TextTask
from torchtitan_ext.errors import UserError

LARGEST = {"limit": 9, "moves": 1_000_000}
"""A value is one digit; no model's context would hold more moves."""


class BoundedCounter(TextTask):
    """``+-++=8`` is answered by ``9899``: moves, the value at the start, the value after each move."""

    name = "bounded_counter"
    knobs_used = ("moves", "limit")
    length_is = "moves"

    def __init__(self, knobs: TaskSection) -> None:
        super().__init__(knobs)
        for knob, largest in LARGEST.items():
            if getattr(knobs, knob) > largest:
                raise UserError(f"{self.name}: {knob} is {getattr(knobs, knob)}, expected at most {largest}")

    @property
    def longest(self) -> int:
        return self.knobs.moves

    @staticmethod
    def knobs_at(knobs: TaskSection, length: int) -> TaskSection:
        return replace(knobs, moves=length)

    def sample(self, rng: np.random.Generator) -> dict[str, str]:
        """One sample; the moves are fair and independent, the start is uniform."""
        ups = rng.integers(2, size=self.knobs.moves).astype(bool).tolist()
        start = int(rng.integers(self.knobs.limit + 1))
        values = [start]
        for up in ups:
            values.append(min(values[-1] + 1, self.knobs.limit) if up else max(values[-1] - 1, 0))
        moves = "".join("+" if up else "-" for up in ups)
        return {"prompt": f"{moves}={start}", "answer": "".join(map(str, values[1:]))}

    def identity(self, sample: dict[str, str]) -> str:
        """The prompt: with few moves training would otherwise see the held-out ones."""
        return sample["prompt"]

    def longest_sample(self) -> dict[str, str]:
        return self.sample(np.random.default_rng(0))  # all have the same number of characters
