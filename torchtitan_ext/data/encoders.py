"""Records to documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.packing import Document, next_token_document
from torchtitan_ext.data.sources import Record
from torchtitan_ext.errors import UserError, nearest

AddBos = Literal["auto", "always", "never"]


def field_of(record: Record, field: str, *, where: str) -> Any:
    """``record[field]``; a missing field is an error that lists the fields there are."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a record with fields, got {type(record).__name__}")
    if field not in record:
        raise UserError(
            f"{where}: no field {field!r}{nearest(field, record)} (fields: {', '.join(sorted(record))})"
        )
    return record[field]


def text_of(record: Record, field: str, *, where: str) -> str:
    """The text of a record; null is an empty text."""
    if isinstance(record, str):
        return record
    value = field_of(record, field, where=where)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} is {type(value).__name__}, expected text")
    return value


def resolve_bos(tokenizer: BaseTokenizer, add_bos: AddBos) -> bool:
    """Whether documents of plain text start with BOS.

    Errors: UserError for ``always`` with a tokenizer that has no BOS.
    """
    bos_id = getattr(tokenizer, "bos_id", None)
    if add_bos == "always" and bos_id is None:
        raise UserError("dataloader.add_bos = 'always', but the tokenizer has no BOS token")
    return add_bos == "always" or (
        add_bos == "auto" and bool(getattr(tokenizer, "wants_bos", bos_id is not None))
    )


def encode_plain(tokenizer: BaseTokenizer, texts: Sequence[str], *, add_bos: bool) -> list[np.ndarray]:
    """Ids of plain texts with EOS, in one call where the tokenizer offers that."""
    bulk = getattr(tokenizer, "encode_documents", None)
    if bulk is not None:
        return bulk(texts, add_bos=add_bos, add_eos=True)
    return [np.asarray(tokenizer.encode(t, add_bos=add_bos, add_eos=True), dtype=np.int64) for t in texts]


def text_encoder(
    tokenizer: BaseTokenizer, *, field: str, add_bos: AddBos, where: str
) -> Callable[[Sequence[Record]], list[Document | None]]:
    """An encoder of plain text: every token but the first is a target."""
    with_bos = resolve_bos(tokenizer, add_bos)

    def encode(records: Sequence[Record]) -> list[Document | None]:
        texts = [text_of(record, field, where=where) for record in records]
        arrays = iter(encode_plain(tokenizer, [t for t in texts if t], add_bos=with_bos))
        return [next_token_document(next(arrays)) if text else None for text in texts]

    return encode
