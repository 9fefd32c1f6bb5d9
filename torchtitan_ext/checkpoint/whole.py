"""Which checkpoints are whole, and which may go.

DCP writes ``.metadata`` last and a Hugging Face save its index, so a save that
was killed has neither. A file that was cut short afterwards is found by
comparing its size with the extents that the metadata records.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

STEP_FOLDER = re.compile(r"step-(\d+)$")
HF_INDEX = "model.safetensors.index.json"
ASIDE = "replaced-"
"""``replaced-N`` is the whole ``step-N`` of an earlier save while a new one of the same step is written."""
DOOMED = "removing-"
"""A folder about to be deleted, under a name that no save and no load uses."""


def read_metadata(folder: Path) -> Metadata:
    """DCP's metadata of a checkpoint folder."""
    return FileSystemReader(folder).read_metadata()


def finished(folder: Path) -> bool:
    """Whether the save of a checkpoint folder came to its end."""
    return (folder / ".metadata").is_file() or (folder / HF_INDEX).is_file()


def damage(folder: Path) -> str | None:
    """Why a checkpoint folder cannot be loaded, or None if it is whole."""
    if not finished(folder):
        return "it has no .metadata (its save did not finish)"
    if not (folder / ".metadata").is_file():
        return _hf_damage(folder)
    try:
        metadata = read_metadata(folder)
    except Exception as error:  # unpickling a cut file raises any of a dozen types; the reason is reported
        return f"its .metadata cannot be read ({type(error).__name__})"
    extents: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        extents[info.relative_path] = max(extents.get(info.relative_path, 0), end)
    return _short_file(folder, extents)


def _hf_damage(folder: Path) -> str | None:
    """What a folder of safetensors lacks of what its index and the files' own headers promise."""
    try:
        names = set(json.loads((folder / HF_INDEX).read_text())["weight_map"].values())
    except (ValueError, KeyError) as error:
        return f"its {HF_INDEX} cannot be read ({type(error).__name__})"
    extents = {}
    for name in names:
        if not (folder / name).is_file():
            return f"its file {name} is missing"
        try:
            extents[name] = _safetensors_size(folder / name)
        except (ValueError, KeyError) as error:
            return f"the header of its file {name} cannot be read ({type(error).__name__})"
    return _short_file(folder, extents)


def _safetensors_size(path: Path) -> int:
    """Bytes that a safetensors file must have, from its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return (
        8 + length + max((v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"), default=0)
    )


def _short_file(folder: Path, extents: dict[str, int]) -> str | None:
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


def superfluous(folder: Path, *, keep: int, published: int) -> list[Path]:
    """Step folders that may go now that ``step-<published>`` is whole, oldest first.

    Left-overs of saves that did not finish, and what is older than the newest
    ``keep`` whole checkpoints (0 keeps all). A damaged checkpoint does not
    count. ``published`` stays even where newer checkpoints of an earlier run
    lie beside it: it is what this run would resume from.
    """
    going, whole = [], 0
    for step in steps(folder):
        path = folder / f"step-{step}"
        if step == published:
            whole += 1
        elif not finished(path) or (keep and whole >= keep):
            going.append(path)
        elif damage(path) is None:
            whole += 1
    return going[::-1]


def doom(path: Path) -> Path:
    """Rename a folder that is to be deleted, and return its new name.

    Deleting takes a while. The folder is neither loaded half deleted, nor is a
    new save of the same step deleted in its place.
    """
    number = 0
    while (target := path.with_name(f"{DOOMED}{path.name}-{number}")).exists():
        number += 1
    return path.rename(target)


def doomed(folder: Path) -> list[Path]:
    """What was to be deleted and is still there."""
    return sorted(folder.glob(f"{DOOMED}*")) if folder.is_dir() else []


def set_aside(folder: Path) -> None:
    """Make room for a new save of a step; a whole checkpoint of it is kept until the new one is whole."""
    if not folder.exists():
        return
    if damage(folder) is None:
        aside = folder.with_name(f"{ASIDE}{folder.name.removeprefix('step-')}")
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    else:
        # An earlier attempt at the same step: none of its files may lie beside the new ones. Deleted
        # here and now, for the new save may need the room.
        shutil.rmtree(folder)


def bring_back(folder: Path) -> None:
    """Settle what :func:`set_aside` left in a folder of checkpoints: the newer save wins if it is whole.

    The loser is only renamed (:func:`doom`): deleting it may take longer than other ranks wait.
    """
    if not folder.is_dir():
        return
    for aside in folder.glob(f"{ASIDE}*"):
        step = folder / f"step-{aside.name.removeprefix(ASIDE)}"
        if step.exists() and damage(step) is None:
            doom(aside)
            continue
        if step.exists():
            doom(step)
        aside.rename(step)
