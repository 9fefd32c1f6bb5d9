"""Logical streams: the part of the data that does not depend on the number of ranks.

Stream v of V takes documents v, v + V, v + 2V, ... of each source's shuffled
order, mixes the sources, and encodes. Its state is a place, a few numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torchtitan.tools.logging import logger

from torchtitan_ext.data.order import Order, Shuffle, choose, derive_seed
from torchtitan_ext.data.packing import COUNTERS, Document
from torchtitan_ext.data.sources import AnySource, IndexedSource, Record, StreamedSource, StreamReader
from torchtitan_ext.errors import UserError

AHEAD = 8
"""Documents of a stream that are read and encoded in one call."""

BROKEN = "broken"
"""In the place of a document that cannot be read or encoded and is to be counted."""

Encoder = Callable[[Sequence[Record]], "Sequence[Document | str | None]"]
"""Documents of records; None for a record without a token, :data:`BROKEN` for one to be left out."""


@dataclass(kw_only=True, frozen=True)
class Feed:
    """One source of a mixture with its encoder."""

    name: str
    source: AnySource
    encode: Encoder
    weight: float = 1.0
    description: dict[str, Any]
    """What must be equal for a checkpoint of the data to fit."""


@dataclass(kw_only=True, frozen=True)
class Ordering:
    """How every stream walks through its sources."""

    seed: int
    shuffle: Shuffle
    block: int
    """Documents in a block of ``shuffle = "buffer"``, over all streams."""
    infinite: bool
    num_streams: int


class End(Exception):
    """A finite source has no document left."""


class Cursor(Protocol):
    """Place of one stream in one source."""

    def next(self) -> Record | None: ...

    def state(self) -> Any: ...

    def load_state(self, state: Any) -> None: ...

    def epoch(self) -> int: ...


class IndexedCursor:
    """Walks the concatenation of all epochs: stream v stands at v, v + V, v + 2V, ...

    An epoch's end may fall between two streams; so every document is read
    exactly once an epoch for any number of streams.
    """

    def __init__(
        self, source: IndexedSource, *, order: Order | None, stream: int, ordering: Ordering
    ) -> None:
        self._source, self._order = source, order
        self._position = stream
        self._step = ordering.num_streams
        self._infinite = ordering.infinite

    def next(self) -> Record | None:
        if self._order is None or self._source.size is None:
            index = self._position
        else:
            epoch, place = divmod(self._position, self._source.size)
            if epoch > 0 and not self._infinite:
                raise End
            index = self._order.document(epoch, place)
        self._position += self._step
        return self._source.read(index)

    def state(self) -> int:
        return self._position

    def load_state(self, state: int) -> None:
        self._position = state

    def epoch(self) -> int:
        return self._position // self._source.size if self._source.size else 0


class StreamedPlace(NamedTuple):
    """Where a block of records begins, and how many of it are spent."""

    epoch: int
    block: int
    start: Any
    spent: int


class StreamedCursor:
    """Reads blocks of records, permutes each, and hands them out one by one.

    The place is that of the block and the number spent, so a resumed run reads
    the block again instead of keeping its records in the checkpoint.
    """

    def __init__(self, source: StreamedSource, *, stream: int, ordering: Ordering, seed: int) -> None:
        self._source, self._stream, self._ordering = source, stream, ordering
        self._seed = seed
        shuffled = ordering.shuffle != "none"
        self._block_size = max(1, -(-ordering.block // ordering.num_streams)) if shuffled else 1
        self._shuffled = shuffled
        self._place = StreamedPlace(epoch=0, block=0, start=None, spent=0)
        self._reader: StreamReader | None = None
        self._records: list[Record] = []

    def _open(self, state: Any) -> StreamReader:
        return self._source.open(self._stream, self._ordering.num_streams, state=state)

    def _read_block(self) -> None:
        if self._reader is None:
            self._reader = self._open(self._place.start)
        records: list[Record] = []
        while len(records) < self._block_size:
            try:
                records.append(next(self._reader))
            except StopIteration:
                break
        if self._shuffled and len(records) > 1:
            seed = derive_seed(self._seed, self._stream, self._place.epoch, self._place.block)
            records = [records[i] for i in np.random.default_rng(seed).permutation(len(records))]
        self._records = records

    def next(self) -> Record | None:
        if not self._records:
            self._read_block()
        if self._place.spent >= len(self._records):
            self._advance()
        record = self._records[self._place.spent]
        self._place = self._place._replace(spent=self._place.spent + 1)
        return record

    def _advance(self) -> None:
        """Go on to the next block, and at the end of the stream to the next epoch."""
        if self._records:
            assert self._reader is not None
            self._place = StreamedPlace(self._place.epoch, self._place.block + 1, self._reader.state(), 0)
            self._read_block()
        if self._records:
            return
        if not self._ordering.infinite:
            raise End
        if self._place.block == 0:
            raise UserError(f"dataset {self._source.name!r}: stream {self._stream} has no document")
        self._reader = None
        self._place = StreamedPlace(self._place.epoch + 1, 0, None, 0)
        self._read_block()

    def state(self) -> StreamedPlace:
        return self._place

    def load_state(self, state: Sequence[Any]) -> None:
        self._place = StreamedPlace(*state)
        self._reader, self._records = None, []

    def epoch(self) -> int:
        return self._place.epoch


class MixtureState(NamedTuple):
    """Place of a stream in its mixture."""

    drawn: int
    cursors: tuple[Any, ...]
    ended: tuple[bool, ...]


class DocumentStream:
    """Documents of one stream: draws a source by weight, reads, encodes a few at a time."""

    def __init__(
        self, feeds: Sequence[Feed], *, stream: int, ordering: Ordering, orders: Sequence[Order | None]
    ):
        self._feeds, self._stream, self._ordering = feeds, stream, ordering
        self._cursors = [self._cursor(i, orders[i]) for i in range(len(feeds))]
        self._ended = [False] * len(feeds)
        self._drawn = 0
        self._ready: deque[tuple[MixtureState, Document | str]] = deque()
        self.counts = dict.fromkeys(COUNTERS, 0)
        # A stream sees every document of a source of known size within this many draws.
        self.patience = 10_000 + 2 * sum(f.source.size or 0 for f in feeds)

    def _cursor(self, i: int, order: Order | None) -> Cursor:
        source = self._feeds[i].source
        if isinstance(source, StreamedSource):
            seed = derive_seed(self._ordering.seed, "feed", i)
            return StreamedCursor(source, stream=self._stream, ordering=self._ordering, seed=seed)
        return IndexedCursor(source, order=order, stream=self._stream, ordering=self._ordering)

    def next(self) -> Document | None:
        """The next document with at least one token, or None at the end of finite data."""
        for _ in range(self.patience):
            if not self._ready:
                self._read_ahead()
            if not self._ready:
                return None
            _, document = self._ready.popleft()
            if not isinstance(document, str):
                return document
            self.counts[document] += 1
        names = ", ".join(f.name for f in self._feeds)
        raise UserError(f"no usable document in {names}: {self.patience} in a row were empty or broken")

    def _read_ahead(self) -> None:
        drawn: list[tuple[MixtureState, int, Record | None]] = []
        while len(drawn) < AHEAD:
            place = self._live_state()
            try:
                i, record = self._draw()
            except End:
                break
            drawn.append((place, i, record))
        documents: dict[int, Document | str] = {n: BROKEN for n in range(len(drawn))}
        for i, feed in enumerate(self._feeds):
            numbers = [n for n, (_, j, record) in enumerate(drawn) if j == i and record is not None]
            if numbers:
                encoded = feed.encode([drawn[n][2] for n in numbers])  # pyrefly: ignore
                documents.update(
                    (n, d if d is not None else "empty") for n, d in zip(numbers, encoded, strict=True)
                )
        self._ready.extend((place, documents[n]) for n, (place, _, _) in enumerate(drawn))

    def _draw(self) -> tuple[int, Record | None]:
        while True:
            weights = [0.0 if end else f.weight for f, end in zip(self._feeds, self._ended, strict=True)]
            if not any(weights):
                raise End
            one = len(self._feeds) == 1
            i = 0 if one else choose(weights, self._ordering.seed, "mixture", self._stream, self._drawn)
            epoch = self._cursors[i].epoch()
            try:
                record = self._cursors[i].next()
            except End:
                self._ended[i] = True
                continue
            self._drawn += 1
            if self._stream == 0 and self._cursors[i].epoch() > epoch:
                logger.info(
                    f"Dataset {self._feeds[i].name!r}: end of epoch {epoch} in stream 0, {self.counts}"
                )
            return i, record

    def _live_state(self) -> MixtureState:
        return MixtureState(self._drawn, tuple(c.state() for c in self._cursors), tuple(self._ended))

    def state(self) -> MixtureState:
        """Place of the document that :meth:`next` will give."""
        return self._ready[0][0] if self._ready else self._live_state()

    def load_state(self, state: Sequence[Any]) -> None:
        """Go to a place that :meth:`state` gave."""
        self._drawn, cursors, ended = state
        self._ended = [bool(e) for e in ended]
        for cursor, place in zip(self._cursors, cursors, strict=True):
            cursor.load_state(place)
        self._ready.clear()

    def epochs(self) -> int:
        """Epochs that are behind this stream in the source that is furthest."""
        return max(cursor.epoch() for cursor in self._cursors)


def make_orders(feeds: Sequence[Feed], ordering: Ordering) -> list[Order | None]:
    """One order for each source of known size, shared by all streams."""
    return [
        None
        if feed.source.size is None
        else Order(
            feed.source.size,
            shuffle=ordering.shuffle,
            block=ordering.block,
            seed=derive_seed(ordering.seed, "feed", i),
        )
        for i, feed in enumerate(feeds)
    ]
