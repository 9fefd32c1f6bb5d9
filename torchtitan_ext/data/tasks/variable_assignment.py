"""Chains of assignments, of which one is followed from a variable back to its number.

After the "reasoning primitives" of Saunshi et al. (2024), in the words of the T2MLR
paper (Table 15). All chains have the same depth, so nothing but following the
assignments tells which number is asked for.
"""

from __future__ import annotations

import string
from dataclasses import replace

import numpy as np

from torchtitan_ext.data.tasks.config import TaskSection
from torchtitan_ext.data.tasks.interface import TextTask
from torchtitan_ext.errors import UserError

INSTRUCTION = "Variable assignment. Follow the assignments and fill in the blank."
VARIABLES = string.ascii_lowercase + string.ascii_uppercase
DIGITS = 10


class VariableAssignment(TextTask):
    """Which number a variable has after ``depth`` copies."""

    name = "variable_assignment"
    knobs_used = ("depth", "chains")
    length_is = "copies"

    def __init__(self, knobs: TaskSection) -> None:
        super().__init__(knobs)
        if knobs.chains > DIGITS:
            raise UserError(f"{self.name}: chains is {knobs.chains}, expected 1 to {DIGITS}, one number each")
        needed = knobs.chains * (knobs.depth + 1)
        if needed > len(VARIABLES):
            raise UserError(
                f"{self.name}: {knobs.chains} chains of depth {knobs.depth} need {needed} variables, "
                f"there are {len(VARIABLES)} (one letter each)"
            )

    @property
    def longest(self) -> int:
        return self.knobs.depth

    @staticmethod
    def knobs_at(knobs: TaskSection, length: int) -> TaskSection:
        return replace(knobs, depth=length)

    def sample(self, rng: np.random.Generator) -> dict[str, str]:
        """One sample: shuffled assignments of several chains, and the number one variable ends on."""
        chains, depth = self.knobs.chains, self.knobs.depth
        letters = rng.choice(len(VARIABLES), size=(chains, depth + 1), replace=False)
        names = [[VARIABLES[i] for i in row] for row in letters]
        numbers = rng.choice(DIGITS, size=chains, replace=False)
        lines = [f"{chain[0]}={number}" for chain, number in zip(names, numbers, strict=True)]
        # The chains take turns at random; within each, a variable is assigned before it is copied.
        reached = [0] * chains
        for i in rng.permutation(np.repeat(np.arange(chains), depth)).tolist():
            reached[i] += 1
            lines.append(f"{names[i][reached[i]]}={names[i][reached[i] - 1]}")
        asked = int(rng.integers(chains))
        prompt = "\n".join([INSTRUCTION, *lines, f"{names[asked][-1]}=___", "Answer:"])
        return {"prompt": prompt, "answer": f" {numbers[asked]}"}

    def longest_sample(self) -> dict[str, str]:
        return self.sample(np.random.default_rng(0))  # all have the same number of characters
