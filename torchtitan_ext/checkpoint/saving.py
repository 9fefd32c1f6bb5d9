"""Weights as a DCP checkpoint of one process, written by several threads."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.futures import Future

from torchtitan_ext.checkpoint import hf_folder

_THREADS = 3
"""Files that are written at once: while one thread waits for the disk, another fills the page cache."""


def save_weights(state_dict: dict[str, torch.Tensor], folder: Path) -> None:
    """Write tensors as a DCP checkpoint of one process.

    Errors: CheckpointException with what a thread met, for example on a full disk; no ``.metadata`` then.
    """
    nbytes = sum(tensor.nbytes for tensor in state_dict.values())
    with (
        warnings.catch_warnings(),
        _no_checksums(),
        hf_folder.growing(folder, nbytes=nbytes, what="writing checkpoint"),
    ):
        # Without a process group, which is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(state_dict, storage_writer=_Writer(folder), no_dist=True)
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if not isinstance(failure, Exception):  # Ctrl-C or a SIGTERM, which DCP wraps as well
                    raise failure from None
            raise


class _Writer(FileSystemWriter):
    """DCP's, a part of the tensors in each thread.

    Its own ``thread_count`` would do the same, but it does not ask its threads whether they failed:
    what they did not write would be missing from the checkpoint without a word.
    """

    def __init__(self, folder: Path) -> None:
        # The copies ahead are for tensors on a device, and make a stream for each thread.
        super().__init__(folder, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """What was written, when all parts are. Errors: the first cause of what a thread met."""
        prefix = plan.storage_data.prefix
        parts = [
            replace(plan, items=items, storage_data=replace(plan.storage_data, prefix=f"{prefix}{i}_"))
            for i, items in enumerate(_parts(plan.items))
        ]
        write = super().write_data
        with ThreadPoolExecutor(_THREADS) as pool:
            running = [pool.submit(write, part, planner) for part in parts]
        try:
            results = [result for one in running for result in one.result().wait()]
        except Exception as error:
            raise _cause(error) from None
        written: Future[Any] = Future()
        written.set_result(results)
        return written


def _parts(items: list[WriteItem]) -> list[list[WriteItem]]:
    """The items in parts of about the same number of bytes, none of them empty."""
    parts: list[list[WriteItem]] = [[] for _ in range(_THREADS)]
    sizes = [0] * _THREADS
    for item in sorted(items, key=_nbytes, reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(item)
        sizes[least] += _nbytes(item)
    return [part for part in parts if part]


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _cause(error: BaseException) -> BaseException:
    """What came first: on a full disk torch.save ends with an error of its own, "unexpected pos"."""
    while error.__context__ is not None:
        error = error.__context__
    return error


@contextmanager
def _no_checksums() -> Generator[None]:
    """Without the checksums of torch.save, which neither torch.load nor DCP compares."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
