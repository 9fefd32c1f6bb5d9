"""Local files: formats, compression, splits, and what is wrong with them told early."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.paths import shared_data
from tests.unit.test_data_common import byte_tokenizer, finite_rows, loader, write_jsonl
from torchtitan_ext.data.files import (
    JsonLinesFile,
    ParquetFile,
    RowGroups,
    Storage,
    TxtFile,
    find_files,
    format_of,
    open_files,
    split_of,
)
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.order import Order, choose
from torchtitan_ext.data.sources import ListSource, SubsetSource
from torchtitan_ext.errors import UserError

TEXTS = ["first", "zwei\nlines", "ünïcode ✓", "4" * 30]
PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    "": bytes,
}


def config(path, **kwargs) -> DataLoader.Config:
    kwargs = {"infinite": False, "shuffle": "none", "prefetch": 0, **kwargs}
    return DataLoader.Config(dataset="text", dataset_path=str(path), **kwargs)


def texts_of(setup: DataLoader.Config) -> list[str]:
    """The documents as the loader gives them, one a row."""
    tokenizer = byte_tokenizer()
    tokens = [t for row in finite_rows(setup, seq_len=4096) for t in row[0]]
    texts, current = [], []
    for token in tokens:
        if token == tokenizer.eos_id:
            texts.append(tokenizer.decode(current))
            current = []
        else:
            current.append(token)
    return texts


def jsonl_bytes(records) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in records).encode()


@pytest.mark.parametrize("suffix", PACK)
def test_jsonl_and_txt_under_every_compression(tmp_path, suffix):
    (tmp_path / f"d.jsonl{suffix}").write_bytes(PACK[suffix](jsonl_bytes({"text": t} for t in TEXTS)))
    assert texts_of(config(tmp_path / f"d.jsonl{suffix}")) == TEXTS
    (tmp_path / f"d.txt{suffix}").write_bytes(PACK[suffix]("\n\n".join(TEXTS).encode()))
    assert texts_of(config(tmp_path / f"d.txt{suffix}", txt_documents="paragraph")) == TEXTS


def test_parquet_over_row_groups_reads_one_column(tmp_path):
    table = pa.table({"body": TEXTS, "other": list(range(len(TEXTS)))})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=3)
    assert texts_of(config(tmp_path / "d.parquet", text_field="body")) == TEXTS
    file = ParquetFile(tmp_path / "d.parquet", columns=["body"], cache=RowGroups())
    assert file.read(3) == {"body": TEXTS[3]}


def test_row_groups_are_let_go_beyond_the_limit(tmp_path):
    table = pa.table({"text": [str(i) * 100 for i in range(40)]})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=4)
    cache = RowGroups(limit=1500)
    file = ParquetFile(tmp_path / "d.parquet", columns=["text"], cache=cache)
    for i in np.random.default_rng(0).permutation(40):
        assert file.read(int(i)) == {"text": str(i) * 100}
    assert cache._used <= 1500 and len(cache._tables) < 5


def test_txt_as_file_line_and_paragraph(tmp_path):
    path = tmp_path / "d.txt"
    path.write_bytes(b"\n a b\r\n\nc\n \t\n\nd\ne")
    for documents, wanted in {
        "file": ["\n a b\r\n\nc\n \t\n\nd\ne"],
        "line": [" a b", "c", "d", "e"],
        "paragraph": [" a b", "c", "d\ne"],
    }.items():
        file = TxtFile(path, documents=documents, storage=Storage())
        assert [file.read(i) for i in range(file.size)] == wanted, documents


@settings(deadline=None, max_examples=40)
@given(text=st.text(alphabet="ab \n\r", max_size=40))
def test_lines_and_paragraphs_lose_no_visible_character(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("t") / "d.txt"
    path.write_bytes(text.encode())
    for documents in ("line", "paragraph"):
        file = TxtFile(path, documents=documents, storage=Storage())
        found = "".join(str(file.read(i)) for i in range(file.size))
        assert "".join(found.split()) == "".join(text.split())


def test_folder_and_glob(tmp_path):
    for i, text in enumerate(TEXTS):
        write_jsonl(tmp_path / "deep" / f"part{i}.jsonl", [{"text": text}])
    (tmp_path / "README.md").write_text("not data")
    assert texts_of(config(tmp_path)) == TEXTS
    assert texts_of(config(tmp_path / "**" / "*.jsonl")) == TEXTS
    assert texts_of(config(tmp_path / "deep" / "part[12].jsonl")) == TEXTS[1:3]


def test_files_of_a_folder_that_name_splits(tmp_path):
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl", "dev.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    assert texts_of(config(tmp_path)) == ["train-0.jsonl", "train-1.jsonl"]
    assert texts_of(config(tmp_path, split="validation")) == ["dev.jsonl"]
    (tmp_path / "dev.jsonl").unlink()
    with pytest.raises(UserError, match="no file of split 'validation'"):
        find_files(str(tmp_path), split="validation", where="x")


def test_more_files_than_descriptors(tmp_path):
    import resource

    for i in range(150):
        write_jsonl(tmp_path / f"{i:03}.jsonl", [{"text": f"n{i}"}])
        (tmp_path / f"{i:03}.txt.gz").write_bytes(gzip.compress(f"t{i}".encode()))
        pq.write_table(pa.table({"text": [f"p{i}"]}), tmp_path / f"{i:03}.parquet")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Above what tests before this one hold open in the same process.
    taken = max(int(name) for name in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 100, limits[1]))
    try:
        found = texts_of(config(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sorted(found) == sorted(f"{kind}{i}" for kind in "ntp" for i in range(150))


def test_names_tell_format_and_split(tmp_path):
    from pathlib import Path

    assert format_of(Path("a.json.gz")) == "jsonl" and format_of(Path("a.b.TXT.zst")) == "txt"
    assert format_of(Path("a.parquet.gz")) is None and format_of(Path("a.gz")) is None
    assert split_of(Path("c4-validation.00000-of-00008.json.gz")) == "validation"
    assert split_of(Path("training_notes.txt")) is None and split_of(Path("contest.txt")) is None


def test_held_out_part_by_index(tmp_path):
    data = write_jsonl(tmp_path / "d.jsonl", [{"text": f"n{i}"} for i in range(200)])
    train, held = (texts_of(config(data, held_out=0.2, split=s)) for s in ("train", "validation"))
    assert sorted(train + held) == sorted(f"n{i}" for i in range(200))
    assert 20 <= len(held) <= 60
    whole = ListSource(list(range(200)), name="x")  # type: ignore
    assert SubsetSource(whole, split="validation", fraction=0.2).size == len(held)


def test_broken_lines_are_counted_and_named(tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": \n{"text": "b"}\n[1]\n{"text": "c"}\n\xff\xfe\n')
    with pytest.raises(UserError, match=r"3 broken lines, the first: .*d\.jsonl, line 3: broken JSON"):
        loader(config(path))
    with caplog.at_level("WARNING"):
        setup = config(path, broken_lines="skip")
        assert texts_of(setup) == ["a", "b", "c"]
    assert any("3 broken lines" in r.message for r in caplog.records)
    one = loader(setup)
    list(one)
    assert one.counters()["broken"] == 3 and one.counters()["documents"] == 3


def test_broken_line_beyond_the_check_is_found_when_read(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "a"}\nnope\n')
    kwargs = {"name": "d", "txt_documents": "file", "columns": None}
    source = open_files([path], broken_lines="skip", **kwargs)
    assert source.read(1) is None
    file = JsonLinesFile(path, storage=Storage())
    with pytest.raises(UserError, match="line 2: broken JSON"):
        file.read(1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"txet": "a"}\n', "no field 'text'; did you mean 'txet'.*fields: txet"),
        ("d.jsonl", b'{"text": 3}\n', "field 'text' is int, expected text"),
        ("d.txt", b"\xff\xfe\x00", "not UTF-8 at byte 0"),
        ("d.parquet", b"PAR?", "not a readable parquet file"),
        ("d.txt.gz", b"plain", "cannot be unpacked"),
        ("d.txt.gz", gzip.compress(b"cut", mtime=0)[:-12], "cannot be unpacked"),
        ("d.txt.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, "cannot be unpacked"),
        ("d.txt.zst", b"plain", "cannot be unpacked"),
        ("d.txt.xz", b"plain", "cannot be unpacked"),
        ("d.txt.bz2", b"plain", "cannot be unpacked"),
        ("d.csv", b"a,b", "format that is not read"),
        ("d.jsonl", b"", "no document"),
        ("d.txt.gz", gzip.compress(b"", mtime=0), "no document"),
    ],
)
def test_bad_files_are_refused_at_construction(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        loader(config(tmp_path / name))


def test_missing_parquet_field_and_empty_folder(tmp_path):
    with pytest.raises(UserError, match="no data file in folder"):
        loader(config(tmp_path))
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"no field 'text'.*fields: body"):
        loader(config(tmp_path))


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 60), shuffle=st.sampled_from(["none", "buffer", "full"]), block=st.integers(1, 80),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_an_order_is_a_permutation(size, shuffle, block, seed):
    order = Order(size, shuffle=shuffle, block=block, seed=seed)
    for epoch in (0, 1):
        places = [order.document(epoch, p) for p in range(size)]
        assert sorted(places) == list(range(size))
        again = Order(size, shuffle=shuffle, block=block, seed=seed)
        # The other way round, so that the kept permutations cannot matter.
        assert [again.document(epoch, p) for p in reversed(range(size))] == places[::-1]
        if shuffle == "buffer":
            assert all(p // block == d // block for p, d in enumerate(places))


def test_choose_follows_the_weights():
    drawn = [choose([1, 0, 3], "x", i) for i in range(4000)]
    assert drawn.count(1) == 0 and abs(drawn.count(2) / 4000 - 0.75) < 0.03


@pytest.mark.skipif(shared_data() is None, reason="no shared data")
def test_real_text_and_gsm8k():
    folder = shared_data()
    assert folder is not None
    play = texts_of(config(folder / "tinyshakespeare" / "input.txt", txt_documents="paragraph"))
    assert len(play) > 5000 and play[0].startswith("First Citizen:")
    one = loader(
        DataLoader.Config(dataset="chat", dataset_path=str(folder / "gsm8k"), prefetch=0), seq_len=1024
    )
    assert one._feeds[0].source.size == 7473
