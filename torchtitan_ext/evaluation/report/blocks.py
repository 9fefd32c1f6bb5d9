"""What a report consists of, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ABSENT = "-"
"""What a cell without a value shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells as text; the first column names the rows."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    groups: Sequence[tuple[str, int]] = ()
    """Titles over the head and how many columns each spans; empty for a single head."""

    note: str = ""
    words: bool = False
    """Whether the cells are words, which break over lines, rather than numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A PNG."""

    file: str
    """Name of the file beside the Markdown."""

    title: str
    png: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A sentence or two."""

    text: str


Block = Table | Picture | Text


@dataclass(kw_only=True, slots=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    folded: bool = False
    """Whether a reader opens it when needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """The report."""

    title: str
    lead: str
    sections: Sequence[Section]
