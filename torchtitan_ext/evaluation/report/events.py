"""What TensorBoard's event files hold of a run that may have been started several times."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_ext.errors import UserError

EVALUATION = "evaluation"
"""Folder in a run's TensorBoard folder whose files no start of the run wrote."""

PNG = b"\x89PNG\r\n\x1a\n"
"""How a PNG begins."""

_RANK = re.compile(r"rank_(\d+)$")


class Point(NamedTuple):
    """A value that was logged."""

    step: int
    value: float
    time: float
    """When, in seconds since the epoch."""


Curves = dict[str, list[Point]]
"""Points by tag, in the order of their steps, one a step."""


class Image(NamedTuple):
    """A picture that was logged."""

    step: int
    png: bytes
    time: float


class Logged(NamedTuple):
    """What was logged."""

    curves: Curves
    images: dict[str, Image]
    """The last of each tag."""


def event_files(folder: Path) -> list[Path]:
    """The event files under a folder; of ranks that each have a folder, the first rank's only."""
    files = [path for path in sorted(folder.rglob("*tfevents*")) if path.is_file()]
    ranks = {int(m[1]) for path in files if (m := _RANK.search(path.parent.name))}
    return [path for path in files if not (m := _RANK.search(path.parent.name)) or int(m[1]) == min(ranks)]


def read(files: Sequence[Path]) -> Logged:
    """The scalars and pictures of all files together.

    Where a later start of the run logs a step again, it replaces that step and, as in TensorBoard,
    the later steps that an earlier start had reached.
    Errors: UserError, which names the file, for one that is no event file or damaged before its end.
    """
    points: Curves = {}
    images: list[tuple[str, Image]] = []
    for path in files:
        for event in _events(path):
            for value in event.summary.value:
                number, png = _number(value), _png(value)
                if number is not None:
                    points.setdefault(value.tag, []).append(Point(event.step, number, event.wall_time))
                elif png is not None:
                    images.append((value.tag, Image(event.step, png, event.wall_time)))
    images.sort(key=lambda pair: pair[1].time)
    return Logged({tag: _newest(values) for tag, values in points.items()}, dict(images))


def _newest(points: Iterable[Point]) -> list[Point]:
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: p.time):
        while kept and kept[-1].step >= point.step:
            kept.pop()
        kept.append(point)
    return kept


def _events(path: Path) -> list[Any]:
    """Every event of a file."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    try:
        whole = _whole_records(path)
        events = list(EventFileLoader(str(path)).Load()) if whole else []
    except UserError:
        raise
    except Exception as error:  # the parser of protocol buffers has many; the file is named either way
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    # The loader stops at a record whose checksum is wrong, without a word.
    if len(events) < whole:
        raise _unreadable(path, f"record {len(events) + 1} of {whole} is damaged")
    return events


def _number(value: Any) -> float | None:
    """A scalar of a summary, None for pictures, text and the like."""
    from tensorboard.util import tensor_util

    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    if value.WhichOneof("value") != "tensor" or value.tensor.tensor_shape.dim:
        return None
    number = tensor_util.make_ndarray(value.tensor)
    return float(number) if number.dtype.kind in "fiu" else None


def _png(value: Any) -> bytes | None:
    """The PNG of a picture, which the loader gives as width, height and the file; None for anything else."""
    strings = value.tensor.string_val if value.WhichOneof("value") == "tensor" else ()
    return strings[2] if len(strings) >= 3 and strings[2].startswith(PNG) else None


def _whole_records(path: Path) -> int:
    """The number of whole records; a last one that was cut short (the run was killed) does not count.

    A record is its length (8 bytes), a checksum (4), that many bytes and a checksum (4).
    """
    size, offset, count = path.stat().st_size, 0, 0
    with path.open("rb") as file:
        while offset + 12 <= size:
            file.seek(offset)
            (length,) = struct.unpack("<Q", file.read(8))
            offset += 16 + length
            if offset > size:
                break
            count += 1
    if size and not count:
        raise _unreadable(path, "it does not begin with a whole record")
    return count


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(f"event file {path} cannot be read: {reason}")


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving averages, without the pull of the start to zero; what is not finite is passed over.

    ``weight``: of the past, 0 to below 1, as in TensorBoard.
    """
    average, mass, out = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            mass = weight * mass + (1 - weight)
        out.append(average / mass if mass and math.isfinite(value) else math.nan)
    return out


def tokens_at(steps: Sequence[int], seen: Sequence[Point]) -> list[float]:
    """Tokens seen by each step; on a straight line between steps that were logged, and outside of them.

    Errors: ValueError when none were logged.
    """
    import numpy as np

    known = [(p.step, p.value) for p in seen if math.isfinite(p.value)]
    if known and known[0][0] > 0:
        known.insert(0, (0, 0.0))
    if len(known) < 2:
        raise ValueError("no numbers of tokens")
    at, tokens = np.array(known).T
    beyond = np.maximum(np.array(steps, dtype=float) - at[-1], 0.0)
    rate = (tokens[-1] - tokens[-2]) / (at[-1] - at[-2])
    return list(map(float, np.interp(steps, at, tokens) + rate * beyond))
