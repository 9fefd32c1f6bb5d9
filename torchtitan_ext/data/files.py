"""Local data files: .txt, .jsonl and .parquet, the first two also compressed.

Every file offers its number of documents and random access to each; texts stay
on disk until they are read.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import json
import lzma
import os
import re
import tempfile
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
from torchtitan.tools.logging import logger

from torchtitan_ext.data.sources import IndexedSource, Record
from torchtitan_ext.errors import UserError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
CHECKED_BYTES = 256 << 20
"""How much JSON is parsed at construction to find broken lines early; the rest is checked when read."""
CACHED_BYTES = 2 << 30
_CHUNK = 16 << 20
_SPLIT_NAMES = {"train": "train", "test": "test", "validation": "validation", "valid": "validation"}
_SPLIT_NAMES |= {"val": "validation", "dev": "validation", "eval": "validation"}


def format_of(path: Path) -> str | None:
    """``txt``, ``jsonl`` or ``parquet`` by the file's name, whatever its compression; None for others."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
        return FORMATS.get(suffixes[-1]) if suffixes and suffixes[-1] != ".parquet" else None
    return FORMATS.get(suffixes[-1]) if suffixes else None


def split_of(path: Path) -> str | None:
    """The split that a file's name tells (``train-00000.parquet``, ``c4-validation.0.json.gz``), or None."""
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((_SPLIT_NAMES[w] for w in words if w in _SPLIT_NAMES), None)


def find_files(path: str, *, split: str, where: str) -> list[Path]:
    """The data files that a file, a glob or a folder names, sorted.

    In a folder whose files name splits, only those of ``split`` are taken.

    Errors: UserError when there is none, or a file has another format.
    """
    expanded = Path(path).expanduser()
    allowed = f"{', '.join(sorted(FORMATS))}, the text ones also {', '.join(COMPRESSIONS)}"
    if expanded.is_dir():
        files = [p for p in sorted(expanded.rglob("*")) if p.is_file() and format_of(p)]
        if not files:
            raise UserError(f"{where}: no data file in folder {path!r} (allowed: {allowed})")
        return _of_split(files, split=split, where=where, path=path)
    files = (
        [expanded]
        if expanded.is_file()
        else [Path(p) for p in sorted(glob.glob(str(expanded), recursive=True))]
    )
    files = [p for p in files if p.is_file()]
    if not files:
        raise UserError(f"{where}: no file at dataset_path {path!r}")
    for file in files:
        if format_of(file) is None:
            raise UserError(f"{where}: {file} has a format that is not read (allowed: {allowed})")
    return files


def _of_split(files: list[Path], *, split: str, where: str, path: str) -> list[Path]:
    tagged = {p: split_of(p) for p in files}
    if not any(tagged.values()):
        return files
    chosen = [p for p, tag in tagged.items() if tag == split]
    if not chosen:
        found = ", ".join(sorted({tag for tag in tagged.values() if tag}))
        raise UserError(f"{where}: folder {path!r} has no file of split {split!r} (found: {found})")
    return chosen


def _decompressor(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import zstandard

        return zstandard.open(path, "rb")
    return {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[suffix](path, "rb")


class OpenFiles:
    """File descriptors of the files used last, so that any number of files can be read."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._open: OrderedDict[Path, IO[bytes]] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """A descriptor for reading ``path``; valid until the next call."""
        file = self._open.get(path)
        if file is None:
            try:
                file = self._open[path] = path.open("rb")
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error})") from error
            while len(self._open) > self._limit:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return file.fileno()


class Bytes:
    """The unpacked bytes of one file, read in parts."""

    def __init__(self, descriptor: Callable[[], int], *, begin: int, size: int) -> None:
        self._descriptor, self._begin, self.size = descriptor, begin, size

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop)."""
        parts, at, end = [], self._begin + start, self._begin + min(stop, self.size)
        while at < end:
            part = os.pread(self._descriptor(), end - at, at)
            if not part:
                raise UserError(f"a data file became shorter while it was read (byte {at})")
            parts.append(part)
            at += len(part)
        return b"".join(parts)


class Storage:
    """Opens data files; what is compressed goes, unpacked, into one unnamed temporary file."""

    def __init__(self) -> None:
        self._files = OpenFiles()
        self._unpacked: IO[bytes] | None = None

    def open(self, path: Path) -> Bytes:
        """The bytes of ``path``. Errors: UserError for a file that cannot be read or unpacked."""
        if path.suffix.lower() not in COMPRESSIONS:
            descriptor = self._files.descriptor(path)
            return Bytes(lambda: self._files.descriptor(path), begin=0, size=os.fstat(descriptor).st_size)
        if self._unpacked is None:
            self._unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        target = self._unpacked
        begin = target.tell()
        _unpack(path, target)
        target.flush()
        return Bytes(target.fileno, begin=begin, size=target.tell() - begin)


def _unpack(path: Path, target: IO[bytes]) -> None:
    try:
        with _decompressor(path) as source:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path}: cannot be unpacked ({error})") from error
    except Exception as error:
        # zstandard's own error class derives from Exception alone.
        if type(error).__name__ != "ZstdError":
            raise
        raise UserError(f"{path}: cannot be unpacked ({error})") from error


def _line_spans(data: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """[n, 2] start and end of every line that is not blank, and [n] its number from 1."""
    ends = []
    for begin in range(0, data.size, _CHUNK):
        chunk = np.frombuffer(data.read(begin, begin + _CHUNK), dtype=np.uint8)
        ends.append(np.flatnonzero(chunk == 10) + begin)
    cuts = np.concatenate([*ends, np.array([data.size])]).astype(np.int64)
    spans = np.stack([np.concatenate([np.zeros(1, np.int64), cuts[:-1] + 1]), cuts], axis=1)
    lengths = spans[:, 1] - spans[:, 0]
    keep = lengths > 2
    for i in np.flatnonzero((lengths > 0) & ~keep):
        keep[i] = bool(data.read(spans[i, 0], spans[i, 1]).strip())
    return spans[keep], np.flatnonzero(keep) + 1


def _paragraph_spans(data: Bytes) -> np.ndarray:
    """[n, 2] start and end of every run of lines without a blank line between."""
    text = data.read(0, data.size)
    spans, begin = [], 0
    for gap in re.finditer(rb"\n[ \t\r]*\n", text):
        spans.append((begin, gap.start()))
        begin = gap.end()
    spans.append((begin, len(text)))
    return np.array([s for s in spans if text[s[0] : s[1]].strip()], dtype=np.int64).reshape(-1, 2)


class DataFile(ABC):
    """One file: ``size`` documents and random access."""

    path: Path
    size: int

    @abstractmethod
    def read(self, index: int) -> Record:
        """The record at ``index``. Errors: UserError that names the place in the file."""


class TxtFile(DataFile):
    """A text file; a document is the file, a line or a paragraph."""

    def __init__(self, path: Path, *, documents: str, storage: Storage) -> None:
        self.path = path
        self._data = storage.open(path)
        if documents == "file":
            whole = [(0, self._data.size)] if self._data.read(0, self._data.size).strip() else []
            self._spans = np.array(whole, dtype=np.int64).reshape(-1, 2)
        elif documents == "line":
            self._spans, _ = _line_spans(self._data)
        else:
            self._spans = _paragraph_spans(self._data)
        self._strip = documents != "file"
        self.size = len(self._spans)

    def read(self, index: int) -> Record:
        start, stop = (int(x) for x in self._spans[index])
        try:
            text = self._data.read(start, stop).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: not UTF-8 at byte {start + error.start}") from error
        return text.strip("\r\n") if self._strip else text


class JsonLinesFile(DataFile):
    """JSON objects, one a line."""

    def __init__(self, path: Path, *, storage: Storage) -> None:
        self.path = path
        self._data = storage.open(path)
        self._spans, self._numbers = _line_spans(self._data)
        self.size = len(self._spans)
        self.unpacked_bytes = self._data.size

    def read(self, index: int) -> Record:
        start, stop = (int(x) for x in self._spans[index])
        try:
            value = json.loads(self._data.read(start, stop))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}, line {self._numbers[index]}: broken JSON ({error})") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise UserError(f"{self.path}, line {self._numbers[index]}: expected a JSON object, got {kind}")
        return value


class RowGroups:
    """Row groups of parquet files, the ones used last kept up to a number of bytes."""

    def __init__(self, limit: int = CACHED_BYTES) -> None:
        self._limit, self._used = limit, 0
        self._tables: OrderedDict[Any, Any] = OrderedDict()

    def get(self, key: Any, load: Callable[[], Any]) -> Any:
        """The table of ``key``, loaded if it is not kept."""
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        table = self._tables[key] = load()
        self._used += table.nbytes
        while self._used > self._limit and len(self._tables) > 1:
            self._used -= self._tables.popitem(last=False)[1].nbytes
        return table


class ParquetFile(DataFile):
    """A parquet file; only ``columns`` are read (None: all)."""

    def __init__(self, path: Path, *, columns: Sequence[str] | None, cache: RowGroups) -> None:
        self.path = path
        with self._open() as file:
            fields = file.schema_arrow.names
            counts = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
        # A missing field is reported by the encoder, which knows what it is for.
        self._columns = [c for c in columns if c in fields] or None if columns else None
        self._starts = [0, *accumulate(counts)]
        self._cache = cache
        self.size = self._starts[-1]

    def _open(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{self.path}: not a readable parquet file ({error})") from error

    def _load(self, group: int) -> Any:
        # Opened anew, so that a data set of many files holds no descriptor for each.
        with self._open() as file:
            return file.read_row_group(group, columns=self._columns)

    def read(self, index: int) -> Record:
        group = bisect_right(self._starts, index) - 1
        table = self._cache.get((self.path, group), lambda: self._load(group))
        return table.slice(index - self._starts[group], 1).to_pylist()[0]


class FilesSource(IndexedSource):
    """The documents of several files, one after the other."""

    def __init__(self, files: Sequence[DataFile], *, name: str, broken_lines: str) -> None:
        self._files = list(files)
        self.name = name
        self._skip = broken_lines == "skip"
        self._starts = [0, *accumulate(f.size for f in files)]
        self.size = self._starts[-1]

    def read(self, index: int) -> Record | None:
        number = bisect_right(self._starts, index) - 1
        try:
            return self._files[number].read(index - self._starts[number])
        except UserError:
            if self._skip:
                return None
            raise

    def check(self, limit: int = CHECKED_BYTES) -> None:
        """Look for broken JSON lines in the first ``limit`` bytes.

        Errors: UserError that gives their number and the first of them; with
        ``broken_lines = "skip"`` the same as a warning.
        """
        broken: list[str] = []
        for error in self._faults(limit):
            broken.append(str(error))
        if not broken:
            return
        message = (
            f"{self.name}: {len(broken)} broken line{'s' if len(broken) > 1 else ''}, the first: {broken[0]}"
        )
        if not self._skip:
            raise UserError(f"{message} (broken_lines = 'skip' leaves them out)")
        logger.warning(f"{message}; left out")

    def _faults(self, limit: int) -> Iterator[UserError]:
        for file in self._files:
            if not isinstance(file, JsonLinesFile):
                continue
            if limit <= 0:
                return
            limit -= file.unpacked_bytes
            for i in range(file.size):
                try:
                    file.read(i)
                except UserError as error:
                    yield error


def open_files(
    paths: Sequence[Path], *, name: str, txt_documents: str, columns: Sequence[str] | None, broken_lines: str
) -> FilesSource:
    """A source over local files, with its JSON lines checked."""
    cache, storage = RowGroups(), Storage()
    files: list[DataFile] = []
    for path in paths:
        kind = format_of(path)
        if kind == "txt":
            files.append(TxtFile(path, documents=txt_documents, storage=storage))
        elif kind == "jsonl":
            files.append(JsonLinesFile(path, storage=storage))
        else:
            files.append(ParquetFile(path, columns=columns, cache=cache))
    source = FilesSource(files, name=name, broken_lines=broken_lines)
    source.check()
    return source
