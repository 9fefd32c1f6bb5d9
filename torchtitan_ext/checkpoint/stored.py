"""Tensors of a DCP folder for an export, a few at a time.

DCP reads an item of a file into a new tensor and copies that into the one to be loaded. A tensor that
one item holds whole, as in the checkpoint of one process, is mapped from the file instead.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from torchtitan_ext.checkpoint import whole

_PIECE = 2**20
"""Values that are converted at a time."""


class StoredTensors:
    """The tensors of a checkpoint folder, whose metadata are read once."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        metadata = whole.read_metadata(checkpoint)
        self.entries: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        # One mapping a file: each keeps a descriptor open, and there may be more tensors than a process
        # may have of these.
        self._pages: dict[str, mmap.mmap] = {}

    def load(self, names: Iterable[str], *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """The named tensors. ``dtype``: that they are converted to; None: each keeps its own.

        For writing them to a file: a mapped tensor is read-only and may lie at an odd address.
        """
        tensors = {name: self._whole(name, dtype=dtype) for name in names}
        loaded = {
            name: torch.empty(self.entries[name].size, dtype=dtype or self.entries[name].properties.dtype)
            for name, tensor in tensors.items()
            if tensor is None
        }
        if loaded:
            with warnings.catch_warnings():
                # One process without a process group is what is meant here.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(loaded, checkpoint_id=self.checkpoint, no_dist=True)
        return {name: loaded[name] if tensor is None else tensor for name, tensor in tensors.items()}

    def _whole(self, name: str, *, dtype: torch.dtype | None) -> torch.Tensor | None:
        """The tensor of one item; None where there are several."""
        mapped = self.mapped(name)
        if mapped is None or dtype is None or dtype == mapped.dtype:
            return mapped
        return _converted(mapped, dtype)

    def mapped(self, name: str) -> torch.Tensor | None:
        """The tensor, mapped; None where it must be put together from several items, or decoded."""
        entry = self.entries[name]
        if len(entry.chunks) != 1 or not entry.size.numel():
            return None
        place = self._places[MetadataIndex(name, entry.chunks[0].offsets)]
        if place.transform_descriptors:
            return None
        with (self.checkpoint / place.relative_path).open("rb") as file:
            item: Any = _create_file_view(file, place.offset, place.length)
            described = torch.load(item, map_location="meta", weights_only=True)
            if described.shape != entry.size or not described.is_contiguous():
                return None
            # Without data, torch.load says where in the item they lie.
            within: Any = described.untyped_storage()._checkpoint_offset
            first = place.offset + within + described.storage_offset() * described.itemsize
            if place.relative_path not in self._pages:
                self._pages[place.relative_path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        pages = self._pages[place.relative_path]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(pages, dtype=described.dtype, count=described.numel(), offset=first)
        return flat.view(described.shape)


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of a mapped tensor in another dtype, without a whole one in its own beside it."""
    converted = torch.empty(tensor.numel(), dtype=dtype)
    # As bytes: at an odd address nothing but copying them is defined.
    pieces = tensor.view(-1).view(torch.uint8).split(_PIECE * tensor.itemsize)
    for target, piece in zip(converted.split(_PIECE), pieces, strict=True):
        target.copy_(piece.clone().view(tensor.dtype))
    return converted.view(tensor.shape)
