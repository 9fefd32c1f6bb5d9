"""Mixtures: proportions, independence of ranks, resume, and errors."""

from __future__ import annotations

import re

import pytest

from tests.unit.test_data_common import byte_tokenizer, finite_rows, loader, run_ranks, write_jsonl
from torchtitan_ext.data.config import Source
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    write_jsonl(folder / "a.jsonl", [{"text": f"<a{i}>"} for i in range(40)])
    write_jsonl(folder / "b.jsonl", [{"text": f"<b{i}>"} for i in range(7)])
    return folder


def config(folder, weights=(3.0, 1.0), **kwargs) -> DataLoader.Config:
    sources = [
        Source(name=n, dataset="text", dataset_path=str(folder / f"{n}.jsonl"), weight=w)
        for n, w in zip("ab", weights, strict=True)
    ]
    return DataLoader.Config(sources=sources, **{"prefetch": 0, "packing": "whole", **kwargs})


def names(rows) -> list[str]:
    text = byte_tokenizer().decode([t for row in rows for t in row[0]])
    return re.findall(r"<(\w+)>", text)


@pytest.mark.parametrize("num_streams", [1, 4])
def test_proportions_of_documents(folder, num_streams):
    rows, _ = run_ranks(config(folder, num_streams=num_streams), world=1, batch=4, steps=300)
    found = names(rows)
    share = sum(n.startswith("a") for n in found) / len(found)
    assert len(found) > 2000 and abs(share - 0.75) < 0.03


def test_small_source_is_seen_evenly(folder):
    rows, _ = run_ranks(config(folder, num_streams=1), world=1, batch=4, steps=150)
    counts = [names(rows).count(f"b{i}") for i in range(7)]
    assert max(counts) - min(counts) <= 2 and min(counts) > 10


def test_ranks_and_resume(folder):
    setup = config(folder, num_streams=4)
    reference, _ = run_ranks(setup, world=1, batch=1, steps=60)
    for steps in (0, 1, 4):
        first, state = run_ranks(setup, world=3, batch=2, steps=steps)
        rest, _ = run_ranks(setup, world=2, batch=3, steps=4, state=state)
        assert first + rest == reference[: len(first) + len(rest)]


def test_finite_mixture_gives_every_document_once(folder):
    found = names(finite_rows(config(folder, infinite=False)))
    assert sorted(found) == sorted([f"a{i}" for i in range(40)] + [f"b{i}" for i in range(7)])


def test_seed_changes_the_mixture(folder):
    one, two = (names(run_ranks(config(folder, seed=s), world=1, batch=1, steps=9)[0]) for s in (0, 1))
    assert one != two


def test_changed_weight_or_source_is_refused(folder):
    one = loader(config(folder))
    with pytest.raises(UserError, match=r"sources\[1\]\.weight: 1.0 in the checkpoint, 2.0 now"):
        loader(config(folder, weights=(3.0, 2.0))).load_state_dict(one.state_dict())


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_must_be_above_zero(folder, weight):
    with pytest.raises(UserError, match=r"sources\[0\]\.weight"):
        loader(config(folder, weights=(weight, 1.0)))


def test_other_errors(folder):
    with pytest.raises(UserError, match="not both"):
        loader(config(folder, dataset_path="x"))
    with pytest.raises(UserError, match=r"sources\[0\].*no file"):
        loader(DataLoader.Config(sources=[Source(dataset="text", dataset_path="/nowhere.txt")]))


def test_text_and_streamed_sources_mix(folder, tmp_path):
    for f in range(2):
        write_jsonl(tmp_path / f"c4-train.{f}.jsonl", [{"text": f"<c{f}x{i}>"} for i in range(20)])
    setup = config(folder, shuffle_buffer=8)
    setup.sources.append(Source(name="c", dataset="c4", dataset_path=str(tmp_path), weight=2.0))
    reference, _ = run_ranks(setup, world=1, batch=1, steps=40)
    assert {n[0] for n in names(reference)} == {"a", "b", "c"}
    first, state = run_ranks(setup, world=2, batch=2, steps=4)
    rest, _ = run_ranks(setup, world=1, batch=2, steps=6, state=state)
    assert first + rest == reference[: len(first) + len(rest)]


def test_a_task_in_a_mixture_is_not_cut_either(folder):
    setup = config(folder, packing="concatenate")
    setup.sources.append(Source(dataset="bounded_counter"))
    with pytest.raises(
        UserError, match=r"sources\[2\] \(bounded_counter\): packing = 'concatenate' would cut"
    ):
        loader(setup)
