"""Prompts for decoding: the beginnings of documents that a run has not been trained on."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_ext.checkpoint.load import CONFIG, LoadedModel
from torchtitan_ext.data.config import SourceFields
from torchtitan_ext.data.files import find_files
from torchtitan_ext.data.order import Order
from torchtitan_ext.data.packing import Document
from torchtitan_ext.data.registry import Context, build_feed
from torchtitan_ext.data.sources import IndexedSource, Record
from torchtitan_ext.data.streams import Feed
from torchtitan_ext.data.tasks import TASKS
from torchtitan_ext.errors import UserError

MOST_DOCUMENTS = 20_000
"""Documents that are looked at for long enough ones before the search is given up."""

ASK = "give --prompts-file FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Where decoding starts."""

    tokens: list[int]
    """What the model is given."""

    continuation: list[int] = field(default_factory=list)
    """What follows in the document; empty when that is not known."""


def held_out_prompts(
    loaded: LoadedModel, *, count: int, prompt_tokens: int, new_tokens: int, seed: int
) -> tuple[list[Prompt], str]:
    """The first ``prompt_tokens`` tokens of ``count`` held-out documents, and the data's name.

    The data is that of the run's validation if it has one, else the part of its training data
    that ``split = "validation"`` names; several sources take turns. Documents come in an order that
    ``seed`` decides (streamed ones: in theirs), and those of fewer than ``prompt_tokens`` +
    ``new_tokens`` tokens are left out, so that the true continuation of each prompt is known.
    Errors: UserError when no data is held out, or too few documents are long enough.
    """
    loader, sources = _held_out_data(loaded)
    feeds = []
    for source in sources:
        context = Context(
            tokenizer=loaded.tokenizer,
            seq_len=prompt_tokens + new_tokens,
            seed=loader.seed,
            add_bos=loader.add_bos,
            where=f"held-out data ({source.dataset})",
        )
        feeds.append(build_feed(source, context))
    name = ", ".join(feed.name for feed in feeds)
    found, seen = [], 0
    for tokens in itertools.islice(
        _in_turns([_documents(feed, seed=seed) for feed in feeds]), MOST_DOCUMENTS
    ):
        seen += 1
        if len(tokens) >= prompt_tokens + new_tokens:
            rest = tokens[prompt_tokens : prompt_tokens + new_tokens]
            found.append(Prompt(tokens=tokens[:prompt_tokens], continuation=rest))
        if len(found) == count:
            return found, name
    raise UserError(
        f"only {len(found)} of {seen} held-out documents ({name}) have {prompt_tokens} + {new_tokens} "
        f"tokens, but {count} prompts are wanted: lower --prompts, --prompt-tokens or --max-new-tokens, "
        f"or {ASK}"
    )


def file_prompts(loaded: LoadedModel, path: str, *, count: int | None = None) -> list[Prompt]:
    """The lines of a file, or the first ``count``; their continuations are not known.

    Errors: UserError for a file that cannot be read or that holds no prompt.
    """
    lines = read_lines(path)
    if not lines:
        raise UserError(f"--prompts-file {path} holds no prompt")
    return [
        Prompt(tokens=list(loaded.tokenizer.encode(line, add_bos=loaded.add_bos))) for line in lines[:count]
    ]


def read_lines(path: str) -> list[str]:
    """The lines of a text file (``-``: of stdin) that are not blank.

    Errors: UserError, which names --prompts-file, when it cannot be read.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--prompts-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"--prompts-file {path} is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    return [line for line in text.split("\n") if line.strip()]


def _held_out_data(loaded: LoadedModel) -> tuple[Any, list[SourceFields]]:
    """The data loader's config, and its sources."""
    if not (loaded.path / CONFIG).is_file():
        raise UserError(f"{loaded.path} does not say what it was trained on: {ASK}")
    config = loaded.config
    loader = config.validator.dataloader if config.validator.enable else config.dataloader
    sources: list[SourceFields] = list(loader.sources) or [loader]
    for source in sources:
        if source.dataset in TASKS:
            raise UserError(f"the run's data is the task {source.dataset!r}: give --task, or {ASK[5:]}")
    if config.validator.enable:
        return loader, sources
    for source in sources:
        if not _has_held_out_part(source):
            raise UserError(
                f"the run's data {source.dataset!r} has no held-out part "
                f"(no held_out, no files of split 'validation', no [validation]): {ASK}"
            )
    return loader, [dataclasses.replace(source, split="validation") for source in sources]


def _has_held_out_part(source: SourceFields) -> bool:
    """Whether ``split = "validation"`` is other data than ``split = "train"``."""
    if source.held_out is not None and source.held_out > 0:
        return True
    if source.dataset in ("stdlib", "fineweb_edu"):
        return source.held_out is None
    path = source.dataset_path
    if path is None or not (Path(path).expanduser().exists() or any(c in path for c in "*?[")):
        return True  # a hub's split, or a data set of its own: it says so itself when it has none
    where = f"held-out data ({source.dataset})"
    trained = find_files(path, split=source.split, where=where)
    try:
        return find_files(path, split="validation", where=where) != trained
    except UserError as error:
        raise UserError(f"{error}: {ASK}") from error


def _in_turns(parts: Sequence[Iterator[list[int]]]) -> Iterator[list[int]]:
    """One of each in turn, until all have ended."""
    for group in itertools.zip_longest(*parts):
        yield from (item for item in group if item is not None)


def _documents(feed: Feed, *, seed: int) -> Iterator[list[int]]:
    for record in _records(feed, seed=seed):
        (document,) = feed.encode([record])
        if isinstance(document, Document):
            yield document.tokens.tolist()


def _records(feed: Feed, *, seed: int) -> Iterator[Record]:
    source = feed.source
    if not isinstance(source, IndexedSource):
        reader = source.open(0, 1)
        while True:
            try:
                record = next(reader)
            except StopIteration:
                return
            yield record
    if source.size is None:
        places: Iterator[int] = itertools.count()
    else:
        order = Order(source.size, shuffle="full", block=source.size, seed=seed)
        places = (order.document(0, place) for place in range(source.size))
    for index in places:
        record = source.read(index)
        if record is not None:
            yield record
