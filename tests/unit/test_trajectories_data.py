"""Trajectories as a data set: one a row, never cut, and only those that a run fits."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_data_common import byte_tokenizer, loader, run_ranks
from tests.unit.test_trajectories_common import (
    load,
    made_up_set,
    make_set,
    register,
    trajectories_of,
    write_checkpoint,
)
from torchtitan_ext.data import trajectories
from torchtitan_ext.data.config import Source
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError
from torchtitan_ext.trainer import default_config
from torchtitan_ext.trajectories.shards import Trajectory

SEQ = 16
IGNORE = -100


def random_trajectory(index: int, rng: torch.Generator, *, most: int = SEQ) -> Trajectory:
    """A prompt and a response whose tokens are revealed in any order, some in one step."""
    prompt = int(torch.randint(1, most - 1, (1,), generator=rng))
    length = int(torch.randint(1, most - prompt + 1, (1,), generator=rng))
    tokens = torch.randint(0, 256, (prompt + length,), generator=rng).tolist()
    steps = torch.randperm(length, generator=rng).add(1).tolist()
    if length > 2:
        steps = [min(step, length - 1) for step in steps]
    return Trajectory(index, tokens[:prompt], tokens[prompt:], steps, length, None)


def random_set(folder: Path, count: int, *, seed: int = 0, **options) -> list[Trajectory]:
    rng = torch.Generator().manual_seed(seed)
    found = [random_trajectory(i, rng) for i in range(count)]
    made_up_set(folder, found, tokenizer=byte_tokenizer(), **options)
    return found


def config(folder: Path, **options) -> DataLoader.Config:
    options = {"prefetch": 0, "infinite": False, "shuffle": "none", **options}
    return DataLoader.Config(dataset="trajectories", dataset_path=str(folder), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("set") / "set"
    random_set(folder, 11)
    return folder


# --- rows ------------------------------------------------------------------------------


def read_back(inputs: dict[str, torch.Tensor], labels: torch.Tensor, row: int) -> tuple[list[int], ...]:
    """Prompt, response and steps of a row, from what a method is given."""
    steps = inputs["reveal_step_BL"][row]
    response = steps > 0
    begin, end = int(response.nonzero()[0]), int(response.nonzero()[-1]) + 1
    assert response[begin:end].all()
    tokens = inputs["input"][row]
    # The labels are the response's own tokens.
    assert torch.equal(labels[row], torch.where(response, tokens, IGNORE))
    padding = labels.shape[1] - end
    positions = torch.cat([torch.arange(end), torch.arange(padding)])
    assert torch.equal(inputs["positions"][row], positions)
    assert set(inputs) == {"input", "positions", "reveal_step_BL"}
    assert all(value.dtype == torch.int64 for value in inputs.values()) and labels.dtype == torch.int64
    return tokens[:begin].tolist(), tokens[begin:end].tolist(), steps[begin:end].tolist()


@settings(deadline=None, max_examples=25)
@given(
    count=st.integers(1, 9),
    shard_size=st.integers(1, 5),
    batch=st.integers(1, 4),
    seq_len=st.integers(SEQ, SEQ + 5),
    seed=st.integers(0, 1000),
)
def test_every_trajectory_is_one_row_as_it_was_recorded(
    tmp_path_factory, count, shard_size, batch, seq_len, seed
):
    folder = tmp_path_factory.mktemp("set")
    recorded = random_set(folder, count, seed=seed, shard_size=shard_size)
    assert trajectories_of(folder) == recorded
    found, fillers = [], 0
    for raw, raw_labels in loader(config(folder), batch=batch, seq_len=seq_len):
        before = copy.deepcopy((raw, raw_labels))
        inputs, labels = trajectories.unpack(raw, raw_labels)
        assert torch.equal(raw["positions"], before[0]["positions"]) and torch.equal(raw_labels, before[1])
        for row in range(batch):
            if not inputs["reveal_step_BL"][row].any():
                fillers += 1
                assert (labels[row] == IGNORE).all()
                assert torch.equal(inputs["positions"][row], torch.arange(seq_len))
                continue
            found.append(read_back(inputs, labels, row))
    assert found == [(one.prompt, one.response, one.reveal_step) for one in recorded]
    assert fillers == -count % batch


def test_trajectories_of_a_model_arrive_as_they_were_made(tmp_path):
    loaded = load(write_checkpoint(tmp_path / "ckpt"))
    make_set(loaded, tmp_path / "set")
    (batch,) = list(loader(config(tmp_path / "set"), batch=8, seq_len=40, tokenizer=loaded.tokenizer))
    inputs, labels = trajectories.unpack(*batch)
    for row, one in enumerate(trajectories_of(tmp_path / "set")):
        assert read_back(inputs, labels, row) == (one.prompt, one.response, one.reveal_step)
    assert inputs["reveal_step_BL"].amax(dim=1).tolist() == [6] * 8


@pytest.mark.parametrize("shuffle", ["none", "full"])
def test_ranks_share_the_rows_and_a_run_resumes_anywhere(folder, shuffle):
    setup = config(folder, shuffle=shuffle, infinite=True)
    reference, _ = run_ranks(setup, world=1, batch=1, steps=22, seq_len=SEQ)
    assert len({str(row) for row in reference[:11]}) == 11
    assert sorted(map(str, reference[11:])) == sorted(map(str, reference[:11]))
    for before, after in [((1, 2), (2, 1)), ((2, 2), (3, 1)), ((3, 1), (2, 2))]:
        first, state = run_ranks(setup, world=before[0], batch=before[1], steps=3, seq_len=SEQ)
        second, _ = run_ranks(setup, world=after[0], batch=after[1], steps=2, state=state, seq_len=SEQ)
        assert first + second == reference[: len(first) + len(second)]


def test_held_out_trajectories_are_in_validation_alone(tmp_path):
    recorded = random_set(tmp_path, 40)
    parts = {}
    for split in ("train", "validation"):
        rows = [
            row
            for inputs, _ in loader(config(tmp_path, split=split, held_out=0.3), seq_len=SEQ)
            for row in inputs["input"].tolist()
        ]
        parts[split] = len(rows)
    assert parts["train"] + parts["validation"] == len(recorded) and parts["validation"] > 3


# --- too long --------------------------------------------------------------------------


def test_a_trajectory_is_never_cut(tmp_path):
    recorded = random_set(tmp_path, 12)
    lengths = [len(one.prompt) + len(one.response) for one in recorded]
    limit = sorted(lengths)[6]
    assert limit < max(lengths)
    with pytest.raises(UserError, match=f"up to {max(lengths)} tokens and is never cut, but .* is {limit}"):
        loader(config(tmp_path), seq_len=limit)
    one = loader(config(tmp_path, long_documents="drop"), seq_len=limit)
    found = [
        read_back(*trajectories.unpack(inputs, labels), row=0)
        for inputs, labels in one
        if (labels != IGNORE).any()
    ]
    short = [r for r, length in zip(recorded, lengths, strict=True) if length <= limit]
    assert found == [(r.prompt, r.response, r.reveal_step) for r in short]
    assert one.counters()["dropped"] == 12 - len(short) > 0
    with pytest.raises(UserError, match="never cut"):
        loader(config(tmp_path, long_documents="drop"), seq_len=min(lengths) - 1)
    mixture = DataLoader.Config(
        sources=[Source(dataset="trajectories", dataset_path=str(tmp_path))], long_documents="drop"
    )
    with pytest.raises(UserError, match=r"\(raise it; the shortest has"):
        loader(mixture, seq_len=limit)


# --- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"packing": "concatenate"}, "packing = 'concatenate' would cut trajectories"),
        ({"split": "validation"}, "no split 'validation' of their own"),
        ({"split": "test", "held_out": 0.1}, "no split 'test' of their own"),
        ({"subset": "a"}, "takes no subset, got 'a'"),
        ({"dataset_path": None}, "needs dataset_path, a folder of trajectories"),
        ({"dataset_path": "nowhere"}, "dataset_path 'nowhere' is no folder"),
    ],
)
def test_keys_without_a_use_are_refused(folder, options, message):
    one = config(folder)
    for key, value in options.items():
        setattr(one, key, value)
    with pytest.raises(UserError, match=message):
        loader(one, seq_len=SEQ)


def test_an_incomplete_or_damaged_set_is_refused(folder, tmp_path):
    copied = tmp_path / "set"
    shutil.copytree(folder, copied)
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "shard-00001.parquet").rename(tmp_path / "kept")
    with pytest.raises(UserError, match="shard-00001.parquet is missing"):
        loader(config(copied), seq_len=SEQ)
    random_set(tmp_path / "other", 11, seed=5, parameters=1)
    shutil.copy(tmp_path / "other" / "shard-00001.parquet", copied)
    with pytest.raises(UserError, match="shard-00001.parquet belongs to other trajectories"):
        loader(config(copied), seq_len=SEQ)
    (copied / "manifest.json").write_text(json.dumps({**manifest, "result": None}))
    with pytest.raises(UserError, match="is not complete"):
        loader(config(copied), seq_len=SEQ)
    (copied / "manifest.json").unlink()
    with pytest.raises(UserError, match="has no manifest.json"):
        loader(config(copied), seq_len=SEQ)


def test_steps_that_do_not_fit_the_response_are_refused(tmp_path):
    for i, steps in enumerate([[1], [1, 0]]):
        made_up_set(
            tmp_path / str(i), [Trajectory(0, [1], [2, 3], steps, 2, None)], tokenizer=byte_tokenizer()
        )
        with pytest.raises(UserError, match="a damaged trajectory: 2 tokens"):
            list(loader(config(tmp_path / str(i)), seq_len=SEQ))


def test_another_tokenizer_is_refused(folder):
    changed = byte_tokenizer()
    changed.core.roles = {**changed.core.roles, "eos": None}
    with pytest.raises(UserError, match="was made with another tokenizer"):
        loader(config(folder), seq_len=SEQ, tokenizer=changed)
    masked = Tokenizer.Config(kind="byte", mask_token_id=263).build(tokenizer_path="")
    loader(config(folder), seq_len=SEQ, tokenizer=masked)


# --- check -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path, int]:
    """A set, its backbone and its mask token."""
    root = tmp_path_factory.mktemp("check")
    loaded = load(write_checkpoint(root / "ckpt"))
    make_set(loaded, root / "set")
    return (
        root / "set",
        root / "ckpt",
        json.loads((root / "set" / "manifest.json").read_text())["identity"]["recipe"]["mask_id"],
    )


def run_config(folder: Path, initial: Path | str = "", *, flavor: str = "llada-debug"):
    register()
    found = default_config({"name": "mdlm"})
    found.model.name, found.model.flavor = "mdlm", flavor
    found.dataloader = config(folder)
    found.checkpoint.initial_load_path = str(initial)
    return found


def test_a_run_that_fits_passes(made):
    folder, checkpoint, mask_id = made
    for initial in (checkpoint, "", checkpoint.parent / "gone"):
        run = run_config(folder, initial)
        for one in trajectories.folders(run):
            trajectories.check(run, one, mask_id=mask_id)


def test_a_run_with_another_backbone_or_mask_is_refused(made, tmp_path, monkeypatch):
    folder, checkpoint, mask_id = made
    with pytest.raises(UserError, match=f"mask token {mask_id}, this run's is 9"):
        trajectories.check(run_config(folder, checkpoint), folder, mask_id=9)
    with pytest.raises(UserError, match="by a llada backbone of .* is a dream one of"):
        trajectories.check(run_config(folder, flavor="dream-debug"), folder, mask_id=mask_id)
    other = write_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="made by another backbone .* than .checkpoint. initial_load_path"):
        trajectories.check(run_config(folder, other), folder, mask_id=mask_id)
    # One rank reads the weights.
    monkeypatch.setenv("RANK", "1")
    trajectories.check(run_config(folder, other), folder, mask_id=mask_id)


def test_a_run_with_another_tokenizer_is_refused(made, monkeypatch):
    folder, checkpoint, mask_id = made
    build = Tokenizer.Config.build

    def changed(self, **options):
        found = build(self, **options)
        found.core.roles = {**found.core.roles, "bos": None}
        return found

    monkeypatch.setattr(Tokenizer.Config, "build", changed)
    with pytest.raises(UserError, match="was made with another tokenizer"):
        trajectories.check(run_config(folder, checkpoint), folder, mask_id=mask_id)


def test_the_folders_of_a_run(tmp_path):
    run = run_config(tmp_path)
    assert trajectories.folders(run) == [tmp_path]
    run.validator.enable, run.validator.dataloader = True, config(tmp_path / "b")
    assert trajectories.folders(run) == [tmp_path, tmp_path / "b"]
    run.dataloader.sources = [
        Source(dataset="trajectories", dataset_path="a"),
        Source(dataset="trajectories", dataset_path="b"),
    ]
    run.validator.enable = False
    assert trajectories.folders(run) == [Path("a"), Path("b")]
    run.dataloader.sources[1].dataset = "stdlib"
    with pytest.raises(UserError, match="from trajectories alone: got dataset = 'stdlib'"):
        trajectories.folders(run)
