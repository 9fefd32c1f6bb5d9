"""What a task is: samples from a generator, and a length that grows with their difficulty."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np

from torchtitan_ext.data.packing import Document
from torchtitan_ext.data.tasks.config import TaskSection


class Task(ABC):
    """A kind of sample with its knobs. Stateless: randomness comes from the generator it is given."""

    name: ClassVar[str]
    """In the registry of data sets."""

    knobs_used: ClassVar[tuple[str, ...]]
    """Keys of :class:`TaskSection` that change the samples."""

    length_is: ClassVar[str]
    """What the length of a sample counts, in words."""

    def __init__(self, knobs: TaskSection) -> None:
        """Errors: UserError for knobs that do not fit each other."""
        self.knobs = knobs

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
