"""Which checkpoints are whole.

DCP writes ``.metadata`` last, so a save that was killed has none. A file that
was cut short afterwards is found by comparing its size with the extents that
the metadata records.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

STEP_FOLDER = re.compile(r"step-(\d+)$")


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of a checkpoint folder."""
    return FileSystemReader(folder).read_metadata()


def damage(folder: Path) -> str | None:
    """Why a checkpoint folder cannot be loaded, or None if it is whole."""
    if not (folder / ".metadata").is_file():
        if (folder / "model.safetensors.index.json").is_file():
            return None
        return "it has no .metadata (its save did not finish)"
    try:
        metadata = read_metadata(folder)
    except Exception as error:  # unpickling a cut file raises any of a dozen types; the reason is reported
        return f"its .metadata cannot be read ({type(error).__name__})"
    extents: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        extents[info.relative_path] = max(extents.get(info.relative_path, 0), end)
    for name, needed in sorted(extents.items()):
        file = folder / name
        if not file.is_file():
            return f"its file {name} is missing"
        if file.stat().st_size < needed:
            return f"its file {name} has {file.stat().st_size} bytes of {needed}"
    return None


def steps(folder: Path) -> list[int]:
    """Step numbers of the ``step-N`` folders, newest first."""
    if not folder.is_dir():
        return []
    matches = (STEP_FOLDER.match(child.name) for child in folder.iterdir() if child.is_dir())
    return sorted((int(m[1]) for m in matches if m), reverse=True)


def newest_whole(folder: Path) -> tuple[int, list[tuple[int, str]]]:
    """The newest whole step (-1 if none) and the newer ones passed over, each with its reason."""
    skipped = []
    for step in steps(folder):
        reason = damage(folder / f"step-{step}")
        if reason is None:
            return step, skipped
        skipped.append((step, reason))
    return -1, skipped
