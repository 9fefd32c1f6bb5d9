"""Packing: nothing lost, nothing twice, nothing out of order."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_data_common import documents_of
from torchtitan_ext.data.packing import COUNTERS, Document, Packer, PackingRule, next_token_document
from torchtitan_ext.errors import UserError

PAD = -7


class Listed:
    """Documents of a list; the state is the number handed out."""

    def __init__(self, documents: list[Document]) -> None:
        self._documents = documents
        self._at = 0
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.patience = 50

    def next(self) -> Document | None:
        if self._at == len(self._documents):
            return None
        self._at += 1
        return self._documents[self._at - 1]

    def state(self) -> int:
        return self._at

    def load_state(self, state: int) -> None:
        self._at = state


def make(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are all different, with every third token unsupervised."""
    documents, token = [], 0
    for length in lengths:
        ids = np.arange(token, token + length)
        documents.append(next_token_document(ids, ids % 3 != 0))
        token += length
    return documents


def pack(lengths: list[int], *, seq_len: int, packing: str = "concatenate", long_documents: str = "split"):
    rule = PackingRule(seq_len=seq_len, packing=packing, long_documents=long_documents, pad_id=PAD)  # type: ignore
    return Packer(Listed(make(lengths)), rule=rule)


def all_rows(packer: Packer):
    rows = []
    while (row := packer.next_row()) is not None:
        rows.append((row.tokens.tolist(), row.positions.tolist(), row.labels.tolist()))
    return rows


lengths_lists = st.lists(st.integers(1, 25), max_size=12)


@settings(deadline=None, max_examples=80)
@given(lengths=lengths_lists, seq_len=st.integers(1, 12), packing=st.sampled_from(["concatenate", "whole"]))
def test_every_token_once_in_order_with_its_label(lengths, seq_len, packing):
    packer = pack(lengths, seq_len=seq_len, packing=packing)
    rows = all_rows(packer)
    pieces = documents_of(rows)
    real = [(t, lab) for t, lab in pieces if t[0] != PAD]
    assert [x for t, _ in real for x in t] == list(range(sum(lengths)))
    expected = [x for d in make(lengths) for x in d.labels.tolist()]
    assert [x for _, lab in real for x in lab] == expected
    assert all(x == -100 for t, lab in pieces if t[0] == PAD for x in lab)
    padding = sum(len(t) for t, _ in pieces if t[0] == PAD)
    assert all(PAD not in t for t, _ in real)
    counts = packer._documents.counts
    assert counts["documents"] == len(lengths)
    assert counts["padding_tokens"] == padding
    assert sum(lengths) + padding == seq_len * len(rows)


@settings(deadline=None, max_examples=60)
@given(lengths=lengths_lists, seq_len=st.integers(1, 12), packing=st.sampled_from(["concatenate", "whole"]))
def test_dropping_keeps_exactly_the_documents_that_fit(lengths, seq_len, packing):
    packer = pack(lengths, seq_len=seq_len, packing=packing, long_documents="drop")
    packer._documents.patience = 100
    tokens = [x for t, _, _ in all_rows(packer) for x in t if x != PAD]
    assert tokens == [x for d in make(lengths) if len(d.tokens) <= seq_len for x in d.tokens.tolist()]
    assert packer._documents.counts["dropped"] == sum(n > seq_len for n in lengths)


@settings(deadline=None, max_examples=60)
@given(lengths=lengths_lists, seq_len=st.integers(1, 12))
def test_whole_documents_are_cut_only_when_longer_than_a_row(lengths, seq_len):
    real = [
        t for t, _ in documents_of(all_rows(pack(lengths, seq_len=seq_len, packing="whole"))) if t[0] != PAD
    ]
    wanted = [
        d.tokens[i : i + seq_len].tolist() for d in make(lengths) for i in range(0, len(d.tokens), seq_len)
    ]
    assert real == wanted


@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths_lists,
    seq_len=st.integers(1, 9),
    packing=st.sampled_from(["concatenate", "whole"]),
    long_documents=st.sampled_from(["split", "drop"]),
    data=st.data(),
)
def test_resume_after_any_row(lengths, seq_len, packing, long_documents, data):
    kwargs = {"seq_len": seq_len, "packing": packing, "long_documents": long_documents}
    whole = pack(lengths, **kwargs)
    rows = all_rows(whole)
    stop = data.draw(st.integers(0, len(rows)))
    first = pack(lengths, **kwargs)
    head = [first.next_row() for _ in range(stop)]
    assert len(head) == stop
    second = pack(lengths, **kwargs)
    second.load_state(first.state())
    assert all_rows(second) == rows[stop:]
    assert second._documents.counts == whole._documents.counts


def test_concatenate_wastes_nothing_but_the_end():
    rows = all_rows(pack([5, 9, 3], seq_len=6))
    assert [t for t, _, _ in rows] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, PAD]]
    assert [p for _, p, _ in rows] == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0]]
    # Token 5 is cut off from 6, its label stays; token 13 ends its document.
    assert rows[0][2][5] == -100 if 6 % 3 == 0 else 6
    assert rows[1][2][0] == 7
    assert rows[2][2][1] == -100


def test_label_of_a_cut_is_the_next_piece():
    rule = PackingRule(seq_len=4, packing="concatenate", long_documents="split", pad_id=PAD)
    packer = Packer(Listed([next_token_document(np.arange(10, 17))]), rule=rule)
    rows = all_rows(packer)
    assert rows[0] == ([10, 11, 12, 13], [0, 1, 2, 3], [11, 12, 13, 14])
    assert rows[1] == ([14, 15, 16, PAD], [0, 1, 2, 0], [15, 16, -100, -100])
    assert packer._documents.counts["split"] == 1


def test_dropping_everything_is_an_error_and_not_an_endless_loop():
    packer = pack([5] * 60, seq_len=2, long_documents="drop")
    with pytest.raises(UserError, match=r"drop.*seq_len = 2"):
        packer.next_row()


def test_unsupervised_tokens_have_no_label():
    document = next_token_document(np.array([1, 2, 3, 4]), np.array([False, False, True, False]))
    assert document.labels.tolist() == [-100, 3, -100, -100]


def test_queue_of_one_token_documents():
    rows = all_rows(pack([1, 1, 1], seq_len=2))
    assert rows[0][1] == [0, 0] and set(rows[0][2]) == {-100}
    assert deque(rows, maxlen=1)[0][0] == [2, PAD]
