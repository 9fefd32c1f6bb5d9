"""Text of tokens while they arrive: whole characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_LONGEST_TAIL = 3
"""A UTF-8 character has at most four bytes, so at most three of an unfinished one."""


class Detokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """Text of one row's new tokens.

    Text that may still change is held back: the bytes of an unfinished character, and what
    may become a stop string. A stop string may hold special tokens, which the text leaves out.
    """

    def __init__(self, tokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in stop if s)
        encoded = [(s, tokenizer.encode(s)) for s in self._stop]
        self._special = [
            s
            for s, ids in encoded
            if tokenizer.decode(ids) != tokenizer.decode(ids, skip_special_tokens=False)
        ]
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
        found = [self.text[:at] for s in self._stop if (at := self.text.find(s)) >= 0]
        found += self._before_special()
        if found:
            self.stopped = True
            self.text = min(found, key=len)
            return self.flush()
        return self._emit(self._certain())

    def _before_special(self) -> list[str]:
        """The text before each stop string with special tokens that was reached."""
        if not self._special:
            return []
        shown = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        places = [at for s in self._special if (at := shown.find(s)) >= 0]
        return [self._text_of(shown, at) for at in places]

    def _text_of(self, shown: str, end: int) -> str:
        """What ``shown[:end]``, which may end within a plain token, is without special tokens."""
        count, whole = len(self._ids), shown
        while len(whole) > end or not shown.startswith(whole):
            count -= 1
            whole = self._tokenizer.decode(self._ids[:count], skip_special_tokens=False)
        return self._tokenizer.decode(self._ids[:count]) + shown[len(whole) : end]

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
