"""Hugging Face folders of safetensors: what they hold, and how they are written.

Reading lists tensors from the file headers; weights are mapped, not copied, until used.
Writing plans the shards from shapes alone, so that one shard at a time is in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException

from torchtitan_ext import progress
from torchtitan_ext.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9
"""Largest file of a written folder, in bytes."""

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes an export may be converted to."""

_STORED_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_COPY_ROWS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Where one tensor lies and what it looks like."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return _numel(self.shape) * self.dtype.itemsize


def read_weight_map(folder: str | Path) -> dict[str, str] | None:
    """Tensor -> file from the index of a sharded folder; None if there is no index."""
    path = Path(folder) / INDEX
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a safetensors index with a 'weight_map': {error!r}") from error
    return dict(weight_map)


def read_tensors(folder: str | Path) -> dict[str, TensorInfo]:
    """Every tensor of a folder, from headers only.

    Errors: no such folder, no safetensors in it (``pytorch_model.bin`` is named), a damaged or
    missing file, an index that disagrees with its files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    weight_map = read_weight_map(folder)
    files = sorted(set(weight_map.values())) if weight_map is not None else [_single_file(folder).name]
    found: dict[str, TensorInfo] = {}
    for name in files:
        for info in _read_header(folder / name):
            if info.name in found:
                raise UserError(f"{folder}: {info.name} is in both {found[info.name].file.name} and {name}")
            found[info.name] = info
    if weight_map is not None:
        absent = sorted(set(weight_map) - set(found))
        if absent:
            raise UserError(f"{folder / INDEX} lists {absent[0]} in {weight_map[absent[0]]}, which lacks it")
    return found


def check_against(adapter: Any, state_dict: Mapping[str, Any], folder: Path) -> None:
    """Refuse a folder whose tensors are not those of the model, before anything is loaded.

    ``adapter``: any state-dict adapter of torchtitan; ours check the whole model themselves.
    ``state_dict``: the model's tensors on this rank (a pipeline stage has a part).
    """
    if hasattr(adapter, "check_folder"):
        adapter.check_folder(folder)
        return
    found, expected = read_tensors(folder), adapter.to_hf(dict(state_dict))
    known = {re.escape(name).replace(r"\{\}", r"\d+") for name in getattr(adapter, "from_hf_map", {})}
    pattern = re.compile("|".join(known) or ".*")
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and not pattern.fullmatch(name)]
    refuse(missing, unexpected, where=str(folder))
    refuse_shapes(found, {name: tuple(tensor.shape) for name, tensor in expected.items()}, where=str(folder))


def refuse(missing: Iterable[str], unexpected: Iterable[str], *, where: str) -> None:
    """One line that lists the tensors which do not fit, if there are any."""
    lists = {"missing": sorted(missing), "unexpected": sorted(unexpected)}
    parts = [f"{kind} {listed(names)}" for kind, names in lists.items() if names]
    if parts:
        raise UserError(f"{where}: the tensors do not fit the model: {'; '.join(parts)}")


def refuse_shapes(
    found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], *, where: str
) -> None:
    """One line that lists the tensors of another shape, if there are any."""
    wrong = [
        f"{name}: got {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if wrong:
        raise UserError(f"{where}: shapes do not match the model: {listed(wrong)}")


def listed(names: Iterable[str], *, limit: int = 8) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def load_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor, mapped from its file: pages are read when used."""
    with safe_open(info.file, framework="pt") as file:
        return file.get_tensor(info.name)


def load_tensors(infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Tensors under the given names, mapped as by :func:`load_tensor`; each file is opened once."""
    tensors: dict[str, torch.Tensor] = {}
    for path in dict.fromkeys(info.file for info in infos.values()):
        with safe_open(path, framework="pt") as file:
            for name, info in infos.items():
                if info.file == path:
                    tensors[name] = file.get_tensor(info.name)
    return {name: tensors[name] for name in infos}


def same_values(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two stored tensors are equal, compared a slice of rows at a time."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    a, b = load_tensor(first), load_tensor(second)
    return all(
        torch.equal(a[i : i + _COPY_ROWS], b[i : i + _COPY_ROWS]) for i in range(0, len(a), _COPY_ROWS)
    )


def plan_shards(sizes: Mapping[str, int], *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> list[list[str]]:
    """Split tensors into files in the given order; a tensor larger than the limit gets its own.

    ``sizes``: bytes of each tensor.
    """
    if max_shard_bytes < 1:
        raise UserError(f"the largest shard must be at least 1 byte, got {max_shard_bytes}")
    shards: list[list[str]] = []
    used = 0
    for name, nbytes in sizes.items():
        if not shards or used + nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += nbytes
    return shards


def write_weights(
    folder: Path,
    sizes: Mapping[str, int],
    *,
    load: Callable[[list[str]], dict[str, torch.Tensor]],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write tensors as safetensors, with an index if they need more than one file.

    ``sizes``: bytes of each tensor, in the order of the files.
    ``load``: gives the named tensors, called once for each file.  Those of one file are dropped
    before the next are loaded. The files are on the disk when this returns.
    """
    shards = plan_shards(sizes, max_shard_bytes=max_shard_bytes)
    weight_map: dict[str, str] = {}
    flushed: list[Future[None]] = []
    with (
        growing(folder, nbytes=sum(sizes.values()), what="writing weights"),
        ThreadPoolExecutor(max_workers=1) as disk,
    ):
        for number, names in enumerate(shards, start=1):
            file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_file(folder / file, load(names))
            weight_map.update(dict.fromkeys(names, file))
            # The disk works while the next file is written.
            flushed.append(disk.submit(_flush, folder / file))
        for one in flushed:
            one.result()
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_json(folder / INDEX, index)


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(_without_aliases(contiguous), path, metadata={"format": "pt"})


def _flush(path: Path) -> None:
    """Wait until a file is on the disk, as DCP does: an earlier result is deleted afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def growing(folder: Path, *, nbytes: int, what: str) -> Generator[None]:
    """A progress bar of what comes into a folder. ``nbytes``: expected in all."""
    before = progress.folder_bytes(folder)

    def grown() -> float:
        return max(progress.folder_bytes(folder) - before, 0)

    with progress.bar(what, total=nbytes, unit=progress.BYTES, polled=grown):
        yield


def write_json(path: Path, value: Any) -> None:
    """Write JSON the way Hugging Face tools do."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parse_bytes(text: str) -> int:
    """``"5GB"``, ``"200MB"`` or a number of bytes -> bytes (decimal units)."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2).upper() not in units:
        raise UserError(f"{text!r} is not a size; write for example 5GB, 200MB or a number of bytes")
    nbytes = int(float(match.group(1)) * units[match.group(2).upper()])
    if nbytes < 1:
        raise UserError(f"a size must be at least 1 byte, got {text!r}")
    return nbytes


def require_space(folder: Path, nbytes: int) -> None:
    """Refuse to start writing what the disk cannot take. ``nbytes``: bytes to be written."""
    parent = folder
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise UserError(f"{folder} needs {nbytes / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free")


@contextmanager
def replaced_folder(folder: Path, *, marker: str, overwrite: bool = False) -> Generator[Path]:
    """A temporary sibling that takes the place of ``folder`` when the block ends without an error.

    ``marker``: a file by which an earlier result is known; such a folder is replaced, any other
    non-empty one is refused unless ``overwrite``.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (overwrite or (folder / marker).exists()):
        raise UserError(f"{folder} is not empty and holds no {marker}; pass --overwrite to replace it")
    temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    previous = folder.with_name(f".{folder.name}.previous-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _apply_umask(temporary)
        if folder.exists():
            folder.rename(previous)
        temporary.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
    except (OSError, SafetensorError, CheckpointException) as error:
        raise UserError(f"{folder} was not written: {_reason(error)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """The innermost cause; DCP wraps what went wrong once for each rank."""
    failures = getattr(error, "failures", {})
    causes = [failure[0] if isinstance(failure, tuple) else failure for failure in failures.values()]
    return " ".join(str(causes[0] if causes else error).split())


def _apply_umask(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            apply_umask(path)


def apply_umask(path: Path) -> None:
    """The usual permissions: safetensors creates files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _single_file(folder: Path) -> Path:
    if (folder / WEIGHTS).is_file():
        return folder / WEIGHTS
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(
            f"{folder} has {len(files)} safetensors files but no {INDEX}; the download is incomplete"
        )
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled:
        raise UserError(
            f"{folder} has only {pickled[0].name}; pickled weights are not read, save them as safetensors"
        )
    raise UserError(f"{folder} holds no {WEIGHTS} and no {INDEX}")


def _read_header(path: Path) -> Iterator[TensorInfo]:
    if not path.is_file():
        raise UserError(f"{path} is missing; the index lists it")
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                stored = part.get_dtype()
                if stored not in _STORED_DTYPES:
                    raise UserError(
                        f"{path}: {name} is stored as {stored}; allowed: {', '.join(_STORED_DTYPES)}"
                    )
                yield TensorInfo(
                    name=name, file=path, shape=tuple(part.get_shape()), dtype=_STORED_DTYPES[stored]
                )
    except SafetensorError as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _without_aliases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors that share storage, which the format does not allow (a tied head)."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        distinct[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return distinct


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for width in shape:
        numel *= width
    return numel
