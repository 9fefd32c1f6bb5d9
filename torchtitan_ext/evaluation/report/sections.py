"""The sections of a report, from what was read of the runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchtitan_ext.evaluation.report import charts, measures
from torchtitan_ext.evaluation.report.blocks import ABSENT, Block, Picture, Section, Table, Text
from torchtitan_ext.evaluation.report.evaluations import Evaluation
from torchtitan_ext.evaluation.report.events import PNG
from torchtitan_ext.evaluation.report.runs import LOSS, SPEED, TOKENS, Run

VALIDATION = "validation_metrics/"
TITLES = {
    LOSS: "training loss",
    f"{VALIDATION}loss": "validation loss",
    f"{VALIDATION}perplexity": "validation perplexity",
    "grad_norm": "gradient norm",
    SPEED: "tokens/s of a device",
    "memory/max_reserved(GiB)": "memory reserved at most (GiB)",
}
"""What curves are called; another one is shown under its own tag."""

FURTHER = ("grad_norm", "lr/", "lr", SPEED, "memory/max_reserved(GiB)", "tflops", "mfu(%)")
"""Tags, and beginnings of tags, of the curves that a reader opens when needed."""

TRAINER = (*FURTHER, TOKENS, "loss_metrics/", "time_metrics/", "memory/", "throughput", VALIDATION)
"""Those of torchtitan's trainer; everything else is a method's own."""

MACHINE = (f"{VALIDATION}memory/", f"{VALIDATION}throughput")

SHOWN_ABOVE = ("job.dump_folder", "job.description")
"""Keys that are in the table of the runs."""

LARGEST_PICTURE = 8 * 2**20
"""Bytes."""


# --- tables ----------------------------------------------------------------------------


def runs_section(runs: Sequence[Run]) -> Section:
    """A fact a row, a run a column; facts that no run has are left out."""
    facts = {
        "folder": [str(run.folder) for run in runs],
        "description": [_text(run.config.get("job", {}).get("description")) for run in runs],
        "method": [run.method or ABSENT for run in runs],
        "flavor": [run.flavor or ABSENT for run in runs],
        "parameters": [_number(run.parameters, ",d") for run in runs],
        "steps": [_number(run.steps, ",d") for run in runs],
        "tokens": [_tokens(run) for run in runs],
        "last loss": [_number(run.last(LOSS), ".4f") for run in runs],
        "last validation loss": [_number(run.last(f"{VALIDATION}loss"), ".4f") for run in runs],
        "wall time": [_seconds(run) for run in runs],
        "ranks": [_number(run.note.get("ranks"), "d") for run in runs],
        "tokens/s of a device": [_number(run.median(SPEED), ",.0f") for run in runs],
        "versions": [_versions(run.note.get("versions")) for run in runs],
    }
    rows = [(fact, *cells) for fact, cells in facts.items() if any(cell != ABSENT for cell in cells)]
    blocks: list[Block] = [Table(title="", head=("", *(run.name for run in runs)), rows=rows, words=True)]
    notes = ["Tokens/s is the median of what was logged; the last loss is that of the last step logged."]
    if any(run.starts > 1 for run in runs):
        notes.append("The wall time of a run that was started several times is that of its last start.")
    blocks.append(Text(text=" ".join(notes)))
    return Section(title="Runs", blocks=blocks)


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else ABSENT


def _number(value: Any, form: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ABSENT
    return format(value, form if math.isfinite(value) else "")


def _tokens(run: Run) -> str:
    """What was logged for all ranks, else what the first rank noted."""
    logged, noted = run.last(TOKENS), run.note.get("tokens_seen_by_rank_0")
    if logged is not None:
        return _number(logged, ",.0f")
    return ABSENT if noted is None else f"{_number(noted, ',d')} on rank 0"


def _seconds(run: Run) -> str:
    seconds = run.note.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return ABSENT
    return duration(seconds) + (" (last start)" if run.starts > 1 else "")


def duration(seconds: float) -> str:
    """Seconds for people: 12.3 s, 3 min 20 s, 5 h 02 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _versions(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ABSENT
    return ", ".join(f"{name} {version}" for name, version in value.items()) or ABSENT


def config_section(runs: Sequence[Run]) -> Section:
    """The keys of config.toml that differ."""
    section = Section(title="Config differences")
    if len(runs) == 1:
        return section
    flat = [_flat(run.config) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in SHOWN_ABOVE]
    order = list(dict.fromkeys(key.split(".")[0] for key in keys))
    keys.sort(key=lambda key: order.index(key.split(".")[0]))
    rows = []
    for key in keys:
        cells = [_as_toml(one[key]) if key in one else ABSENT for one in flat]
        if len({repr(one.get(key, Ellipsis)) for one in flat}) > 1:
            rows.append((key, *cells))
    if rows:
        note = f"{ABSENT}: the run's config has no such key; all other keys are equal in all runs"
        head = ("key", *(run.name for run in runs))
        section.blocks.append(Table(title="", head=head, rows=rows, words=True, note=note))
    else:
        section.blocks.append(Text(text="All keys are equal, but for the folders and descriptions above."))
    return section


def _as_toml(value: Any) -> str:
    """A value about as config.toml has it, in one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


# --- curves ----------------------------------------------------------------------------


def curve_sections(runs: Sequence[Run], *, look: charts.Look) -> list[Section]:
    """Losses, each method's own metrics, and the rest of the trainer's."""
    tags = list(dict.fromkeys(tag for run in runs for tag in sorted(run.curves)))
    valid = [tag for tag in tags if tag.startswith(VALIDATION) and not tag.startswith(MACHINE)]
    plain = [tag for tag in valid if tag in TITLES]
    own = [tag for tag in tags if not _begins(tag, TRAINER)]
    losses = Section(title="Loss", blocks=_curves(runs, [LOSS, *plain], look=look))
    losses.blocks += _silent(runs, look=look)
    sections = [losses]
    for method, mine in _by_first_part(own).items():
        blocks = _curves(runs, mine, look=look)
        blocks += _curves(runs, [t for t in valid if t.startswith(f"{VALIDATION}{method}/")], look=look)
        sections.append(Section(title=f"Metrics of {method}", blocks=blocks))
    covered = {*plain, *(t for t in valid if t.removeprefix(VALIDATION).split("/")[0] in _by_first_part(own))}
    further = [*(t for t in valid if t not in covered), *(t for t in tags if _begins(t, FURTHER))]
    blocks = _curves(runs, further, look=look)
    sections.append(Section(title="Further curves", blocks=blocks, folded=True))
    return [section for section in sections if section.blocks]


def _begins(tag: str, names: Iterable[str]) -> bool:
    """Whether a tag is one of the names or under one that ends in a slash."""
    return any(tag == name or (name.endswith("/") and tag.startswith(name)) for name in names)


def _by_first_part(tags: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for tag in tags:
        groups.setdefault(tag.split("/")[0], []).append(tag)
    return groups


def _curves(runs: Sequence[Run], tags: Iterable[str], *, look: charts.Look) -> list[Block]:
    blocks: list[Block] = []
    for tag in dict.fromkeys(tags):
        title = TITLES.get(tag, tag.replace(VALIDATION, "validation: "))
        png = charts.curve(runs, tag, look=look, title=title)
        if png is not None:
            blocks.append(Picture(file=f"{file_name(f'curve-{title}')}.png", title=title, png=png))
        for run in runs:
            bad = [p.step for p in run.curves.get(tag, []) if not math.isfinite(p.value)]
            if bad:
                at = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
                blocks.append(Text(text=f"{run.name}: {title} is not finite at {len(bad)} steps ({at})."))
    return blocks


def _silent(runs: Sequence[Run], *, look: charts.Look) -> list[Block]:
    """What the pictures do not show, and how to read them."""
    blocks: list[Block] = []
    silent = [run.name for run in runs if not run.curves]
    for name in silent:
        text = f"{name}: no curves, for there is no TensorBoard data ([metrics] enable_tensorboard = true)."
        blocks.append(Text(text=text))
    if look.smoothing and any(len(p) > charts.FEW for run in runs for p in run.curves.values()):
        pale = "Pale: as logged; strong: exponential moving average over the logged values"
        few = f"Curves of at most {charts.FEW} values are as logged"
        blocks.append(Text(text=f"{pale}, weight of the past {look.smoothing:g}. {few}."))
    return blocks


def file_name(text: str) -> str:
    """A name for a file on any system."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.").lower() or "picture"


# --- evaluations and pictures ----------------------------------------------------------


def evaluation_section(
    runs: Sequence[Run], evaluations: Sequence[Evaluation], *, look: charts.Look
) -> Section:
    """Tables, and accuracy against length where there are several lengths."""
    if not evaluations:
        text = "No evaluations: none of the folders holds what tools/evaluate.py --json prints; see --eval."
        return Section(title="Evaluations", blocks=[Text(text=text)])
    blocks: list[Block] = []
    for number, group in enumerate(measures.length_groups(evaluations), start=1):
        blocks += _length_pictures(group, look=look, number=number)
    without = [run.name for run in runs if all(e.run != run.name for e in evaluations)]
    tables: list[Block] = list(measures.tables(evaluations))
    if without:
        tables.append(Text(text=f"No evaluations of {', '.join(without)}."))
    return Section(title="Evaluations", blocks=[*tables, *blocks])


def _length_pictures(group: Sequence[Evaluation], *, look: charts.Look, number: int) -> list[Block]:
    lengths = {row["length"] for evaluation in group for row in evaluation.told["results"]}
    if len(lengths) < 2:
        return []
    names = measures.labels(group)
    curves = {name: e.told["results"] for name, e in zip(names, group, strict=True)}
    runs = [e.run for e in group]
    dashes = ("-", "--", ":", "-.")
    # Several evaluations of a run share its colour.
    colours = {
        name: (look.style[run][0], look.style[run][1] if not (n := runs[:i].count(run)) else dashes[n % 4])
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
    }
    trained = {e.told.get("trained_maximum") for e in group}
    blocks: list[Block] = []
    for key in ("token_accuracy", "exact_match", "answer_accuracy"):
        if not any(row.get(key) is not None for rows in curves.values() for row in rows):
            continue
        title = measures.heading(key)[0]
        marks = sorted(n for n in trained if isinstance(n, int) and min(lengths) <= n < max(lengths))
        png = charts.lengths(curves, key, colours=colours, title=title, trained=marks)
        full = f"{measures.describe_task(group[0].told)}: {title}"
        blocks.append(Picture(file=f"lengths-{number}-{file_name(title)}.png", title=full, png=png))
    return blocks


def picture_section(runs: Sequence[Run]) -> Section:
    """The PNG files of the runs' folders, and the pictures that were logged to TensorBoard."""
    section = Section(title="Pictures of the runs")
    for number, run in enumerate(runs, start=1):
        for path in run.pictures:
            inside = path.relative_to(run.folder)
            large = path.stat().st_size > LARGEST_PICTURE
            data = b"" if large else path.read_bytes()
            if not data.startswith(PNG):
                reason = f"is larger than {LARGEST_PICTURE >> 20} MiB" if large else "is no PNG"
                section.blocks.append(Text(text=f"{run.name}: {inside} {reason} and is left out."))
                continue
            file = f"run{number}-{file_name(str(inside.with_suffix('')))}.png"
            section.blocks.append(Picture(file=file, title=f"{run.name}: {inside}", png=data))
        for tag, image in sorted(run.images.items()):
            file = f"run{number}-{file_name(f'logged-{tag}')}.png"
            title = f"{run.name}: {tag}, logged at step {image.step}"
            section.blocks.append(Picture(file=file, title=title, png=image.png))
    return section
