"""The files of a set of trajectories: parquet shards of fixed ranges of prompts, and a manifest.

A file is written under another name and renamed when it is whole, so a file that is there is
finished. Equal trajectories give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_ext.errors import UserError

MANIFEST = "manifest.json"
VERSION = 1
_KEY = b"trajectories"


class Trajectory(NamedTuple):
    """One answer and the order in which its tokens were revealed."""

    index: int
    """Number of the prompt."""

    prompt: list[int]
    """Ids of the prompt."""

    response: list[int]
    """Ids of the whole response, with what stands behind its first stop token."""

    reveal_step: list[int]
    """The forward that revealed each token of the response, counted from 1."""

    length: int
    """Tokens of the response up to its first stop token, which counts; all where there is none."""

    right: bool | None
    """Whether the answer is right; None where that is not known."""

    @property
    def steps(self) -> int:
        """T, the number of forwards."""
        return max(self.reveal_step)


COLUMNS = Trajectory._fields


# --- identity --------------------------------------------------------------------------


def digest_of(identity: dict[str, Any]) -> str:
    """A short name for everything that decides which trajectories a set holds."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or None where there is none.

    Errors: UserError for one that cannot be read or has another version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != VERSION:
        raise UserError(f"{path} is no manifest of trajectories of version {VERSION} (got version {version})")
    return manifest


def write_manifest(folder: Path, *, identity: dict[str, Any], result: dict[str, Any] | None) -> None:
    """What the set is, and once it is complete what came out."""
    manifest = {"version": VERSION, "identity": identity, "result": result}
    _write(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def check_identity(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse to go on in a folder that holds another set.

    Errors: UserError that names the first differences.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest["identity"] == identity:
        return
    theirs, ours = _flat(manifest["identity"]), _flat(identity)
    different = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    told = "; ".join(f"{key} is {theirs.get(key)} there, {ours.get(key)} now" for key in different[:3])
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    raise UserError(f"{folder} holds other trajectories: {told}{more} (choose another --out)")


def _flat(value: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            out |= _flat(item, prefix=f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = item
    return out


# --- shards ----------------------------------------------------------------------------


def shard_path(folder: Path, number: int) -> Path:
    """Where shard ``number`` lies."""
    return folder / f"shard-{number:05d}.parquet"


def shard_ranges(count: int, *, shard_size: int) -> list[range]:
    """The prompts of every shard."""
    return [range(i, min(i + shard_size, count)) for i in range(0, count, shard_size)]


def write_shard(path: Path, trajectories: Sequence[Trajectory], *, digest: str) -> None:
    """Write a shard that names the set it belongs to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = pa.list_(pa.int32())
    types = [pa.int64(), ids, ids, ids, pa.int32(), pa.bool_()]
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)), metadata={_KEY: digest})
    table = pa.Table.from_pylist([t._asdict() for t in trajectories], schema=schema)
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd", row_group_size=max(len(trajectories), 1))
    _write(path, buffer.getvalue().to_pybytes())


def is_finished(path: Path, *, rows: int, digest: str) -> bool:
    """Whether a shard is there.

    Errors: UserError for a file of that name that is damaged or belongs to another set.
    """
    if not path.exists():
        return False
    with _open(path) as file:
        metadata = file.metadata
    if (metadata.metadata or {}).get(_KEY, b"").decode() != digest:
        raise UserError(f"{path} belongs to other trajectories (choose another --out, or delete it)")
    if metadata.num_rows != rows:
        raise UserError(f"{path} holds {metadata.num_rows} trajectories, expected {rows} (delete it)")
    return True


def read_shard(path: Path) -> list[Trajectory]:
    """The trajectories of a shard. Errors: UserError for a file that cannot be read."""
    import pyarrow as pa

    try:
        with _open(path) as file:
            records = file.read(columns=list(COLUMNS)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    return [Trajectory(**record) for record in records]


def _open(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable shard, delete it ({error})") from error


def _write(path: Path, data: bytes) -> None:
    """All or nothing. A temporary file that a kill left over is written over the next time."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
