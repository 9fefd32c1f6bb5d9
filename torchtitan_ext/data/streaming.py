"""Data that is streamed from a hub (or from local files of the same schema) with ``datasets``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext.data.files import find_files, format_of
from torchtitan_ext.data.sources import IndexedSource, Record, StreamedSource, StreamReader
from torchtitan_ext.errors import UserError


def _load(path: str, *, where: str, **kwargs: Any) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(path, **kwargs)
    except Exception as error:
        # The library and the network stack under it raise many unrelated classes here; all mean the same.
        reason = " ".join(str(error).split())
        raise UserError(
            f"{where}: the data set {path!r} cannot be loaded ({type(error).__name__}: {reason})"
        ) from error


def load_streamed(path: str, *, subset: str | None, split: str, hub_split: str, where: str) -> Any:
    """A ``datasets.IterableDataset`` of local files where ``path`` exists, else of the hub."""
    if not Path(path).expanduser().exists() and not any(c in path for c in "*?["):
        return _load(path, where=where, name=subset, split=hub_split, streaming=True)
    files = find_files(path, split=split, where=where)
    kinds = {"jsonl": "json", "parquet": "parquet"}
    found = {format_of(f) for f in files}
    if len(found) != 1 or not found <= kinds.keys():
        raise UserError(
            f"{where}: {path!r} must hold either .jsonl or .parquet files, found {sorted(map(str, found))}"
        )
    data_files = [str(f.resolve()) for f in files]
    return _load(kinds[str(found.pop())], where=where, data_files=data_files, split="train", streaming=True)


class HubReader(StreamReader):
    """One stream of a ``datasets.IterableDataset``, resumed by the library's own state."""

    def __init__(
        self, data: Any, *, name: str, stride: tuple[int, int], keep: Callable[[Record], bool], state: Any
    ):
        self._data, self._name, self._keep = data, name, keep
        self._offset, self._every = stride
        self._seen = 0
        if state is not None:
            data.load_state_dict(state["place"])
            self._seen = state["seen"]
        self._iterator = iter(data)

    def __next__(self) -> Record:
        while True:
            try:
                record = next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                # Broken files and lost connections come as many unrelated classes.
                raise UserError(
                    f"dataset {self._name!r}: cannot be read after {self._seen} records "
                    f"({type(error).__name__}: {' '.join(str(error).split())})"
                ) from error
            mine = self._seen % self._every == self._offset
            self._seen += 1
            if mine and self._keep(record):
                return record

    def state(self) -> Any:
        return {"place": self._data.state_dict(), "seen": self._seen}


class HubStream(StreamedSource):
    """A streamed data set: stream v reads every V-th file, or record where there are fewer files."""

    def __init__(self, data: Any, *, name: str, keep: Callable[[Record], bool]) -> None:
        self._data, self._keep = data, keep
        self.name = name
        self.parts = data.num_shards

    def open(self, stream: int, num_streams: int, *, state: Any = None) -> HubReader:
        if self.parts >= num_streams:
            data, stride = self._data.shard(num_shards=num_streams, index=stream, contiguous=False), (0, 1)
        else:
            # A copy of its own, since the library keeps the place in the data set object.
            data, stride = self._data.shard(num_shards=1, index=0), (stream, num_streams)
        return HubReader(data, name=self.name, stride=stride, keep=self._keep, state=state)


class HubTable(IndexedSource):
    """A whole hub data set with random access, for sets small enough to download."""

    def __init__(self, path: str, *, subset: str | None, split: str, where: str) -> None:
        self._data = _load(path, where=where, name=subset, split=split)
        self.name = path
        self.size = len(self._data)

    def read(self, index: int) -> Record | None:
        return self._data[index]


def first_records(source: IndexedSource | StreamedSource, count: int = 8) -> Sequence[Record]:
    """A few readable records from the front, to check fields early."""
    if isinstance(source, StreamedSource):
        reader = source.open(0, 1)
        try:
            return [next(reader)]
        except StopIteration:
            return []
    size = count if source.size is None else min(count, source.size)
    return [r for r in (source.read(i) for i in range(size)) if r is not None]
