"""Data sets by name.

A builder takes the keys of one source and a :class:`Context` and returns a
source with its encoder. Other rooms add theirs with :func:`register_dataset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.config import Source, SourceFields
from torchtitan_ext.data.encoders import AddBos, text_encoder
from torchtitan_ext.data.sources import AnySource, stdlib_source
from torchtitan_ext.data.streams import Encoder, Feed
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
        raise UserError(f"{context.where}: the data set 'stdlib' takes no dataset_path, got {fields.dataset_path!r}")
    source = stdlib_source(split=fields.split, fraction=0.05 if fields.held_out is None else fields.held_out)
    encode = text_encoder(context.tokenizer, field="text", add_bos=context.add_bos, where=context.where)
    return Built(source, encode)


DATASETS: dict[str, DatasetEntry] = {
    "stdlib": DatasetEntry(build=_build_stdlib),
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


def build_feed(fields: SourceFields, context: Context) -> Feed:
    """The source with its encoder; an empty data set is an error here."""
    entry = entry_of(fields)
    if fields.held_out is not None and not 0 <= fields.held_out < 1:
        raise UserError(f"{context.where}: held_out is {fields.held_out}, expected 0 <= held_out < 1")
    source, encode = entry.build(fields, context)
    if source.size == 0:
        path = f" at {fields.dataset_path!r}" if fields.dataset_path else ""
        raise UserError(f"{context.where}: no document in split {fields.split!r}{path}")
    description: dict[str, Any] = {key: getattr(fields, key) for key in _DESCRIBED}
    description["documents"] = source.size
    name, weight = fields.dataset, 1.0
    if isinstance(fields, Source):
        name, weight = fields.name or fields.dataset, fields.weight
        description["weight"] = weight
    return Feed(name=name, source=source, encode=encode, weight=weight, description=description)
