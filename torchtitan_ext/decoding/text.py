"""Text of tokens while they arrive: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_LONGEST_TAIL = 3
"""A UTF-8 character has at most four bytes, so at most three of an unfinished one."""


class Detokenizer(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Text of one row's new tokens.

    Text that may still change is held back: the bytes of an unfinished character, and what
    may become a stop string.
    """

    def __init__(self, tokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._emitted = 0
        self.stopped = False
        """Whether a stop string was reached."""
        self.text = ""
        """Text so far, up to the stop string; it may end in an unfinished character."""

    def push(self, token: int) -> str:
        """Add a token; the text that is now certain and was not given before."""
        if self.stopped:
            return ""
        self._ids.append(token)
        self.text = self._tokenizer.decode(self._ids)
        # An earlier stop string would have been found before, but one may reach back over the new token.
        found = [at for s in self._stop if (at := self.text.find(s)) >= 0]
        if found:
            self.stopped = True
            self.text = self.text[: min(found)]
            return self.flush()
        return self._emit(self._certain())

    def flush(self) -> str:
        """The rest, when no token follows."""
        return self._emit(len(self.text))

    def _emit(self, end: int) -> str:
        piece = self.text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def _certain(self) -> int:
        """How many characters no further token can change."""
        end = len(self.text)
        while end and self.text[end - 1] == REPLACEMENT and len(self.text) - end < _LONGEST_TAIL:
            end -= 1
        starts = (_partial(self.text[:end], s) for s in self._stop)
        return end - max(starts, default=0)


def _partial(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
