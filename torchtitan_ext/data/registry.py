"""Data sets by name.

A builder takes the keys of one source and a :class:`Context` and returns a
source with its encoder. Other rooms add theirs with :func:`register_dataset`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from torchtitan_ext.data.chat import chat_encoder
from torchtitan_ext.data.config import Source, SourceFields
from torchtitan_ext.data.encoders import AddBos, text_encoder, text_of
from torchtitan_ext.data.files import find_files, open_files
from torchtitan_ext.data.fingerprint import template_probe
from torchtitan_ext.data.packing import Document
from torchtitan_ext.data.processors import check_processor, resolve_processor
from torchtitan_ext.data.sources import (
    AnySource,
    IndexedSource,
    Record,
    SubsetSource,
    held_out,
    stdlib_source,
)
from torchtitan_ext.data.streaming import HubStream, HubTable, first_records, load_streamed
from torchtitan_ext.data.streams import BROKEN, Encoder, Feed
from torchtitan_ext.data.tasks import TASKS, TaskSection, build_task, used_knobs
from torchtitan_ext.errors import UserError, unknown


@dataclass(kw_only=True, frozen=True)
class Context:
    """What a builder may need besides the keys of its source."""

    tokenizer: BaseTokenizer
    seq_len: int
    seed: int
    add_bos: AddBos
    where: str
    """The source in messages."""


class Built(NamedTuple):
    """A source and its encoder."""

    source: AnySource
    encode: Encoder


@dataclass(kw_only=True, frozen=True)
class DatasetEntry:
    """One name of the registry."""

    build: Callable[[SourceFields, Context], Built]
    keeps_whole: bool = False
    """Whether ``packing = "auto"`` keeps its documents whole."""


def _build_stdlib(fields: SourceFields, context: Context) -> Built:
    if fields.dataset_path is not None:
        raise UserError(
            f"{context.where}: the data set 'stdlib' takes no dataset_path, got {fields.dataset_path!r}"
        )
    source = stdlib_source(split=fields.split, fraction=0.05 if fields.held_out is None else fields.held_out)
    encode = text_encoder(context.tokenizer, field="text", add_bos=context.add_bos, where=context.where)
    return Built(source, encode)


def _needs_path(fields: SourceFields, context: Context) -> str:
    if not fields.dataset_path:
        raise UserError(f"{context.where}: the data set {fields.dataset!r} needs dataset_path")
    return fields.dataset_path


def _open_local(fields: SourceFields, context: Context, *, columns: list[str] | None) -> IndexedSource:
    path = _needs_path(fields, context)
    return open_files(
        find_files(path, split=fields.split, where=context.where),
        name=path,
        txt_documents=fields.txt_documents,
        columns=columns,
        broken_lines=fields.broken_lines,
    )


def _part(source: IndexedSource, fields: SourceFields) -> IndexedSource:
    """The part of a source that ``split`` and ``held_out`` choose."""
    if not fields.held_out:
        return source
    return SubsetSource(source, split=fields.split, fraction=fields.held_out)


def _build_text(fields: SourceFields, context: Context) -> Built:
    source = _part(_open_local(fields, context, columns=[fields.text_field]), fields)
    return _plain_text(source, fields, context)


def _plain_text(source: AnySource, fields: SourceFields, context: Context) -> Built:
    for record in first_records(source):
        text_of(record, fields.text_field, where=context.where)
    encode = text_encoder(
        context.tokenizer, field=fields.text_field, add_bos=context.add_bos, where=context.where
    )
    return Built(source, encode)


def _is_local(path: str) -> bool:
    """A path that exists or a glob; anything else of the form owner/name is taken for a hub name."""
    return Path(path).expanduser().exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path)


def _build_chat(fields: SourceFields, context: Context) -> Built:
    check_processor(fields.processor)
    path = _needs_path(fields, context)
    if _is_local(path):
        source = _open_local(fields, context, columns=None)
    else:
        source = HubTable(path, subset=fields.subset, split=fields.split, where=context.where)
    source = _part(source, fields)
    choose = partial(resolve_processor, fields.processor, where=f"processor = {fields.processor!r}")
    encode = chat_encoder(context.tokenizer, choose=choose, where=context.where)
    # The first records go all the way, so that a wrong field or template ends the run at its start.
    encode(first_records(source, 2))
    return Built(source, encode)


def _keep_all(record: Record) -> bool:
    return True


def _build_c4(fields: SourceFields, context: Context) -> Built:
    if fields.held_out:
        raise UserError(f"{context.where}: c4 has a validation split of its own and takes no held_out")
    path = fields.dataset_path or "allenai/c4"
    data = load_streamed(
        path, subset=fields.subset or "en", split=fields.split, hub_split=fields.split, where=context.where
    )
    return _plain_text(HubStream(data, name="c4", keep=_keep_all), fields, context)


def _build_fineweb_edu(fields: SourceFields, context: Context) -> Built:
    path = fields.dataset_path or "HuggingFaceFW/fineweb-edu"
    # The hub has one split; what is held out is chosen by the text itself, so it is the same in every subset.
    data = load_streamed(
        path, subset=fields.subset or "sample-10BT", split="train", hub_split="train", where=context.where
    )
    fraction = 0.001 if fields.held_out is None else fields.held_out

    def keep(record: Record) -> bool:
        text = text_of(record, fields.text_field, where=context.where)
        return held_out(text, fraction) == (fields.split == "validation")

    return _plain_text(HubStream(data, name="fineweb_edu", keep=keep), fields, context)


def _build_task(fields: SourceFields, context: Context) -> Built:
    return Built(*build_task(fields, context))


DATASETS: dict[str, DatasetEntry] = {
    "stdlib": DatasetEntry(build=_build_stdlib),
    "text": DatasetEntry(build=_build_text),
    "chat": DatasetEntry(build=_build_chat, keeps_whole=True),
    "c4": DatasetEntry(build=_build_c4),
    "fineweb_edu": DatasetEntry(build=_build_fineweb_edu),
    **{name: DatasetEntry(build=_build_task, keeps_whole=True) for name in TASKS},
}


def register_dataset(name: str, entry: DatasetEntry) -> None:
    """Add a data set; a name that is taken by another entry is an error."""
    if DATASETS.get(name, entry) is not entry:
        raise ValueError(f"data set {name!r} is registered already")
    DATASETS[name] = entry


def entry_of(fields: SourceFields) -> DatasetEntry:
    """The registry's entry for a source; a typo gets the nearest name."""
    if fields.dataset not in DATASETS:
        raise unknown("data set (dataloader.dataset)", fields.dataset, DATASETS)
    return DATASETS[fields.dataset]


_DESCRIBED = ("dataset", "subset", "split", "held_out", "text_field", "txt_documents", "processor")


def _without_broken(encode: Encoder) -> Encoder:
    """An encoder to which a record that it cannot take is a broken one, as a line that cannot be read is."""
    told = False

    def encode_one(record: Record) -> Document | str | None:
        nonlocal told
        try:
            (document,) = encode([record])
        except UserError as error:
            if not told:
                told = True
                logger.warning(f"{error}; left out, as others of its kind")
            return BROKEN
        return document

    def encode_all(records: Sequence[Record]) -> list[Document | str | None]:
        try:
            return list(encode(records))
        except UserError:
            return [encode_one(record) for record in records]

    return encode_all


def build_feed(fields: SourceFields, context: Context) -> Feed:
    """The source with its encoder; an empty data set is an error here."""
    entry = entry_of(fields)
    if fields.held_out is not None and not 0 <= fields.held_out < 1:
        raise UserError(f"{context.where}: held_out is {fields.held_out}, expected 0 <= held_out < 1")
    if fields.dataset not in TASKS and fields.task != TaskSection():
        raise UserError(f"{context.where}: the section task belongs to the data sets {', '.join(TASKS)}")
    source, encode = entry.build(fields, context)
    if fields.broken_lines == "skip":
        encode = _without_broken(encode)
    if source.size == 0:
        path = f" at {fields.dataset_path!r}" if fields.dataset_path else ""
        raise UserError(f"{context.where}: no document in split {fields.split!r}{path}")
    description: dict[str, Any] = {key: getattr(fields, key) for key in _DESCRIBED}
    description["documents"] = source.size
    if fields.dataset in TASKS:
        description["task"] = used_knobs(fields)
    if fields.dataset == "chat":
        description["template"] = template_probe(context.tokenizer)
    name, weight = fields.dataset, 1.0
    if isinstance(fields, Source):
        name, weight = fields.name or fields.dataset, fields.weight
        description["weight"] = weight
    return Feed(name=name, source=source, encode=encode, weight=weight, description=description)
