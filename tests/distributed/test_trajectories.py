"""Trajectories by several processes: the same bytes for any number, and after a kill."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.distributed.harness import run, start
from tests.unit.test_trajectories_common import contents, register, trajectories_of, write_checkpoint

COUNT, SHARD = 13, 2
SHARDS = -(-COUNT // SHARD)


def tool(
    checkpoint: str, out: str, batch_size: int = 4, slow: float = 0.0, args: tuple[str, ...] = ()
) -> str:
    """The tool as a worker runs it; its error, or an empty text. ``slow``: seconds of sleep in each batch."""
    from tools import make_trajectories
    from torchtitan_ext.errors import UserError
    from torchtitan_ext.trajectories import make

    register()
    generate = make.generate

    def slowed(*a, **k):
        time.sleep(slow)
        return generate(*a, **k)

    make.generate = slowed
    fixed = ["--prompts", "chain_sum", "--count", str(COUNT), "--response-length", "6", "--out", out]
    sizes = ["--shard-size", str(SHARD), "--batch-size", str(batch_size), "--device", "cpu"]
    try:
        make_trajectories.main([checkpoint, *fixed, *sizes, *args])
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("backbone")))


@pytest.fixture(scope="module")
def reference(checkpoint, tmp_path_factory) -> Path:
    """A set made by one process."""
    folder = tmp_path_factory.mktemp("reference") / "set"
    assert run(tool, world=1, checkpoint=checkpoint, out=str(folder)) == [""]
    return folder


def test_two_workers_make_the_files_of_one(checkpoint, reference, tmp_path):
    assert run(tool, world=2, checkpoint=checkpoint, out=str(tmp_path), batch_size=3) == ["", ""]
    assert contents(tmp_path) == contents(reference)
    assert len(contents(tmp_path)) == SHARDS + 1
    assert [one.index for one in trajectories_of(tmp_path)] == list(range(COUNT))


def kill_in_the_middle(processes, folder: Path) -> int:
    """SIGKILL all once some shards are there; how many are."""
    deadline = time.monotonic() + 120
    while len(list(folder.glob("shard-*"))) < 2:
        assert time.monotonic() < deadline and all(p.exitcode is None for p in processes)
        time.sleep(0.02)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        assert process.exitcode == -9
    return len(list(folder.glob("shard-*")))


def test_killed_in_the_middle_and_restarted_gives_the_same_files(checkpoint, reference, tmp_path):
    folder = tmp_path / "set"
    processes, _ = start(tool, world=2, checkpoint=checkpoint, out=str(folder), slow=0.5)
    there = kill_in_the_middle(processes, folder)
    assert 2 <= there < SHARDS
    kept = {path.name: os.stat(path).st_mtime_ns for path in folder.glob("shard-*")}
    assert run(tool, world=1, checkpoint=checkpoint, out=str(folder)) == [""]
    assert contents(folder) == contents(reference)
    assert {name: os.stat(folder / name).st_mtime_ns for name in kept} == kept


def test_every_worker_refuses_another_set(checkpoint, reference):
    before = contents(reference)
    errors = run(tool, world=2, checkpoint=checkpoint, out=str(reference), args=("--block-size", "3"))
    assert all("recipe.block_size is 4 there, 3 now" in error for error in errors)
    assert contents(reference) == before
