"""Evaluations of runs: the JSON that tools/evaluate.py prints, in files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.evaluation.report.runs import Run

Kind = Literal["lengths", "benchmarks", "strategies", "sweep", "depths", "decode"]

LARGEST = 50 * 2**20
"""Bytes of a JSON file in a run's folder that may be an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One JSON object of tools/evaluate.py."""

    run: str
    """Name of the run that was measured."""

    file: Path
    kind: Kind
    told: dict[str, Any]


def read_all(runs: Sequence[Run], given: Sequence[str]) -> list[Evaluation]:
    """The evaluations in the runs' folders, then those of ``--eval FILE[=RUN]``; a file counts once.

    Errors: UserError for files that cannot be read, and for given ones that hold no evaluation or
    belong to no run.
    """
    found = [
        Evaluation(run=run.name, file=path, kind=kind, told=told)
        for run in runs
        for path in run.results
        if path.stat().st_size <= LARGEST
        for told in _objects(path)
        if (kind := kind_of(told)) is not None
    ]
    known = {evaluation.file for evaluation in found}
    for text in given:
        path, name = _file_and_run(text, runs)
        if path.resolve() not in known:
            known.add(path.resolve())
            found += _given(path, name, runs)
    return found


def _file_and_run(text: str, runs: Sequence[Run]) -> tuple[Path, str | None]:
    """The parts of FILE[=RUN]; a file whose own name has an equals sign is taken as it stands."""
    whole = Path(text).expanduser()
    before, equals, name = text.rpartition("=")
    if not equals or whole.is_file():
        path, name = whole, None
    else:
        path = Path(before).expanduser()
    if not path.is_file():
        if path.is_dir():
            raise UserError(f"--eval {path} is a folder, expected a JSON file")
        near = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"--eval {path} is not there{nearest(path.name, near)}")
    if name is None:
        return path, None
    for run in runs:
        if name == run.name or Path(name).expanduser().resolve() == run.folder:
            return path, run.name
    names = [run.name for run in runs]
    raise UserError(f"--eval {text}: no run {name!r}{nearest(name, names)} (runs: {', '.join(names)})")


def _given(path: Path, name: str | None, runs: Sequence[Run]) -> list[Evaluation]:
    objects = _objects(path)
    found = []
    for told in objects:
        kind = kind_of(told)
        if kind is None:
            raise UserError(f"--eval {path} is not what tools/evaluate.py --json prints")
        owner = name or _owner(told, runs)
        if owner is None:
            raise UserError(
                f"--eval {path}: its checkpoint {told['checkpoint']} is in none of the runs' folders; "
                f"say whose it is, such as --eval {path}={runs[0].name}"
            )
        found.append(Evaluation(run=owner, file=path.resolve(), kind=kind, told=told))
    return found


def _owner(told: Mapping[str, Any], runs: Sequence[Run]) -> str | None:
    if len(runs) == 1:
        return runs[0].name
    checkpoint = Path(str(told["checkpoint"])).resolve()
    return next((run.name for run in runs if checkpoint.is_relative_to(run.folder)), None)


def _objects(path: Path) -> list[Any]:
    """The JSON value of a file, or one value a line. Errors: UserError for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    try:
        return [json.loads(text)]
    except json.JSONDecodeError as error:
        reason = error
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return [json.loads(line) for line in lines] if len(lines) > 1 else _refuse(path, reason)
    except json.JSONDecodeError:
        return _refuse(path, reason)


def _refuse(path: Path, reason: json.JSONDecodeError) -> list[Any]:
    raise UserError(f"{path} cannot be read as JSON: {reason}")


def kind_of(told: Any) -> Kind | None:
    """Which evaluation wrote this; None for anything else."""
    if not (isinstance(told, dict) and {"checkpoint", "method", "results"} <= told.keys()):
        return None
    if any(not isinstance(told.get(key) or {}, dict) for key in ("knobs", "decode_options", "sweep")):
        return None
    results = told["results"]
    if isinstance(results, dict) and "task" in told:
        rows = [row for part in results.values() if isinstance(part, list) for row in part]
        return "strategies" if _all_have(rows, "length", "samples") else None
    if not isinstance(results, list) or not results:
        return None
    if "task" not in told:
        if _all_have(results, "task", "metric", "value"):
            return "benchmarks"
        return "decode" if _all_have(results, "strategy") else None
    if _all_have(results, "length", "samples"):
        return "lengths" if all(type(row["length"]) is int for row in results) else None
    if _all_have(results, "kind", "tokens"):
        return "depths"
    return "sweep" if _all_have(results, "samples", "accuracy") else None


def _all_have(rows: Sequence[Any], *keys: str) -> bool:
    return bool(rows) and all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows)
