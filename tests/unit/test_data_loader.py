"""The loader: one row order for every number of ranks, and resume at any batch."""

from __future__ import annotations

import gc
import json
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_data_common import (
    IGNORE,
    batch_rows,
    byte_tokenizer,
    documents_of,
    equal_batches,
    finite_rows,
    loader,
    run_ranks,
    write_jsonl,
)
from torchtitan_ext.data.fingerprint import content_of
from torchtitan_ext.data.loader import DataLoader, followed_streams
from torchtitan_ext.errors import UserError

ROWS = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """37 documents of very different length."""
    folder = tmp_path_factory.mktemp("rows")
    records = [{"text": f"<{i}>" + chr(97 + i % 26) * (i * 7 % 41)} for i in range(37)]
    return str(write_jsonl(folder / "data.jsonl", records))


def config(path: str, **kwargs) -> DataLoader.Config:
    kwargs.setdefault("prefetch", 0)
    return DataLoader.Config(dataset="text", dataset_path=path, **kwargs)


@pytest.mark.parametrize("num_streams", [1, 4, 64])
@pytest.mark.parametrize("packing", ["concatenate", "whole"])
def test_rows_do_not_depend_on_ranks_or_batches(path, num_streams, packing):
    setup = config(path, num_streams=num_streams, packing=packing)
    reference, _ = run_ranks(setup, world=1, batch=1, steps=ROWS)
    for world, batch in [(1, 8), (2, 4), (2, 1), (3, 2), (4, 3), (5, 1)]:
        steps = ROWS // (world * batch)
        rows, _ = run_ranks(setup, world=world, batch=batch, steps=steps)
        assert rows == reference[: len(rows)], (world, batch)


@settings(deadline=None, max_examples=60)
@given(
    num_streams=st.sampled_from([1, 4, 6, 64]),
    before=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    after=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    steps=st.integers(0, 5),
    shuffle=st.sampled_from(["none", "buffer", "full"]),
    packing=st.sampled_from(["concatenate", "whole"]),
)
def test_resume_under_any_number_of_ranks(path, num_streams, before, after, steps, shuffle, packing):
    setup = config(path, num_streams=num_streams, shuffle=shuffle, shuffle_buffer=5, packing=packing)
    (world, batch), (new_world, new_batch) = before, after
    first, state = run_ranks(setup, world=world, batch=batch, steps=steps)
    assert state["row"] == len(first) == world * batch * steps
    second, again = run_ranks(setup, world=new_world, batch=new_batch, steps=3, state=state)
    total = len(first) + len(second)
    reference, _ = run_ranks(setup, world=1, batch=1, steps=total)
    assert first + second == reference
    assert again["row"] == total


def test_followed_streams_are_those_of_the_rows():
    for streams in (1, 4, 6, 64):
        for world in (1, 2, 3, 4, 5, 128):
            for rank in range(0, world, 3):
                rows = range(rank, rank + world * streams, world)
                assert set(followed_streams(rank, streams, world)) == {i % streams for i in rows}


def test_state_holds_only_followed_streams_and_ranks_cover_all(path):
    setup = config(path, num_streams=8)
    one = loader(setup, world=2, rank=1)
    assert {f"stream_{v}" for v in range(8)} <= one.state_dict().keys()
    next(iter(one))
    used = {key for key, value in one.state_dict().items() if key.startswith("stream_") and value}
    assert used == {"stream_1", "stream_3", "stream_5", "stream_7"}
    assert all(isinstance(v, int | str | bytes) for v in one.state_dict().values())


def test_state_goes_through_a_distributed_checkpoint(path, tmp_path):
    import torch.distributed.checkpoint as dcp

    setup = config(path, num_streams=4)
    saved = loader(setup, batch=2)
    iterator = iter(saved)
    next(iterator)
    dcp.save({"dataloader": saved}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    expected = next(iterator)
    resumed = loader(setup, batch=2)
    dcp.load({"dataloader": resumed}, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert equal_batches(next(iter(resumed)), expected)


def test_every_document_once_an_epoch(path):
    rows = finite_rows(config(path, infinite=False), batch=2)
    text = byte_tokenizer().decode([t for tokens, _, _ in rows for t in tokens])
    for i in range(37):
        assert text.count(f"<{i}>") == 1
    assert text.count("<") == 37


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("num_streams", [0, 1, 4, 64])
def test_finite_data_over_ranks(path, world, num_streams):
    setup = config(path, infinite=False, num_streams=num_streams)
    per_rank = [finite_rows(setup, world=world, rank=r, batch=2) for r in range(world)]
    real = [t for rows in per_rank for t, lab in documents_of(rows) if any(x != IGNORE for x in lab)]
    reference = [t for t, lab in documents_of(finite_rows(setup)) if any(x != IGNORE for x in lab)]
    assert sorted(real) == sorted(reference)
    if num_streams in (0, 1):
        # One stream: every rank sees the end in the same step.
        assert len({len(rows) for rows in per_rank}) == 1


def test_iterating_again_goes_on(path):
    setup = config(path)
    reference, _ = run_ranks(setup, world=1, batch=1, steps=6)
    one = loader(setup)
    rows = [batch_rows(next(iter(one)))[0] for _ in range(6)]
    assert rows == reference


def test_ended_data_stays_ended_and_resumes_as_ended(path):
    setup = config(path, infinite=False)
    one = loader(setup)
    assert list(one) and not list(one)
    other = loader(setup)
    other.load_state_dict(one.state_dict())
    assert not list(other)


@pytest.mark.parametrize("shuffle", ["full", "buffer"])
def test_epochs_have_different_orders(path, shuffle):
    setup = config(path, shuffle=shuffle, shuffle_buffer=20)
    tokens_an_epoch = sum(len(t) for t, _, _ in finite_rows(config(path, infinite=False)))
    one = loader(setup)
    rows = [batch_rows(b)[0] for b, _ in zip(one, range(2 * tokens_an_epoch // 16 + 2), strict=False)]
    text = byte_tokenizer().decode([t for tokens, _, _ in rows for t in tokens])
    names = re.findall(r"<(\d+)>", text)
    first, second = names[:37], names[37:74]
    assert sorted(first) == sorted(second) and first != second
    assert one.counters()["epochs"] == 2


def test_no_shuffle_keeps_the_order(path):
    rows = finite_rows(config(path, infinite=False, shuffle="none"))
    text = byte_tokenizer().decode([t for tokens, _, _ in rows for t in tokens])
    places = [text.index(f"<{i}>") for i in range(37)]
    assert places == sorted(places)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetch_changes_neither_rows_nor_state(path, prefetch):
    plain, ahead = loader(config(path)), loader(config(path, prefetch=prefetch))
    left, right = iter(plain), iter(ahead)
    for _ in range(5):
        assert equal_batches(next(left), next(right))
        time.sleep(0.02)
        assert plain.state_dict() == ahead.state_dict()
        assert plain.counters() == ahead.counters()
    resumed = loader(config(path, prefetch=prefetch))
    resumed.load_state_dict(ahead.state_dict())
    assert equal_batches(next(iter(resumed)), next(left))


def test_loading_while_the_thread_runs_starts_over_cleanly(path):
    one = loader(config(path, prefetch=4))
    start = one.state_dict()
    first = next(iter(one))
    one.load_state_dict(start)
    assert equal_batches(next(iter(one)), first)


def test_error_in_the_thread_reaches_the_consumer(tmp_path):
    from torchtitan_ext.data.files import FilesSource

    data = write_jsonl(tmp_path / "d.jsonl", [{"text": "a" * 30}] * 60)
    one = loader(config(str(data), prefetch=2, num_streams=1, shuffle="none"))

    def broken(index: int):
        raise UserError(f"no record {index}")

    source = one._feeds[0].source
    assert isinstance(source, FilesSource)
    source.read = broken  # type: ignore
    iterator = iter(one)
    with pytest.raises(UserError, match="no record 0"):
        next(iterator)
    assert one.state_dict()["row"] == 0


def test_a_dropped_loader_stops_its_thread(path):
    one = loader(config(path, prefetch=1))
    next(iter(one))
    assert any(t.name == "data-ahead" for t in threading.enumerate())
    del one
    gc.collect()
    deadline = time.time() + 5
    while any(t.name == "data-ahead" for t in threading.enumerate()) and time.time() < deadline:
        time.sleep(0.05)
    assert not any(t.name == "data-ahead" for t in threading.enumerate())


@pytest.mark.parametrize(
    ("change", "named"),
    [({"seed": 5}, "seed: 0"), ({"packing": "whole"}, "packing"), ({"num_streams": 2}, "num_streams"),
     ({"shuffle": "none"}, "shuffle"), ({"long_documents": "drop"}, "long_documents")],
)  # fmt: skip
def test_changed_data_settings_are_refused(path, change, named):
    one = loader(config(path, num_streams=4))
    next(iter(one))
    other = loader(config(path, **{"num_streams": 4, **change}))
    with pytest.raises(UserError, match=named):
        other.load_state_dict(one.state_dict())


def test_changed_data_tokenizer_or_length_are_refused(path, tmp_path):
    one = loader(config(path))
    shorter = write_jsonl(tmp_path / "s.jsonl", [{"text": "abc"}] * 5)
    with pytest.raises(UserError, match="documents: 37 in the checkpoint, 5 now"):
        loader(config(str(shorter))).load_state_dict(one.state_dict())
    with pytest.raises(UserError, match="seq_len: 16 in the checkpoint, 32 now"):
        loader(config(path), seq_len=32).load_state_dict(one.state_dict())


def test_more_streams_than_the_checkpoint_are_refused_by_name(path):
    """The keys of the state exist under both numbers of streams, so the reason is told by the loader."""
    few, many = loader(config(path, num_streams=1)), loader(config(path, num_streams=64))
    assert few.state_dict().keys() == many.state_dict().keys()
    with pytest.raises(UserError, match="num_streams: 1 in the checkpoint, 64 now"):
        many.load_state_dict(few.state_dict())


def test_automatic_streams_depend_on_the_data_alone(path, tmp_path):
    large = write_jsonl(tmp_path / "l.jsonl", [{"text": "abc"}] * 1024)
    for world in (1, 3):
        assert loader(config(path), world=world).num_streams == 1
        assert loader(config(str(large)), world=world).num_streams == 64
    assert loader(config(str(large), infinite=False)).num_streams == 1


def test_counters_and_the_warning_about_dropped_documents(tmp_path, caplog):
    data = write_jsonl(tmp_path / "d.jsonl", [{"text": "a" * n} for n in (3, 40, 5, 50, 2)] + [{"text": ""}])
    setup = config(str(data), infinite=False, long_documents="drop", shuffle="none")
    one = loader(setup)
    with caplog.at_level("WARNING"):
        list(one)
    counts = one.counters()
    assert (counts["documents"], counts["dropped"], counts["empty"]) == (3, 2, 1)
    assert sum("dropped" in r.message for r in caplog.records) == 1


def test_default_is_the_standard_library_and_shapes():
    one = loader(DataLoader.Config(), batch=3, seq_len=64)
    inputs, labels = next(iter(one))
    for tensor in (inputs["input"], inputs["positions"], labels):
        assert tensor.shape == (3, 64) and tensor.dtype == torch.int64
    same = (inputs["positions"][:, 1:] > 0) & (labels[:, :-1] != IGNORE)
    assert torch.equal(labels[:, :-1][same], inputs["input"][:, 1:][same])


def test_stdlib_validation_is_disjoint_from_training():
    from torchtitan_ext.data.sources import stdlib_documents, stdlib_source

    parts = {s: stdlib_source(split=s, fraction=0.05) for s in ("train", "validation")}
    sizes = {s: source.size for s, source in parts.items()}
    assert sizes["train"] + sizes["validation"] == len(stdlib_documents())
    assert 0 < sizes["validation"] < sizes["train"] / 5
    held = {parts["validation"].read(i) for i in range(sizes["validation"])}
    names = [name for name, _ in stdlib_documents()]
    assert len(set(names)) == len(names) and any(n.startswith("pydoc_data/topics/") for n in names)
    train = {parts["train"].read(i) for i in range(sizes["train"])}
    assert len(held & train) < 10  # a few files of the library have equal text


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dataset": "stdlip"}, "did you mean 'stdlib'"),
        ({"dataset": "text"}, "needs dataset_path"),
        ({"dataset": "text", "dataset_path": "/nowhere/x.txt"}, "no file at dataset_path"),
        ({"dataset_path": "x"}, "takes no dataset_path"),
        ({"num_streams": -1}, "num_streams is -1"),
        ({"prefetch": -2}, "prefetch is -2"),
        ({"held_out": 1.5}, "held_out is 1.5"),
        ({"sources": [], "shuffle_buffer": 0}, "shuffle_buffer is 0"),
    ],
)
def test_wrong_settings_are_refused_at_construction(kwargs, message):
    with pytest.raises(UserError, match=message):
        loader(DataLoader.Config(**kwargs))


def test_data_without_a_token_is_an_error_and_not_an_endless_loop(tmp_path):
    data = write_jsonl(tmp_path / "e.jsonl", [{"text": ""}] * 3)
    with pytest.raises(UserError, match="no usable document"):
        next(iter(loader(config(str(data)))))


def test_empty_file_is_refused(tmp_path):
    (tmp_path / "e.txt").write_text(" \n\n")
    with pytest.raises(UserError, match="no document"):
        loader(config(str(tmp_path / "e.txt")))


def test_loading_is_a_small_part_of_a_step():
    one = loader(DataLoader.Config(prefetch=0), batch=8, seq_len=512)
    iterator = iter(one)
    next(iterator)
    start = time.perf_counter()
    for _ in range(20):
        next(iterator)
    # 80,000 tokens; a per-token Python loop would need about as long as the limit.
    assert time.perf_counter() - start < 1.0


def test_torchtitans_own_tokenizer_works(path, tmp_path):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from tests.unit.test_tokenizer_kinds import write_hf
    from torchtitan_ext.data.tokenizers import Tokenizer

    folder = str(write_hf(tmp_path, config={"bos_token": "<s>", "eos_token": "</s>"}))
    theirs = HuggingFaceTokenizer.Config().build(tokenizer_path=folder)
    ours = Tokenizer.Config().build(tokenizer_path=folder)
    setup = config(path, num_streams=1)
    left, right = (next(iter(loader(setup, tokenizer=t, batch=8))) for t in (theirs, ours))
    assert equal_batches(left, right)


# --- the data's own identity ----------------------------------------------------------------


def test_data_that_was_moved_or_renamed_is_the_same(path, tmp_path):
    shutil.copy(path, tmp_path / "renamed.jsonl")
    one = loader(config(path))
    next(iter(one))
    other = loader(config(str(tmp_path / "renamed.jsonl")))
    other.load_state_dict(one.state_dict())
    assert equal_batches(next(iter(other)), next(iter(one)))
    # A checkpoint of a version that did not note the data goes on as before.
    state = one.state_dict()
    older = json.loads(state["fingerprint"])
    del older["sources"][0]["data"]
    other.load_state_dict({**state, "fingerprint": json.dumps(older)})


def test_other_data_of_as_many_documents_and_bytes_is_refused_with_both_names(path, tmp_path):
    text = Path(path).read_text()
    changed = tmp_path / "other.jsonl"
    changed.write_text(text.replace("<36>", "<63>"))
    one = loader(config(path))
    with pytest.raises(UserError) as error:
        loader(config(str(changed))).load_state_dict(one.state_dict())
    message = str(error.value)
    size = f"1 file of {len(text.encode()):,} bytes"
    assert f"sources[0].data: '{path}: {size}" in message and f"{changed}: {size}" in message


def test_a_folder_is_known_by_the_files_of_the_split(tmp_path):
    for name in ("train-0.jsonl", "train-1.jsonl", "validation.jsonl"):
        write_jsonl(tmp_path / name, [{"text": name}])
    setup = config(str(tmp_path))
    before = content_of(setup)
    assert before["content"].startswith("2 files of ")
    (tmp_path / "notes.md").write_text("x")
    write_jsonl(tmp_path / "validation.jsonl", [{"text": "new"}])
    assert content_of(setup) == before
    write_jsonl(tmp_path / "train-1.jsonl", [{"text": "train-9.jsonl"}])
    assert content_of(setup)["content"] != before["content"]
    assert content_of(config("allenai/c4"))["content"] == "allenai/c4"
