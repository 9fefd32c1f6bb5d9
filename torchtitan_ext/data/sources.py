"""Where documents come from: random access or streams, and this Python's own sources.

A source yields *records* (a text, or a dict of fields); an encoder of
:mod:`torchtitan_ext.data.encoders` makes a document of a record.
"""

from __future__ import annotations

import functools
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = str | dict[str, Any]


def held_out(key: str, fraction: float) -> bool:
    """Whether the document named ``key`` belongs to the held-out part of ``fraction`` (0 to 1)."""
    return zlib.crc32(key.encode("utf-8", errors="replace")) < fraction * 2**32


class IndexedSource(ABC):
    """Documents that can be read in any order.

    ``size`` is their number, or None for a source that has a document for
    every index (a generator of tasks).
    """

    name: str
    size: int | None

    @abstractmethod
    def read(self, index: int) -> Record | None:
        """The record at ``index``, or None for one that cannot be read and is to be counted as broken."""


class StreamReader(ABC):
    """One stream of a streamed source within one epoch."""

    @abstractmethod
    def __next__(self) -> Record: ...

    @abstractmethod
    def state(self) -> Any:
        """Place of the next record, as JSON values."""


class StreamedSource(ABC):
    """Documents that are read from front to back; stream v of V holds a fixed part of them."""

    name: str
    size: None = None
    parts: int
    """Number of files; streams beyond it would read a file several times."""

    @abstractmethod
    def open(self, stream: int, num_streams: int, *, state: Any = None) -> StreamReader:
        """A reader of one stream from the front, or from a place that ``state()`` gave."""


AnySource = IndexedSource | StreamedSource


class ListSource(IndexedSource):
    """Records in memory."""

    def __init__(self, records: Sequence[Record], *, name: str) -> None:
        self._records = records
        self.name = name
        self.size = len(records)

    def read(self, index: int) -> Record | None:
        return self._records[index]


class SubsetSource(IndexedSource):
    """The held-out part of a source, or the rest of it, chosen by index."""

    def __init__(self, whole: IndexedSource, *, split: str, fraction: float) -> None:
        assert whole.size is not None
        wanted = split == "validation"
        self._indices = [i for i in range(whole.size) if held_out(str(i), fraction) == wanted]
        self._whole = whole
        self.name = whole.name
        self.size = len(self._indices)

    def read(self, index: int) -> Record | None:
        return self._whole.read(self._indices[index])


_SKIPPED = frozenset(("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"))


def _stdlib_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # The topics are documents of their own.
        if not _SKIPPED.intersection(name.parts) and name.as_posix() != "pydoc_data/topics.py":
            yield name.as_posix(), path


@functools.lru_cache(maxsize=1)
def stdlib_documents() -> tuple[tuple[str, str], ...]:
    """(name, text) of every source file of the standard library and every topic of ``pydoc``, sorted.

    Files that are not UTF-8 text, or empty, are left out.
    """
    found: list[tuple[str, str]] = []
    for name, path in _stdlib_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            # A file that this user may not read, or in another encoding, is not part of the data set.
            continue
        if text.strip():
            found.append((name, text))
    from pydoc_data.topics import topics

    found += [(f"pydoc_data/topics/{key}", text) for key, text in sorted(topics.items())]
    return tuple(found)


def stdlib_source(*, split: str, fraction: float) -> ListSource:
    """The standard library as a source; ``fraction`` of it, chosen by file name, is held out."""
    wanted = split == "validation"
    texts = [text for name, text in stdlib_documents() if held_out(name, fraction) == wanted]
    return ListSource(texts, name="stdlib")
