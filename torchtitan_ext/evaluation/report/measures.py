"""Tables of evaluations.

Only what the files hold is shown: the number of samples always, a standard error where one is
recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext.evaluation import sweep
from torchtitan_ext.evaluation.report.blocks import ABSENT, Table
from torchtitan_ext.evaluation.report.evaluations import Evaluation, Kind

HEADS = {
    **sweep.HEADS,
    "token_accuracy": ("token accuracy", ".2%"),
    "exact_match": ("exact match", ".2%"),
    "answer_accuracy": ("answer", ".2%"),
    "score": ("score", ".4f"),
    "tokens_per_forward_low": ("tokens/forward low", ".3f"),
    "tokens_per_forward_high": ("tokens/forward high", ".3f"),
    "tokens_per_second": ("tokens/s", ".1f"),
    "speed_vs_ar": ("speed, times ar", ".2f"),
    "same_as_ar": ("same as ar", ".1%"),
    "common_prefix": ("common prefix", ".1f"),
    "repetition": ("repeated", ".1%"),
    "low_repetition": ("repeated low", ".1%"),
    "high_repetition": ("repeated high", ".1%"),
    "nats_per_token": ("nats/token", ".3f"),
    "mean_accepted": ("accepted", ".2f"),
    "mean_pass": ("mean pass", ".3f"),
    "first_hazard": ("hazard 1", ".3f"),
}
"""Head and format of a measure; another one is shown under its own name."""

RANGES: dict[Any, str] = {True: "trained", False: "beyond"}
"""Whether a length is among those of the training."""


def heading(key: str) -> tuple[str, str]:
    """Head and format of a measure."""
    if key.startswith("pass_"):
        return key.replace("_", " "), ".1%"
    return HEADS.get(key, (key.replace("_", " "), ".4g"))


def cell(value: Any, form: str = "") -> str:
    """A value as text; whole numbers as they are unless the format is of shares."""
    if value is None:
        return ABSENT
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not form or not isinstance(value, int | float):
        return sweep.shown(value)
    if isinstance(value, int):
        return format(value, form) if form.endswith("%") else str(value)
    return format(value, form if form != "d" else "g")


def with_error(value: Any, error: Any, form: str) -> str:
    """``value +- error``, without the error where none is recorded."""
    known = isinstance(error, int | float)
    return f"{cell(value, form)} \N{PLUS-MINUS SIGN} {cell(error, form)}" if known else cell(value, form)


def _options(told: Mapping[str, Any]) -> str:
    options = told.get("decode_options") or {}
    return ", ".join(f"{key}={sweep.shown(value)}" for key, value in options.items())


def labels(evaluations: Sequence[Evaluation]) -> list[str]:
    """The run of each, with more where a run comes several times: options, checkpoint, file, seed."""
    added: list[Callable[[Evaluation], str]] = [
        lambda e: _options(e.told),
        lambda e: Path(str(e.told["checkpoint"])).name,
        lambda e: e.file.name,
        lambda e: f"seed {e.told['seed']}" if "seed" in e.told else "",
    ]
    names = [e.run for e in evaluations]
    for more in added:
        twice = {name for name in names if names.count(name) > 1}
        names = [
            f"{name} ({extra})" if name in twice and (extra := more(e)) else name
            for name, e in zip(names, evaluations, strict=True)
        ]
    # What is still equal is counted.
    return [
        f"{name} {names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


# --- tables ----------------------------------------------------------------------------


def tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """Tasks length by length, benchmarks, then what compares settings of a single run."""
    by_kind: dict[Kind, list[Evaluation]] = {}
    for evaluation in evaluations:
        by_kind.setdefault(evaluation.kind, []).append(evaluation)
    out = [length_table(group) for group in length_groups(evaluations)]
    if found := by_kind.get("benchmarks"):
        out.append(benchmark_table(found))
    singles: dict[Kind, Callable[[Evaluation], Table]] = {
        "strategies": _strategies,
        "sweep": _sweep,
        "depths": _depths,
        "decode": _decode,
    }
    out += [make(evaluation) for kind, make in singles.items() for evaluation in by_kind.get(kind, [])]
    return out


def length_groups(evaluations: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Evaluations length by length, those of the same task and knobs together."""
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.kind == "lengths":
            groups.setdefault(describe_task(evaluation.told), []).append(evaluation)
    return list(groups.values())


def describe_task(told: Mapping[str, Any]) -> str:
    """The task and its knobs."""
    knobs = told.get("knobs") or {}
    inside = ", ".join(f"{knob} {value}" for knob, value in knobs.items())
    return f"{told['task']} ({inside})" if inside else str(told["task"])


def length_table(group: Sequence[Evaluation]) -> Table:
    """A row for each length; under each measure a column for each run."""
    names = labels(group)
    by_run = [{row["length"]: row for row in evaluation.told["results"]} for evaluation in group]
    lengths = sorted({length for rows in by_run for length in rows})
    keys = dict.fromkeys(key for rows in by_run for row in rows.values() for key in row)
    head, groups, columns = ["length"], [("", 1)], [[str(length) for length in lengths]]
    for key in keys:
        title, form = ("range", "") if key == "trained" else heading(key)
        values = [[rows.get(length, {}).get(key) for length in lengths] for rows in by_run]
        if key == "trained":
            values = [[RANGES.get(value) for value in column] for column in values]
        shown = [i for i, column in enumerate(values) if any(value is not None for value in column)]
        if key == "length" or not shown:
            continue
        if key in ("samples", "trained") and all(column == values[0] for column in values):
            head, groups, shown = [*head, "of all runs"], [*groups, (title, 1)], [0]
        else:
            head, groups = [*head, *(names[i] for i in shown)], [*groups, (title, len(shown))]
        columns += [[cell(value, form) for value in values[i]] for i in shown]
    seeds = sorted({str(evaluation.told.get("seed")) for evaluation in group})
    return Table(
        title=describe_task(group[0].told),
        head=head,
        groups=groups,
        rows=list(zip(*columns, strict=True)),
        note=f"samples drawn with seed {', '.join(seeds)}",
    )


def benchmark_table(group: Sequence[Evaluation]) -> Table:
    """A row for each measure of a benchmark, a column for each run, with standard errors."""
    names = labels(group)
    found: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for i, evaluation in enumerate(group):
        for row in evaluation.told["results"]:
            key = (str(row["task"]), str(row["metric"]), cell(row.get("shots"), "d"))
            found.setdefault(key, {})[i] = row
    rows = []
    for key, by_run in found.items():
        counts = {cell(row.get("samples"), "d") for row in by_run.values()}
        same = len(counts) == 1
        cells = [_benchmark_cell(by_run.get(i), count=not same) for i in range(len(group))]
        rows.append((*key, counts.pop() if same else "they differ", *cells))
    kinds = {
        name: e.told["likelihood"] for name, e in zip(names, group, strict=True) if "likelihood" in e.told
    }
    return Table(
        title="benchmarks",
        head=("benchmark", "measure", "shots", "samples", *names),
        rows=rows,
        note="; ".join(f"{name}: likelihood {kind}" for name, kind in kinds.items()),
    )


def _benchmark_cell(row: Mapping[str, Any] | None, *, count: bool) -> str:
    if row is None:
        return ABSENT
    text = with_error(row["value"], row.get("stderr"), ".4f")
    return f"{text} ({cell(row.get('samples'), 'd')} samples)" if count else text


def _about(evaluation: Evaluation) -> str:
    """Which checkpoint, with which options, from which file."""
    parts = [Path(str(evaluation.told["checkpoint"])).name, _options(evaluation.told), evaluation.file.name]
    return "; ".join(filter(None, parts))


def _columns(
    rows: Sequence[Mapping[str, Any]], *, given: Sequence[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of everything in the rows that is a word or a number, without empty columns.

    ``given``: options, shown under their own names as a user writes them.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    kept = [key for key in keys if any(isinstance(row.get(key), str | int | float) for row in rows)]
    forms = {key: (key, "") if key in given else heading(key) for key in kept}
    lines = [[cell(row.get(key), forms[key][1]) for key in kept] for row in rows]
    return [forms[key][0] for key in kept], lines


def _strategies(evaluation: Evaluation) -> Table:
    told = evaluation.told
    rows = [{"strategy": name, **row} for name, part in told["results"].items() for row in part]
    for row in rows:
        row["trained"] = RANGES.get(row.get("trained"))
    head, lines = _columns(rows)
    title = f"{evaluation.run}: {describe_task(told)}, decoding strategies"
    return Table(title=title, head=head, rows=lines, note=_about(evaluation))


def _decode(evaluation: Evaluation) -> Table:
    told = evaluation.told
    head, lines = _columns(told["results"])
    settings = ("prompts", "data", "max_new_tokens", "temperature", "seed")
    shown = [f"{key.replace('_', ' ')} {sweep.shown(told[key])}" for key in settings if key in told]
    title = f"{evaluation.run}: decoding strategies"
    return Table(title=title, head=head, rows=lines, note="; ".join([*shown, _about(evaluation)]))


def _sweep(evaluation: Evaluation) -> Table:
    told = evaluation.told
    swept = list(told.get("sweep") or {})
    rows = [
        {
            **{key: row.get(key) for key in swept},
            "samples": row["samples"],
            "accuracy": with_error(row["accuracy"], row.get("standard_error"), ".2%"),
            **{k: v for k, v in row.items() if k not in (*swept, *_NOT_MEASURES)},
            "frontier": "*" if row.get("frontier") else "",
        }
        for row in told["results"]
    ]
    head, lines = _columns(rows, given=swept)
    cost = sweep.COSTS.get(told.get("cost", ""), "cost")
    return Table(
        title=f"{evaluation.run}: {describe_task(told)}, options of the decoder",
        head=head,
        rows=lines,
        note=f"* on the frontier of accuracy and {cost}; {_about(evaluation)}",
    )


_NOT_MEASURES = ("samples", "accuracy", "standard_error", "frontier")
"""Fields of a sweep's row with a place of their own."""


def _depths(evaluation: Evaluation) -> Table:
    told = evaluation.told
    head, lines = _columns(told["results"], given=list(told.get("sweep") or {}))
    title = f"{evaluation.run}: {describe_task(told)}, passes in which tokens are committed"
    return Table(title=title, head=head, rows=lines, note=_about(evaluation))
