"""What a run's dump folder says about it, read without loading the model."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_ext.checkpoint import whole
from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.evaluation.report import events

LOSS = "loss_metrics/global_avg_loss"
TOKENS = "n_tokens_seen"
SPEED = "throughput(tps)"
CONFIG, NOTE = "config.toml", "run.json"
NOT_SEARCHED = ("hf_assets", "structured_logs")
"""Folders of a run, besides those that its config names, that hold no results."""
SECTIONS = ("job", "model", "metrics", "checkpoint", "comm", "profiling")
"""Of the config, those that are looked into."""
DEPTH = 3
"""How deep results are looked for: a file of the dump folder itself is at depth 1."""


@dataclass(kw_only=True, slots=True)
class Run:
    """A dump folder, read."""

    name: str
    folder: Path
    config: dict[str, Any]
    note: dict[str, Any]
    """What the trainer wrote into run.json at the end of the last start; may be empty."""

    curves: events.Curves
    images: dict[str, events.Image]
    """Pictures in the event files, the last of each tag; those of evaluations too."""

    starts: int
    """Number of event files: each start of the run writes one."""

    parameters: int | None
    results: list[Path] = field(default_factory=list)
    """JSON files."""

    pictures: list[Path] = field(default_factory=list)
    """PNG files."""

    @property
    def method(self) -> str:
        """``model.name``."""
        return str(self.config.get("model", {}).get("name", ""))

    @property
    def flavor(self) -> str:
        """``model.flavor``."""
        return str(self.config.get("model", {}).get("flavor", ""))

    def last(self, tag: str) -> float | None:
        """The last value of a tag."""
        points = self.curves.get(tag)
        return points[-1].value if points else None

    def median(self, tag: str) -> float | None:
        """The median of what was logged (of an even number the lower one, which was logged too)."""
        values = [p.value for p in self.curves.get(tag, []) if math.isfinite(p.value)]
        return statistics.median_low(values) if values else None

    @property
    def steps(self) -> int | None:
        """The last step that the trainer noted or logged."""
        logged = [points[-1].step for points in self.curves.values() if points]
        noted = self.note.get("step")
        return max([*logged, *([noted] if isinstance(noted, int) else [])], default=None)


def read_runs(paths: Sequence[Path], *, names: Sequence[str] = (), out: Path | None = None) -> list[Run]:
    """Every run, in the order given, under its name or the shortest end of its path that tells it apart.

    ``out``: a folder in which nothing is looked for.
    Errors: UserError for a folder that is missing, comes twice or holds no run, and for files that
    cannot be read.
    """
    folders: list[Path] = []
    for path in paths:
        folder = _run_folder(path)
        if folder in folders:
            raise UserError(f"the run {path} is given twice")
        folders.append(folder)
    if out is not None and out.resolve() in folders:
        raise UserError(f"--out {out} is a run's own folder: give another, such as {out / 'report'}")
    if names and len(names) != len(folders):
        raise UserError(f"--names has {len(names)} names for {len(folders)} runs")
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise UserError(f"--names: {twice!r} comes twice")
    named = zip(folders, names or short_names(folders), strict=True)
    return [_read(folder, name=name, out=out) for folder, name in named]


def _read(folder: Path, *, name: str, out: Path | None) -> Run:
    try:
        return _read_all(folder, name=name, out=out)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from error


def _run_folder(path: Path) -> Path:
    """The resolved dump folder. Errors: UserError for anything else."""
    folder = path.expanduser().resolve()
    if not folder.exists():
        near = [child.name for child in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise UserError(f"run {path} is not there{nearest(folder.name, near)}")
    if not folder.is_dir():
        raise UserError(f"run {path} is a file, expected the dump folder of a run")
    if not (folder / CONFIG).is_file():
        inside = sorted(child.parent.name for child in folder.glob(f"*/{CONFIG}"))
        hint = f"; its folders {', '.join(inside[:5])} have one" if inside else ""
        raise UserError(f"run {path} has no {CONFIG}, so it is not the dump folder of a run{hint}")
    return folder


def short_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of paths that differ from each other."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read_all(folder: Path, *, name: str, out: Path | None) -> Run:
    config = _toml(folder / CONFIG)
    found = _results(folder, config, out=out)
    tensorboard = folder / _text(config, "metrics", "save_tb_folder", "tb")
    beside = events.event_files(tensorboard / events.EVALUATION)
    files = [path for path in events.event_files(tensorboard) if path not in beside]
    logged = events.read(files)
    return Run(
        name=name,
        folder=folder,
        config=config,
        note=_json_object(folder / NOTE) if (folder / NOTE).is_file() else {},
        curves=logged.curves,
        images=events.read(beside).images | logged.images,
        starts=len(files),
        parameters=_parameters(folder / _text(config, "checkpoint", "folder", "checkpoint")),
        results=[p for p in found if p.suffix == ".json" and p != folder / NOTE],
        pictures=[p for p in found if p.suffix == ".png"],
    )


def _text(config: dict[str, Any], section: str, key: str, default: str) -> str:
    value = config.get(section, {}).get(key)
    return value if isinstance(value, str) and value else default


def _toml(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if bad := next((key for key in SECTIONS if not _is_table(document, key)), None):
        raise UserError(f"{path}: {bad} is not a section, so this is not the config of a run")
    return document


def _is_table(document: dict[str, Any], key: str) -> bool:
    return isinstance(document.get(key, {}), dict)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no JSON object")
    return document


def _parameters(folder: Path) -> int | None:
    """Parameters in the newest whole checkpoint, from its metadata alone; None without one.

    An output matrix that shares the embedding's weights is stored but has no optimizer state of its own.
    """
    step, _ = whole.newest_whole(folder)
    if step < 0 or not (folder / f"step-{step}" / ".metadata").is_file():
        return None
    stored = whole.read_metadata(folder / f"step-{step}").state_dict_metadata
    state = "optimizer.state."
    trained = {name.removeprefix(state).rpartition(".")[0] for name in stored if name.startswith(state)}
    other = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.")
    kept = ((name, entry) for name, entry in stored.items() if not name.startswith(other))
    sizes = {name: entry.size for name, entry in kept if isinstance(entry, TensorStorageMetadata)}
    head, embedding = "lm_head.weight", "tok_embeddings.weight"
    if head in sizes and sizes[head] == sizes.get(embedding):
        if not trained:
            return None  # no telling whether one matrix or two
        if embedding in trained and head not in trained:
            del sizes[head]
    return sum(size.numel() for size in sizes.values())


def _results(folder: Path, config: dict[str, Any], *, out: Path | None) -> list[Path]:
    """JSON and PNG files of the run that are not in folders of its trainer or of a report."""
    keys = (
        ("metrics", "save_tb_folder", "tb"),
        ("checkpoint", "folder", "checkpoint"),
        ("comm", "save_traces_folder", "comm_traces"),
        ("profiling", "save_traces_folder", "profiling"),
        ("profiling", "save_memory_snapshot_folder", "profiling"),
    )
    skipped = {folder / _text(config, *key) for key in keys} | {folder / name for name in NOT_SEARCHED}
    if out is not None:
        skipped.add(out.resolve())
    found: list[Path] = []

    def search(place: Path, depth: int) -> None:
        for child in sorted(place.iterdir()):
            if child.name.startswith("."):
                continue
            if child.is_dir() and not child.is_symlink():
                if depth < DEPTH and child not in skipped and not is_report(child):
                    search(child, depth + 1)
            elif child.suffix in (".json", ".png") and child.is_file():
                found.append(child)

    search(folder, 1)
    return found


def is_report(folder: Path) -> bool:
    """Whether a folder holds an earlier report, whose pictures are not results of a run."""
    return (folder / "report.html").is_file() and (folder / "report.md").is_file()
