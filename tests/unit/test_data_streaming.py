"""Hub data sets, read from local files of the same schema."""

from __future__ import annotations

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.test_data_common import byte_tokenizer, finite_rows, loader, run_ranks
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.errors import UserError

FILES = 5


@pytest.fixture(scope="module")
def c4(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("c4")
    for split in ("train", "validation"):
        for f in range(FILES):
            lines = [{"text": f"<{split[0]}{f}.{i}>" + "x" * (i * 5 % 23), "url": "u"} for i in range(12)]
            data = "".join(json.dumps(x) + "\n" for x in lines).encode()
            (folder / f"c4-{split}.0000{f}-of-00005.json.gz").write_bytes(gzip.compress(data))
    return str(folder)


@pytest.fixture(scope="module")
def fineweb(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("fineweb")
    for f in range(2):
        table = pa.table({"text": [f"<{f}.{i}>" for i in range(100)], "score": [3.5] * 100})
        pq.write_table(table, folder / f"00{f}_0000.parquet", row_group_size=10)
    return str(folder)


def config(dataset: str, path: str, **kwargs) -> DataLoader.Config:
    # Whole documents, so that a name is not cut between two rows of different streams.
    kwargs = {"prefetch": 0, "packing": "whole", **kwargs}
    return DataLoader.Config(dataset=dataset, dataset_path=path, **kwargs)


def text_of(setup: DataLoader.Config, **kwargs) -> str:
    return byte_tokenizer().decode([t for row in finite_rows(setup, seq_len=32, **kwargs) for t in row[0]])


@pytest.mark.parametrize("num_streams", [0, 1, 3, 8])
def test_every_document_once(c4, num_streams):
    text = text_of(config("c4", c4, infinite=False, num_streams=num_streams))
    for f in range(FILES):
        for i in range(12):
            assert text.count(f"<t{f}.{i}>") == 1
    assert text.count("<") == FILES * 12


def test_validation_files_are_others(c4):
    assert "<t" not in text_of(config("c4", c4, infinite=False, split="validation"))


def test_streams_are_at_most_the_files(c4):
    assert loader(config("c4", c4)).num_streams == 4


@pytest.mark.parametrize(("shuffle", "num_streams"), [("none", 4), ("buffer", 4), ("buffer", 8)])
def test_resume_under_other_ranks(c4, shuffle, num_streams):
    setup = config("c4", c4, shuffle=shuffle, shuffle_buffer=12, num_streams=num_streams)
    reference, _ = run_ranks(setup, world=1, batch=1, steps=96)
    for steps in (3, 11):
        first, state = run_ranks(setup, world=2, batch=2, steps=steps)
        assert first == reference[: len(first)]
        for world in (1, 3):
            rest, _ = run_ranks(setup, world=world, batch=1, steps=12, state=state)
            assert rest == reference[len(first) : len(first) + len(rest)]


def test_buffer_shuffles_and_epochs_differ(c4):
    plain = text_of(config("c4", c4, infinite=False, shuffle="none", num_streams=1))
    mixed = text_of(config("c4", c4, infinite=False, shuffle_buffer=30, num_streams=1))
    assert plain != mixed and sorted(plain) == sorted(mixed)


def test_epochs_of_a_stream_have_different_orders(fineweb):
    setup = config("fineweb_edu", fineweb, num_streams=1, shuffle_buffer=500, held_out=0.0)
    one = loader(setup, batch=4, seq_len=32)
    text = ""
    for (inputs, _), _ in zip(one, range(120), strict=False):
        text += byte_tokenizer().decode(inputs["input"].flatten())
    names = re.findall(r"<(\d\.\d+)>", text)
    assert sorted(names[:200]) == sorted(names[200:400]) and names[:200] != names[200:400]
    assert one.counters()["epochs"] >= 1


def test_fineweb_edu_holds_out_by_text(fineweb):
    kwargs = {"infinite": False, "held_out": 0.1}
    train = text_of(config("fineweb_edu", fineweb, **kwargs))
    held = text_of(config("fineweb_edu", fineweb, split="validation", **kwargs))
    names = [f"<{f}.{i}>" for f in range(2) for i in range(100)]
    assert all(train.count(n) + held.count(n) == 1 for n in names)
    assert 5 <= held.count("<") <= 40


def test_errors(c4, fineweb, tmp_path):
    with pytest.raises(UserError, match="no field 'body'"):
        loader(config("c4", c4, text_field="body"))
    with pytest.raises(UserError, match="'full' needs data of known length"):
        loader(config("c4", c4, shuffle="full"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"either \.jsonl or \.parquet"):
        loader(config("c4", str(tmp_path)))
    with pytest.raises(UserError, match="held_out"):
        loader(config("c4", c4, held_out=0.5))


def test_broken_stream_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3 + "{broken\n")
    with pytest.raises(UserError, match="c4"):
        list(loader(config("c4", str(tmp_path), infinite=False)))
