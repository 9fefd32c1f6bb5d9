"""Weights that several threads write are all there, or the save fails."""

from __future__ import annotations

import errno
import io
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_ext.checkpoint import saving, whole
from torchtitan_ext.checkpoint.hf_folder import replaced_folder
from torchtitan_ext.checkpoint.stored import StoredTensors
from torchtitan_ext.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def tensors(numbers: list[int], *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(n).to(dtype) for i, n in enumerate(numbers)}


@settings(max_examples=20, deadline=None)
@given(numbers=st.lists(st.integers(0, 300), min_size=1, max_size=9), dtype=st.sampled_from(DTYPES))
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, numbers, dtype):
    folder = tmp_path_factory.mktemp("saved")
    saved = tensors(numbers, dtype=dtype)
    saving.save_weights(saved, folder)
    assert whole.damage(folder) is None
    mapped = StoredTensors(folder).load(saved)
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in saved.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    for name, tensor in saved.items():
        assert torch.equal(mapped[name], tensor) and torch.equal(loaded[name], tensor)


class Disk:
    """Lets so many bytes of tensors through, and then is full."""

    def __init__(self, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.threads, self.lock = room, set(), threading.Lock()
        disk = self

        class File(io.FileIO):
            def write(self, data):
                with disk.lock:
                    disk.threads.add(threading.current_thread())
                    disk.room -= len(data) if Path(self.name).suffix == ".distcp" else 0
                    if disk.room < 0:
                        raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data)

        monkeypatch.setattr(Path, "open", lambda path, mode="r": File(path, mode.replace("b", "")))


@pytest.mark.parametrize("room", [0, 20_000, 40_000, 60_000, 79_000])
def test_a_disk_that_fills_up_fails_the_save_whichever_thread_meets_it(tmp_path, monkeypatch, capfd, room):
    disk = Disk(room, monkeypatch)
    with pytest.raises(CheckpointException, match="No space left"):
        saving.save_weights(tensors([2_500] * 8), tmp_path)
    assert not (tmp_path / ".metadata").exists() and whole.damage(tmp_path) is not None
    assert not [thread for thread in disk.threads - {threading.current_thread()} if thread.is_alive()]
    assert "Traceback" not in capfd.readouterr().err


def test_there_it_is_one_line_and_no_folder(tmp_path, monkeypatch):
    Disk(30_000, monkeypatch)
    target = tmp_path / "out"
    with (
        pytest.raises(UserError, match=r"out was not written: .*No space left on device$"),
        replaced_folder(target, marker="done") as folder,
    ):
        saving.save_weights(tensors([2_500] * 8), folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".distcp", ".tmp"])
@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_sigterm_end_the_save_as_what_they_are(tmp_path, monkeypatch, suffix, signal):
    opened = Path.open

    def interrupted(path, *args, **kwargs):
        if path.suffix == suffix:
            raise signal(143)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", interrupted)
    target = tmp_path / "out"
    with pytest.raises(signal), replaced_folder(target, marker="done") as folder:
        saving.save_weights(tensors([2_500] * 8), folder)
    assert list(tmp_path.iterdir()) == []


def test_several_threads_write_at_once(tmp_path, monkeypatch):
    together = threading.Barrier(saving._THREADS, timeout=60)
    opened = Path.open

    def meet(path, *args, **kwargs):
        if path.suffix == ".distcp":
            together.wait()  # raises where fewer than all files are opened before the first is written
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", meet)
    saving.save_weights(tensors([2_500] * 8), tmp_path)
    assert len(list(tmp_path.glob("*.distcp"))) == saving._THREADS


def test_parts_weigh_about_the_same(tmp_path):
    saving.save_weights(tensors([64_000, 16_000, 16_000, 16_000, 64_000, 64_000]), tmp_path)
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert sizes[0] >= 256_000 and sizes[-1] < 1.05 * sizes[0]


def test_reading_them_takes_a_descriptor_a_file_and_not_a_tensor(tmp_path):
    saved = tensors([3] * 100)
    saving.save_weights(saved, tmp_path)
    before = len(os.listdir("/dev/fd"))
    stored = StoredTensors(tmp_path)
    loaded = stored.load(saved)
    assert len(os.listdir("/dev/fd")) - before <= saving._THREADS
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
