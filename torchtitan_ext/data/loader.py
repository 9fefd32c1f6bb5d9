"""The data loader: one global order of rows, whatever the number of data-parallel ranks.

Row i of the run comes from logical stream ``i % num_streams``. With D ranks,
batch k of rank r holds the rows ``base + k*b*D + j*D + r`` (j = 0..b-1; base is
the row at which this run started). So D ranks together, or one rank with more
or larger batches, see the same rows in each step, and a checkpoint may be
resumed under another number of ranks.
"""

import json
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from torchtitan_ext.data.config import Source, SourceFields
from torchtitan_ext.data.fingerprint import check_fingerprint, comparable, content_of, tokenizer_probe
from torchtitan_ext.data.packing import COUNTERS, Packer, PackingRule, Row, padding_row
from torchtitan_ext.data.registry import Context, build_feed, entry_of
from torchtitan_ext.data.streams import DocumentStream, Feed, Ordering, make_orders
from torchtitan_ext.errors import UserError

STREAMS = 64
MANY_DOCUMENTS = 1024
MANY_FINITE_DOCUMENTS = 65536
VERSION = 1

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Snapshot(NamedTuple):
    """State after a batch: the next global row, and a state for each stream that is followed."""

    row: int
    streams: dict[int, Any]


class Engine:
    """Rows of one rank, batch by batch; knows nothing of threads or checkpoints."""

    def __init__(
        self, packers: dict[int, Packer], *, num_streams: int, dp_world_size: int, dp_rank: int, rows: int,
        rule: PackingRule, start: Snapshot,
    ) -> None:  # fmt: skip
        self._num_streams, self._world, self._rank, self._rows = num_streams, dp_world_size, dp_rank, rows
        self._rule = rule
        self._base = self._row = start.row
        followed = followed_streams(start.row + dp_rank, num_streams, dp_world_size)
        self._packers = {v: packers[v] for v in followed}
        for v, packer in self._packers.items():
            if v in start.streams:
                packer.load_state(start.streams[v])
        self._states = {v: packer.state() for v, packer in self._packers.items()}

    def next_batch(self) -> tuple[Batch | None, Snapshot]:
        """The next batch and the state after it; no batch when no stream of this rank has a row left.

        Rows of other ranks are built and thrown away where they come from a
        stream that this rank follows.
        """
        if all(packer.ended() for packer in self._packers.values()):
            self._states = {v: packer.state() for v, packer in self._packers.items()}
            return None, Snapshot(self._row, self._states)
        stop = self._row + self._rows * self._world
        mine: list[Row | None] = []
        for i in range(self._row, stop):
            v = i % self._num_streams
            packer = self._packers.get(v)
            if packer is None:
                continue
            row = packer.next_row()
            self._states[v] = packer.state()
            if (i - self._base) % self._world == self._rank:
                mine.append(row)
        self._row = stop
        return self._collate(mine), Snapshot(stop, dict(self._states))

    def _collate(self, rows: list[Row | None]) -> Batch:
        # A stream of finite data that ended before the others leaves rows of padding.
        filler = padding_row(self._rule.seq_len, self._rule.pad_id)
        filled = [row if row is not None else filler for row in rows]
        tokens, positions, labels = (torch.from_numpy(np.stack(part)) for part in zip(*filled, strict=True))
        return {"input": tokens, "positions": positions}, labels


def followed_streams(first_row: int, num_streams: int, step: int) -> range:
    """The streams that hold the rows ``first_row``, ``first_row + step``, ``first_row + 2*step``, ..."""
    stride = math.gcd(step, num_streams)
    return range(first_row % stride, num_streams, stride)


class _Failure(NamedTuple):
    error: BaseException


def _read_ahead(engine: Engine, out: "queue.Queue[Any]", stop: threading.Event) -> None:
    """Body of the background thread; refers to no loader, so that the loader can be collected."""
    while not stop.is_set():
        try:
            item: Any = engine.next_batch()
        except BaseException as error:
            # Raised again in the thread that asks for the batch.
            item = _Failure(error)
        while not stop.is_set():
            try:
                out.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if isinstance(item, _Failure) or item[0] is None:
            return


def _stop_thread(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    # The garbage collector may run this in the thread itself.
    if thread is not threading.current_thread():
        thread.join(timeout=60)


def _nothing() -> None:
    """There is no thread to stop."""


class DataLoader(BaseDataLoader):
    """Packed rows for one data-parallel rank.

    Iterating yields ``({"input": [b, L], "positions": [b, L]}, labels [b, L])``,
    int64 on the CPU; iterating again goes on where the last iteration stopped.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SourceFields):
        sources: list[Source] = field(default_factory=list)
        """A mixture; when given, the keys of a single data set beside it are not used."""

        packing: Literal["auto", "concatenate", "whole"] = "auto"
        """``concatenate`` cuts documents at the end of a row, ``whole`` pads; ``auto``: whole for chat."""

        long_documents: Literal["split", "drop"] = "split"
        """What becomes of documents of more than seq_len tokens; both are counted."""

        add_bos: Literal["auto", "always", "never"] = "auto"
        """BOS before documents of plain text; ``auto``: if the tokenizer has one and does not say no."""

        shuffle: Literal["auto", "none", "buffer", "full"] = "auto"
        """Order of documents in an epoch. ``auto``: full for data of known length, else buffer."""

        shuffle_buffer: int = 4096
        """Documents in a block of ``shuffle = "buffer"``, over all streams."""

        seed: int = 0
        """Seed of the shuffle and of the mixture."""

        infinite: bool = True
        """Start over at the end, with a new order; otherwise the iteration ends."""

        num_streams: int = 0
        """Logical streams; 0: from the data alone. Any number of data-parallel ranks works; where it does
        not divide the streams, ranks also encode rows that they throw away."""

        prefetch: int = 2
        """Batches that a background thread reads ahead; 0: none."""

    def __init__(
        self,
        config: "DataLoader.Config",
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_numbers(config, seq_len=seq_len, local_batch_size=local_batch_size)
        self.config = config
        self._shape = (dp_world_size, dp_rank, local_batch_size)
        self._feeds = _build_feeds(config, tokenizer=tokenizer, seq_len=seq_len)
        self._rule = _packing_rule(config, tokenizer=tokenizer, seq_len=seq_len)
        self._ordering = _ordering(config, self._feeds)
        self.num_streams = self._ordering.num_streams
        self._fingerprint = self._describe(tokenizer)
        self._orders = make_orders(self._feeds, self._ordering)
        self._warned = {"dropped": 0, "broken": 0}
        self._finish: Callable[[], Any] = _nothing
        self._begin(Snapshot(0, {v: self._packer(v).state() for v in range(self.num_streams)}))

    def _packer(self, stream: int) -> Packer:
        documents = DocumentStream(self._feeds, stream=stream, ordering=self._ordering, orders=self._orders)
        return Packer(documents, rule=self._rule)

    def _begin(self, start: Snapshot) -> None:
        """Make ``start`` the current state; nothing is read before the first batch is asked for."""
        self._end_thread()
        self._snapshot = start
        self._engine: Engine | None = None
        self._ahead: queue.Queue[Any] | None = None
        self._ended = False

    def _end_thread(self) -> None:
        self._finish()
        self._finish = _nothing

    def _start(self) -> Engine:
        world, rank, rows = self._shape
        followed = followed_streams(self._snapshot.row + rank, self.num_streams, world)
        self._engine = Engine(
            {v: self._packer(v) for v in followed},
            num_streams=self.num_streams, dp_world_size=world, dp_rank=rank, rows=rows,
            rule=self._rule, start=self._snapshot,
        )  # fmt: skip
        if self.config.prefetch > 0:
            self._ahead = queue.Queue(maxsize=self.config.prefetch)
            stop = threading.Event()
            thread = threading.Thread(
                target=_read_ahead, args=(self._engine, self._ahead, stop), name="data-ahead", daemon=True
            )
            # Also runs when the loader is collected, and at the end of the process.
            self._finish = weakref.finalize(self, _stop_thread, thread, stop)
            thread.start()
        return self._engine

    def __iter__(self) -> Iterator[Batch]:
        while not self._ended:
            engine = self._engine or self._start()
            item = engine.next_batch() if self._ahead is None else self._ahead.get()
            if isinstance(item, _Failure):
                self._begin(self._snapshot)
                raise item.error
            batch, self._snapshot = item
            self._report()
            if batch is None:
                self._ended = True
                self._end_thread()
                logger.info(f"Data: the end of finite data, {self.counters()}")
                return
            yield batch

    def _report(self) -> None:
        """Warn of documents that are left out: at the first, and whenever their number has doubled."""
        counts = self.counters()
        for name in ("dropped", "broken"):
            if counts[name] >= max(2 * self._warned[name], 1):
                self._warned[name] = counts[name]
                logger.warning(f"Data: {name} documents are left out; so far {counts}")

    def counters(self) -> dict[str, int]:
        """Counts over the streams that this rank follows, up to the batch handed out last.

        ``documents``, ``split``, ``dropped``, ``broken``, ``empty``, ``padding_tokens``, and ``epochs``:
        how many epochs are over in the source that is furthest.
        """
        totals = dict.fromkeys((*COUNTERS, "epochs"), 0)
        for _, place, counts in self._snapshot.streams.values():
            for name, count in zip(COUNTERS, counts, strict=True):
                totals[name] += count
            totals["epochs"] = max(totals["epochs"], self._epoch(place))
        return totals

    def _epoch(self, place: Any) -> int:
        epochs = [0]
        for feed, cursor in zip(self._feeds, place[1], strict=True):
            if not isinstance(cursor, int):
                epochs.append(cursor[0])
            elif feed.source.size:
                epochs.append(cursor // feed.source.size)
        return max(epochs)

    def state_dict(self) -> dict[str, Any]:
        """State after the batch handed out last: plain ints, strings and bytes.

        Until the first batch it has every stream, later those this rank
        follows: the ranks together always have all. The key set up to 64
        streams does not depend on the data, so that a checkpoint of other data
        is read and refused here, with the reason.
        """
        state: dict[str, Any] = {
            "row": self._snapshot.row,
            "num_streams": self.num_streams,
            "fingerprint": json.dumps(self._fingerprint, sort_keys=True),
        }
        state.update({f"stream_{v}": b"" for v in range(self.num_streams, STREAMS)})
        for v, stream in self._snapshot.streams.items():
            state[f"stream_{v}"] = json.dumps(stream).encode()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the batch at which ``state_dict`` was taken, under any number of ranks.

        Errors: UserError when the data, its order or its packing are not those of the checkpoint.
        """
        if not state_dict:
            return
        saved = json.loads(state_dict["fingerprint"])
        check_fingerprint(*comparable(saved, self._fingerprint))
        row = int(state_dict["row"])
        world, rank, _ = self._shape
        needed = followed_streams(row + rank, self.num_streams, world)
        missing = [v for v in needed if not state_dict.get(f"stream_{v}")]
        if missing:
            raise UserError(f"the checkpoint's data state lacks stream {missing[0]} of {self.num_streams}")
        streams = {v: state_dict.get(f"stream_{v}") for v in range(self.num_streams)}
        self._begin(Snapshot(row, {v: _stream_state(text) for v, text in streams.items() if text}))

    def _describe(self, tokenizer: BaseTokenizer) -> dict[str, Any]:
        ordering, rule = self._ordering, self._rule
        return {
            "version": VERSION,
            "sources": [feed.description for feed in self._feeds],
            "seed": ordering.seed,
            "shuffle": ordering.shuffle,
            "shuffle_buffer": ordering.block if ordering.shuffle == "buffer" else None,
            "num_streams": ordering.num_streams,
            "seq_len": rule.seq_len,
            "packing": rule.packing,
            "long_documents": rule.long_documents,
            "add_bos": self.config.add_bos,
            "infinite": ordering.infinite,
            "tokenizer": tokenizer_probe(tokenizer),
        }


def _stream_state(text: bytes) -> tuple[int, Any, tuple[int, ...]]:
    spent, place, counts = json.loads(text)
    return spent, place, tuple(counts)


def _check_numbers(config: DataLoader.Config, *, seq_len: int, local_batch_size: int) -> None:
    least = {"num_streams": 0, "prefetch": 0, "shuffle_buffer": 1}
    for key, low in least.items():
        if getattr(config, key) < low:
            raise UserError(f"dataloader.{key} is {getattr(config, key)}, expected {low} or more")
    if seq_len < 1 or local_batch_size < 1:
        raise UserError(
            f"training.seq_len ({seq_len}) and local_batch_size ({local_batch_size}) must be 1 or more"
        )


def _build_feeds(config: DataLoader.Config, *, tokenizer: BaseTokenizer, seq_len: int) -> list[Feed]:
    if config.sources and config.dataset_path is not None:
        raise UserError("give either dataloader.sources or dataloader.dataset_path, not both")
    if config.packing == "concatenate":
        _check_cuts(config)
    feeds = []
    for i, source in enumerate(config.sources or [config]):
        where = f"dataloader.sources[{i}]" if config.sources else "dataloader"
        if isinstance(source, Source) and not 0 < source.weight < math.inf:
            raise UserError(f"{where}.weight is {source.weight}, expected a number above 0")
        context = Context(
            tokenizer=tokenizer,
            seq_len=seq_len,
            seed=config.seed,
            add_bos=config.add_bos,
            where=f"{where} ({source.dataset})",
        )
        feed = build_feed(source, context)
        feed.description["data"] = content_of(source)
        feeds.append(feed)
    return feeds


def _packing_rule(config: DataLoader.Config, *, tokenizer: BaseTokenizer, seq_len: int) -> PackingRule:
    packing = config.packing
    if packing == "auto":
        whole = any(entry_of(source).keeps_whole for source in config.sources or [config])
        packing = "whole" if whole else "concatenate"
    ids = (getattr(tokenizer, "pad_id", None), getattr(tokenizer, "eos_id", None))
    pad_id = next((i for i in ids if i is not None), None)
    if pad_id is None and (packing == "whole" or not config.infinite):
        raise UserError("rows need padding, but the tokenizer has neither a pad nor an EOS token")
    return PackingRule(
        seq_len=seq_len, packing=packing, long_documents=config.long_documents, pad_id=pad_id if pad_id else 0
    )


def _check_cuts(config: DataLoader.Config) -> None:
    """Refuse to cut what makes no sense in pieces; a data set alone says so itself."""
    for i, source in enumerate(config.sources):
        if entry_of(source).keeps_whole and source.dataset != "chat":
            raise UserError(
                f"dataloader.sources[{i}] ({source.dataset}): packing = 'concatenate' would cut samples "
                "(allowed: auto, whole)"
            )


def _ordering(config: DataLoader.Config, feeds: list[Feed]) -> Ordering:
    known = all(feed.source.size is not None for feed in feeds)
    shuffle = config.shuffle
    if shuffle == "auto":
        shuffle = "full" if known else "buffer"
    elif shuffle == "full" and not known:
        raise UserError("dataloader.shuffle = 'full' needs data of known length; streamed data has 'buffer'")
    return Ordering(
        seed=config.seed,
        shuffle=shuffle,
        block=config.shuffle_buffer,
        infinite=config.infinite,
        num_streams=config.num_streams or _auto_streams(feeds, infinite=config.infinite),
    )


def _auto_streams(feeds: list[Feed], *, infinite: bool) -> int:
    """A number of streams that depends on the data alone, never on the number of ranks.

    Few documents, one stream: each is then seen once an epoch in a plain
    order. Finite data of moderate size too, so that all ranks end together.
    Streamed data: no more streams than files, so that no file is read twice.
    """
    files = [parts for feed in feeds if (parts := getattr(feed.source, "parts", None)) is not None]
    if files:
        return min(STREAMS, 1 << (max(1, min(files)).bit_length() - 1))
    if any(feed.source.size is None for feed in feeds):
        return STREAMS
    total = sum(feed.source.size or 0 for feed in feeds)
    return STREAMS if total >= (MANY_DOCUMENTS if infinite else MANY_FINITE_DOCUMENTS) else 1
