"""What a task is: samples from a generator, and a length that grows with their difficulty."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np

from torchtitan_ext.data.packing import Document
from torchtitan_ext.data.tasks.config import TaskSection
from torchtitan_ext.errors import UserError


class Task(ABC):
    """A kind of sample with its knobs. Stateless: randomness comes from the generator it is given."""

    name: ClassVar[str]
    """In the registry of data sets."""

    knobs_used: ClassVar[tuple[str, ...]]
    """Keys of :class:`TaskSection` that change the samples."""

    length_is: ClassVar[str]
    """What the length of a sample counts, in words."""

    least_length: ClassVar[int] = 1
    """No sample is shorter, whatever the knobs."""

    library: ClassVar[str | None] = None
    """Module that draws the samples, if it is not this package."""

    def __init__(self, knobs: TaskSection) -> None:
        """Errors: UserError for knobs that do not fit each other."""
        self.knobs = knobs

    @classmethod
    def check_installed(cls) -> None:
        """Errors: UserError when the library that the task needs is missing."""
        if cls.library is not None and importlib.util.find_spec(cls.library) is None:
            raise UserError(
                f"the task {cls.name!r} needs {cls.library.replace('_', '-')}: "
                'pip install "torchtitan-ext[tasks]"'
            )

    @property
    @abstractmethod
    def longest(self) -> int:
        """The greatest length among the samples."""

    @staticmethod
    @abstractmethod
    def knobs_at(knobs: TaskSection, length: int) -> TaskSection:
        """The knobs changed to samples of exactly this length."""

    def at_length(self, length: int) -> Self:
        """The same task with samples of exactly this length.

        Errors: UserError when there are none.
        """
        return type(self)(self.knobs_at(self.knobs, length))

    @abstractmethod
    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """One sample."""

    def identity(self, sample: dict[str, Any]) -> str | None:
        """What equal samples share, for tasks with so few that two splits would draw the same.

        Every identity belongs to one split. None: any sample may be drawn in any split.
        """
        return None

    def library_probe(self) -> dict[str, Any]:
        """What else must be equal for sample i to be the same: entries for the data's description."""
        return {}


class TokenTask(Task):
    """A task with token ids of its own, whose targets stand at the positions of the inputs."""

    vocabulary: ClassVar[int]
    """Largest id plus one."""

    @abstractmethod
    def tokens_of_length(self, length: int) -> int:
        """Tokens of a sample of this length."""

    @abstractmethod
    def size_in_words(self) -> str:
        """How the longest sample comes to its number of tokens."""

    @abstractmethod
    def document(self, sample: dict[str, Any]) -> Document:
        """Tokens and targets of a sample."""


class TextTask(Task):
    """A task in words: a sample is a ``prompt`` and the ``answer`` that must follow."""

    @abstractmethod
    def longest_sample(self) -> dict[str, str]:
        """A sample whose text is as long as any."""

    def final_answer(self, answer: str) -> str:
        """The part of an answer that decides, without the steps to it."""
        return answer.strip()

    def score(self, answer: str, sample: dict[str, Any]) -> float | None:
        """The task's own measure of an answer, 0 to 1, where it has one besides the final answer."""
        return None
