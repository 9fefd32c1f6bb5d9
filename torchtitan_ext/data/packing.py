"""Greedy packing of documents into rows of one length.

Shapes: L tokens a row; a document has T tokens and T labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_ext.errors import UserError

COUNTERS = ("documents", "split", "dropped", "broken", "empty", "padding_tokens")


class Document(NamedTuple):
    """One document: int64 arrays; ``labels[i]`` is the target at position i, or -100."""

    tokens: np.ndarray
    labels: np.ndarray


def next_token_document(tokens: np.ndarray, supervised: np.ndarray | None = None) -> Document:
    """A document whose labels are the next tokens.

    ``supervised`` [T] (bool) says which tokens may be targets; None: all.
    The last token has no target.
    """
    labels = np.full(len(tokens), IGNORE_INDEX, dtype=np.int64)
    labels[:-1] = tokens[1:]
    if supervised is not None:
        labels[:-1][~supervised[1:]] = IGNORE_INDEX
    return Document(tokens=np.asarray(tokens, dtype=np.int64), labels=labels)


class Row(NamedTuple):
    """One packed row, three int64 arrays [L]."""

    tokens: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def padding_row(seq_len: int, pad_id: int) -> Row:
    """A row that holds no token of any document."""
    return Row(
        tokens=np.full(seq_len, pad_id, dtype=np.int64),
        positions=np.arange(seq_len, dtype=np.int64),
        labels=np.full(seq_len, IGNORE_INDEX, dtype=np.int64),
    )


@dataclass(kw_only=True, frozen=True)
class PackingRule:
    """How documents become rows."""

    seq_len: int
    """Tokens in a row."""

    packing: Literal["concatenate", "whole"]
    """``concatenate`` cuts documents at the end of a row; ``whole`` moves a document that does not fit."""

    long_documents: Literal["split", "drop"]
    """What becomes of a document of more than ``seq_len`` tokens."""

    pad_id: int
    """Fills what is left of a row."""


class Documents(Protocol):
    """What a packer draws from; ``state`` is the place of the next document."""

    counts: dict[str, int]
    patience: int
    """Unusable documents in a row after which the data counts as unusable."""

    def next(self) -> Document | None: ...

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...


class Packer:
    """Rows of one stream of documents.

    A document that is cut goes on in the next row as a document of its own:
    positions restart at 0, and the label of a piece's last token is the first
    token of the next piece. The state names the place of the document in hand
    and how much of it is spent, never its tokens.
    """

    def __init__(self, documents: Documents, *, rule: PackingRule) -> None:
        self._documents = documents
        self._rule = rule
        self._in_hand: Document | None = None
        self._place: Any = None
        self._spent = 0

    def next_row(self) -> Row | None:
        """The next row, padded if the data ends inside it; None when nothing is left."""
        size = self._rule.seq_len
        row = padding_row(size, self._rule.pad_id)
        filled = 0
        while filled < size:
            document = self._in_hand or self._draw()
            if document is None:
                break
            left = len(document.tokens) - self._spent
            if self._rule.packing == "whole" and left > size - filled and filled > 0:
                break
            filled += self._place_piece(document, row, filled, min(left, size - filled))
        if filled == 0:
            return None
        row.positions[filled:] = np.arange(size - filled)
        self._documents.counts["padding_tokens"] += size - filled
        return row

    def ended(self) -> bool:
        """Whether no row is left. Looks at the next document without moving on."""
        return self._in_hand is None and self._draw() is None

    def _draw(self) -> Document | None:
        """Take the next document in hand, leaving out those that are too long if the rule says so."""
        for _ in range(self._documents.patience):
            place = self._documents.state()
            document = self._documents.next()
            too_long = document is not None and len(document.tokens) > self._rule.seq_len
            if too_long and self._rule.long_documents == "drop":
                self._documents.counts["dropped"] += 1
                continue
            self._in_hand, self._place = document, place
            return document
        raise UserError(
            f"long_documents = 'drop' leaves nothing: {self._documents.patience} documents in a row "
            f"have more than seq_len = {self._rule.seq_len} tokens"
        )

    def _place_piece(self, document: Document, row: Row, at: int, length: int) -> int:
        start, stop = self._spent, self._spent + length
        row.tokens[at : at + length] = document.tokens[start:stop]
        row.labels[at : at + length] = document.labels[start:stop]
        row.positions[at : at + length] = np.arange(length)
        self._spent = stop
        if stop == len(document.tokens):
            self._documents.counts["documents"] += 1
            self._documents.counts["split"] += start > 0
            self._in_hand, self._spent = None, 0
        return length

    def state(self) -> tuple[int, Any, tuple[int, ...]]:
        """(tokens spent of the next document, its place, counters): what :meth:`load_state` takes."""
        place = self._documents.state() if self._in_hand is None else self._place
        return self._spent, place, tuple(self._documents.counts[name] for name in COUNTERS)

    def load_state(self, state: tuple[int, Any, tuple[int, ...]]) -> None:
        """Go to a place that :meth:`state` gave."""
        self._spent, place, counts = state
        self._in_hand = None
        self._documents.load_state(place)
        self._documents.counts.update(zip(COUNTERS, counts, strict=True))
