"""Which checkpoints are whole, which may go, and what a kill between two renames leaves."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer.base import MODEL, ModelWrapper

from torchtitan_ext.checkpoint import manager, whole
from torchtitan_ext.errors import UserError

KINDS = ("whole", "cut", "left-over")


def make(folder: Path, kind: str, mark: str = "") -> Path:
    """A Hugging Face step folder that is whole, whose file is cut short, or without an index."""
    folder.mkdir(parents=True)
    save_file({"a": torch.zeros(8)}, folder / "model.safetensors", {"mark": mark})
    if kind == "cut":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-4])
    if kind != "left-over":
        index = {"weight_map": {"a": "model.safetensors"}}
        (folder / whole.HF_INDEX).write_text(json.dumps(index))
    return folder


def mark(folder: Path) -> str:
    header = (folder / "model.safetensors").read_bytes()[8:]
    return json.JSONDecoder().raw_decode(header.decode(errors="replace"))[0]["__metadata__"]["mark"]


def test_damage_of_a_hugging_face_folder(tmp_path):
    assert whole.damage(make(tmp_path / "step-1", "whole")) is None
    assert "bytes of" in whole.damage(make(tmp_path / "step-2", "cut"))
    assert "did not finish" in whole.damage(make(tmp_path / "step-3", "left-over"))
    missing = make(tmp_path / "step-4", "whole")
    (missing / "model.safetensors").unlink()
    assert "model.safetensors is missing" in whole.damage(missing)
    header = make(tmp_path / "step-5", "whole")
    (header / "model.safetensors").write_bytes(b"\x10")
    assert "header of its file model.safetensors" in whole.damage(header)
    index = make(tmp_path / "step-6", "whole")
    (index / whole.HF_INDEX).write_text('{"weight_ma')
    assert "index.json cannot be read" in whole.damage(index)


@settings(deadline=None, max_examples=40)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=7),
    keep=st.sampled_from([0, 2, 3]),
    data=st.data(),
)
def test_what_may_go(tmp_path_factory, kinds, keep, data):
    folder = tmp_path_factory.mktemp("run")
    for step, kind in enumerate(kinds):
        make(folder / f"step-{step}", kind)
    wholes = [step for step, kind in enumerate(kinds) if kind == "whole"]
    if not wholes:
        return
    published = data.draw(st.sampled_from(wholes))
    going = [int(path.name[5:]) for path in whole.superfluous(folder, keep=keep, published=published)]
    left = [step for step in wholes if step not in going]
    assert published in left
    assert len(left) >= min(keep or len(wholes), len(wholes))
    if keep:
        # The newest whole ones stay; one more stays where the published one is older than they are.
        assert set(wholes[-keep:]) <= set(left) and len(left) <= keep + 1
        assert len(left) == keep or published not in wholes[-keep:] or len(wholes) < keep
    # Left-overs always go, damaged ones only with age.
    assert {step for step, kind in enumerate(kinds) if kind == "left-over"} <= set(going)
    if not keep:
        assert not [step for step in going if kinds[step] == "cut"]
    assert going == sorted(going)


@pytest.mark.parametrize("killed", ["after setting aside", "while writing", "after writing", "not"])
def test_a_step_that_is_saved_again_is_never_lost(killed, tmp_path):
    step = make(tmp_path / "step-5", "whole", "old")
    whole.set_aside(step)
    assert not step.exists()
    if killed == "while writing":
        make(step, "left-over", "new")
    elif killed != "after setting aside":
        make(step, "whole", "new")
    whole.bring_back(tmp_path)
    assert whole.damage(step) is None
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in whole.doomed(tmp_path)} == {
        "step-5"
    }
    assert (whole.doomed(tmp_path) == []) == (killed == "after setting aside")
    assert mark(step) == ("new" if killed in ("after writing", "not") else "old")


def test_an_earlier_attempt_leaves_no_file(tmp_path):
    step = make(tmp_path / "step-5", "cut")
    (step / ".metadata").touch()
    whole.set_aside(step)
    assert not list(tmp_path.iterdir())
    whole.set_aside(tmp_path / "step-6")  # there is nothing to do


def test_a_folder_that_goes_is_no_step_any_more(tmp_path):
    gone = [whole.doom(make(tmp_path / "step-3", "whole")) for _ in range(2)]
    assert whole.steps(tmp_path) == [] and len(set(gone)) == 2
    assert whole.doomed(tmp_path) == sorted(gone)
    assert whole.doomed(tmp_path / "nowhere") == []


def test_a_save_that_cannot_begin_keeps_what_is_there(tmp_path):
    """The folder could not be set aside: an undo must not take it for the save that failed."""
    step = make(tmp_path / "step-5", "whole", "old")
    object.__new__(manager.ExtCheckpointManager)._undo(step)
    assert mark(step) == "old"
    shutil.rmtree(step)
    make(step, "left-over")
    object.__new__(manager.ExtCheckpointManager)._undo(step)
    assert not step.exists()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is memory to pin")
def test_pinned_memory_needs_an_accelerator():
    config = manager.ExtCheckpointManager.Config(enable=True, async_mode="async_with_pinned_mem")
    with pytest.raises(UserError, match="'async_with_pinned_mem' needs an accelerator.*'disabled', 'async'"):
        manager.ExtCheckpointManager(config)


def test_a_folder_that_is_no_checkpoint_is_told_from_a_damaged_one(tmp_path):
    """A run's folder, and a Hugging Face folder without initial_load_in_hf, are the usual slips."""
    check = object.__new__(manager.ExtCheckpointManager)._check_native
    run, hub = tmp_path / "run", tmp_path / "hub"
    make(run / "checkpoint" / "step-5", "whole")
    make(run / "checkpoint" / "step-10", "left-over")
    make(hub, "left-over")  # a small one has no index
    newest = run / "checkpoint" / "step-5"
    for folder in (run, run / "checkpoint"):
        with pytest.raises(UserError, match=f"no checkpoint but holds some: the newest is {newest}"):
            check({}, folder, resumed=False)
    with pytest.raises(UserError, match="a Hugging Face folder: it needs .* initial_load_in_hf = true"):
        check({}, hub, resumed=False)
    with pytest.raises(UserError, match="step-10 cannot be loaded: it has no .metadata"):
        check({}, run / "checkpoint" / "step-10", resumed=False)


def test_weights_may_lie_beside_the_tokenizer(caplog):
    """As torchtitan has it: without initial_load_path they come from hf_assets_path."""
    config = manager.ExtCheckpointManager.Config(enable=True, initial_load_in_hf=True)
    assert config.initial_load_in_hf and config.initial_load_model_only and not caplog.records
    with pytest.raises(ValueError, match="requires initial_load_model_only"):
        manager.ExtCheckpointManager.Config(initial_load_in_hf=True, initial_load_model_only=False)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_room_that_a_checkpoint_needs(frozen, monkeypatch, tmp_path):
    """Frozen weights have no optimizer moments: a run whose checkpoint fits is not refused."""
    model = torch.nn.Linear(300, 100)
    model.weight.requires_grad_(not frozen)
    own: Any = object.__new__(manager.ExtCheckpointManager)
    own.folder, own.states = str(tmp_path), {MODEL: ModelWrapper(model)}
    needed = 4 * (300 * 100 * (1 if frozen else 3) + 100 * 3)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    own._check_free_disk()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match="no disk space for a checkpoint"):
        own._check_free_disk()


def refused(cause: BaseException, *, full: bool, monkeypatch: Any, folder: Path) -> str | None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0 if full else 2**40))
    failure = CheckpointException("save", {3: (cause, None)})  # pyrefly: ignore
    return manager._refused_write(failure, folder)


def test_what_a_failed_save_says(monkeypatch, tmp_path):
    """torch.save hides a full disk behind an error of its archive writer."""
    hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    cases = [
        (OSError(errno.ENOSPC, "No space left on device"), False, "no disk space left on rank 3"),
        (OSError(errno.EACCES, "Permission denied"), False, "Permission denied on rank 3"),
        (hidden, True, "no disk space left on rank 3"),
        (hidden, False, "a write failed (disk full, quota or I/O error) on rank 3"),
        (RuntimeError("a bug"), True, None),
    ]
    for cause, full, expected in cases:
        assert refused(cause, full=full, monkeypatch=monkeypatch, folder=tmp_path) == expected
    assert manager._refused_write(OSError(errno.ENOSPC, "full"), tmp_path) == "no disk space left"
