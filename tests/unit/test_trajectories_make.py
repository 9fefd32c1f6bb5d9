"""Making trajectories: each is what the model does, and the files do not depend on who made them or when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.test_trajectories_common import (
    contents,
    load,
    make_set,
    recipe_of,
    task_prompts,
    trajectories_of,
    write_checkpoint,
)
from torchtitan_ext.checkpoint.load import LoadedModel
from torchtitan_ext.data.tasks import TaskSource
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.tasks import task_of_run
from torchtitan_ext.trajectories import make, shards
from torchtitan_ext.trajectories.prompts import Prompts

LENGTH, BLOCK, COUNT, SHARD = 6, 4, 8, 3


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    return load(write_checkpoint(tmp_path_factory.mktemp("backbone")))


@pytest.fixture(scope="module")
def reference(loaded, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "set"
    make_set(loaded, folder)
    return folder


def test_each_step_reveals_one_token_and_blocks_come_in_order(reference):
    found = trajectories_of(reference)
    assert [one.index for one in found] == list(range(COUNT))
    assert len({tuple(one.response) for one in found}) > 1
    for one in found:
        assert sorted(one.reveal_step) == list(range(1, LENGTH + 1)) and one.steps == LENGTH
        assert max(one.reveal_step[:BLOCK]) < min(one.reveal_step[BLOCK:])
    # Not simply from left to right.
    assert any(one.reveal_step != sorted(one.reveal_step) for one in found)


@torch.no_grad()
def test_every_step_is_the_most_confident_token_of_the_block_given_those_before(loaded, reference):
    mask_id = make.denoiser_of(loaded).mask_id
    for one in trajectories_of(reference)[:3]:
        start = len(one.prompt)
        for step in range(1, LENGTH + 1):
            shown = [
                token if at < step else mask_id
                for token, at in zip(one.response, one.reveal_step, strict=True)
            ]
            row = torch.tensor([[*one.prompt, *shown]])
            positions = torch.arange(row.shape[1])[None]
            logits = loaded.model(row, positions, loaded.model.get_attention_masks(positions))[0, start:]
            logits[:, mask_id] = -torch.inf
            confidence, tokens = logits.softmax(-1).max(-1)
            hidden = [i for i in range(LENGTH) if shown[i] == mask_id]
            active = [i for i in hidden if i // BLOCK == hidden[0] // BLOCK]
            best = max(active, key=lambda i: confidence[i])
            assert one.reveal_step[best] == step and one.response[best] == tokens[best]


def test_prompts_are_the_samples_of_the_task_and_answers_are_judged(loaded, reference):
    task, _ = task_of_run("chain_sum", loaded.config)
    source = TaskSource(task, seed=0, split="train")
    found = trajectories_of(reference)
    for i, one in enumerate(found):
        assert loaded.tokenizer.decode(one.prompt) == source.read(i)["prompt"]
        said = loaded.tokenizer.decode(one.response[: one.length]).strip()
        assert one.right == (said == source.read(i)["answer"].strip())


def test_what_follows_a_stop_token_stays(loaded, tmp_path):
    """With a common token as the stop token, only ``length`` and the judge's view change."""
    prompts = task_prompts(loaded)
    make_set(loaded, tmp_path / "plain", prompts=prompts, stop_ids=[])
    plain = trajectories_of(tmp_path / "plain")
    assert all(one.length == LENGTH for one in plain)
    stop = plain[0].response[2]
    seen = {}
    judged = Prompts(
        tokens=prompts.tokens,
        description=prompts.description,
        judge=lambda i, answer: seen.setdefault(i, list(answer)) == answer and i % 2 == 0,
    )
    result = make_set(loaded, tmp_path / "stopped", prompts=judged, stop_ids=[stop])
    ended = 0
    for one, whole in zip(trajectories_of(tmp_path / "stopped"), plain, strict=True):
        assert one.response == whole.response and one.reveal_step == whole.reveal_step
        first = whole.response.index(stop) + 1 if stop in whole.response else LENGTH
        assert one.length == first and seen[one.index] == one.response[:first]
        assert one.right == (one.index % 2 == 0)
        ended += stop in whole.response
    assert result["ended"] == ended > 0
    assert (result["right"], result["accuracy"]) == (4, 0.5)


def test_the_manifest_says_what_the_set_is(loaded, reference):
    manifest = json.loads((reference / "manifest.json").read_text())
    identity, result = manifest["identity"], manifest["result"]
    assert identity["count"] == COUNT and identity["prompts"]["source"] == "chain_sum"
    assert identity["prompts"]["max_terms"] == 3
    assert identity["recipe"]["response_length"] == LENGTH and identity["recipe"]["block_size"] == BLOCK
    assert identity["backbone"]["parameters"] == sum(p.numel() for p in loaded.model.parameters())
    lengths = [len(one.prompt) + LENGTH for one in trajectories_of(reference)]
    assert (result["shortest"], result["longest"]) == (min(lengths), max(lengths))
    assert result["trajectories"] == COUNT and result["shards"] == 3 and result["steps"] == LENGTH
    right = [one.right for one in trajectories_of(reference)]
    assert result["right"] == sum(right) and result["accuracy"] == sum(right) / COUNT


# --- the same files --------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_any_batch_size_gives_the_same_files(loaded, reference, tmp_path, batch_size):
    make_set(loaded, tmp_path / "set", batch_size=batch_size)
    assert contents(tmp_path / "set") == contents(reference)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_any_number_of_workers_gives_the_same_files(loaded, reference, tmp_path, world):
    prompts, recipe, identities = task_prompts(loaded), recipe_of(loaded), []
    for rank in reversed(range(world)):
        before = set(tmp_path.glob("shard-*"))
        identities.append(
            make.make(loaded, prompts, tmp_path, recipe=recipe, batch_size=2, rank=rank, world=world)
        )
        new = {path.name for path in set(tmp_path.glob("shard-*")) - before}
        assert new == {f"shard-{i:05d}.parquet" for i in range(rank, 3, world)}
    make.finish(tmp_path, identities[0])
    assert contents(tmp_path) == contents(reference)


def test_the_seed_chooses_the_prompts(loaded, reference, tmp_path):
    prompts = task_prompts(loaded, seed=1)
    make_set(loaded, tmp_path / "set", prompts=prompts)
    ours, theirs = trajectories_of(tmp_path / "set"), trajectories_of(reference)
    assert [one.prompt for one in ours] != [one.prompt for one in theirs]


class Killed(BaseException):
    pass


def test_a_stopped_run_goes_on_and_decodes_nothing_twice(loaded, reference, tmp_path, monkeypatch):
    decoded, limit = [], 2
    generate = make.generate

    def counted(model, prompts, **options):
        if len(decoded) == limit:
            raise Killed
        decoded.append(len(prompts))
        return generate(model, prompts, **options)

    monkeypatch.setattr(make, "generate", counted)
    folder = tmp_path / "set"
    with pytest.raises(Killed):
        make_set(loaded, folder, batch_size=3)
    assert set(contents(folder)) == {"manifest.json", "shard-00000.parquet", "shard-00001.parquet"}
    assert json.loads((folder / "manifest.json").read_text())["result"] is None
    # What a kill in the middle of writing leaves over.
    (folder / ".shard-00002.parquet.tmp").write_bytes(b"half")
    limit = 99
    make_set(loaded, folder, batch_size=3)
    assert decoded == [3, 3, 2]
    make_set(loaded, folder, batch_size=3)
    assert decoded == [3, 3, 2]
    assert contents(folder) == contents(reference)


def test_a_missing_shard_is_made_again(loaded, reference, tmp_path):
    folder = tmp_path / "set"
    make_set(loaded, folder)
    shards.shard_path(folder, 1).unlink()
    identity = shards.read_manifest(folder)["identity"]
    with pytest.raises(UserError, match="shard-00001.parquet is missing"):
        make.finish(folder, identity)
    make_set(loaded, folder)
    assert contents(folder) == contents(reference)


def test_a_failed_write_leaves_nothing(loaded, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.os, "fsync", full)
    with pytest.raises(UserError, match="manifest.json cannot be written: No space left on device"):
        make_set(loaded, tmp_path)
    assert contents(tmp_path) == {}


# --- refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"response_length": 7}, "recipe.response_length is 6 there, 7 now"),
        ({"block_size": 2}, "recipe.block_size is 4 there, 2 now"),
        ({"shard_size": 4}, "recipe.shard_size is 3 there, 4 now"),
        ({"dtype": "bfloat16"}, "recipe.dtype is float32 there, bfloat16 now"),
        ({"response_length": 7, "block_size": 2, "shard_size": 4, "dtype": "x"}, "and 1 more"),
    ],
)
def test_other_settings_are_refused(loaded, reference, changes, message):
    before = contents(reference)
    with pytest.raises(UserError, match=message):
        make_set(loaded, reference, **changes)
    assert contents(reference) == before


def test_other_prompts_are_refused(loaded, reference):
    with pytest.raises(UserError, match="count is 8 there, 7 now; prompts.digest is"):
        make_set(loaded, reference, prompts=task_prompts(loaded, count=7))
    with pytest.raises(UserError, match="prompts.seed is 0 there, 3 now"):
        make_set(loaded, reference, prompts=task_prompts(loaded, seed=3))


def test_another_backbone_is_refused(reference, tmp_path):
    other = load(write_checkpoint(tmp_path / "other", seed=1))
    with pytest.raises(UserError, match="backbone.fingerprint is .* there, .* now"):
        make_set(other, reference)


def test_a_shard_of_another_set_is_refused(loaded, reference, tmp_path):
    """Also where the manifest is gone."""
    tmp_path.joinpath("shard-00001.parquet").write_bytes((reference / "shard-00001.parquet").read_bytes())
    with pytest.raises(UserError, match="shard-00001.parquet belongs to other trajectories"):
        make_set(loaded, tmp_path, block_size=2)
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.joinpath("shard-00002.parquet").write_bytes((reference / "shard-00001.parquet").read_bytes())
    with pytest.raises(UserError, match="holds 3 trajectories, expected 2"):
        make_set(loaded, tmp_path)


def test_damaged_files_are_refused(loaded, reference, tmp_path):
    path = shards.shard_path(tmp_path, 0)
    path.write_bytes((reference / path.name).read_bytes()[:-20])
    with pytest.raises(UserError, match="shard-00000.parquet: not a readable shard"):
        make_set(loaded, tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json cannot be read"):
        make_set(loaded, tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 99}')
    with pytest.raises(UserError, match=r"no manifest of trajectories of version 1 \(got version 99\)"):
        make_set(loaded, tmp_path)


def test_prompts_that_cannot_be_answered_are_refused(loaded, tmp_path):
    mask_id = make.denoiser_of(loaded).mask_id
    for tokens, message in [
        ([[5], [6, mask_id]], f"prompt 1 holds the mask token {mask_id}"),
        ([[5] * 2043], "longer than the 2048 tokens allowed"),
    ]:
        prompts = Prompts(tokens=tokens, description={"source": "test"})
        with pytest.raises(UserError, match=message):
            make_set(loaded, tmp_path, prompts=prompts)
    assert not list(tmp_path.glob("shard*"))
    starts = make.checked([[], [4]], recipe=recipe_of(loaded), bos_id=9)
    assert starts == [[9], [4]]
    with pytest.raises(UserError, match="prompt 0 is empty, and the tokenizer has no BOS"):
        make.checked([[]], recipe=recipe_of(loaded), bos_id=None)
