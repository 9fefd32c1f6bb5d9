"""How collectives, bytes and operations of a step grow with one key of its config.

    python tools/plan.py scaling --job.config_file train_configs/t2mlr/debug.toml --ranks 8 \\
        --vary t2mlr.forward_depth=4,8,16 --vary ranks=2,8,64

Each ``--vary`` is a table: a key of the config, ``ranks``, or ``layers`` (the first so many blocks of
the model), and its values, all else as the config says. A step is that of rank 0, on fake tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan_ext import config as front
from torchtitan_ext import models
from torchtitan_ext.errors import UserError
from torchtitan_ext.planning import cluster, layers, step
from torchtitan_ext.planning.layers import Totals
from torchtitan_ext.trainer import default_config

RANKS, LAYERS = "ranks", "layers"
"""What can vary besides keys of the config."""

MB = 1e6


class Growth(NamedTuple):
    """A step under one value of what varies."""

    value: str
    microbatches: int
    """Of the step, on a rank."""

    calls: dict[str, int]
    """Collectives of the step by kind."""

    nbytes: dict[str, int]
    """Bytes of their whole tensors by kind."""

    operations: int
    """Of the step without compilation, views excluded: what the host launches."""

    flops: int
    """Of the blocks, the head and attention (all pairs), recomputation included."""


@dataclass(kw_only=True)
class Options:
    """The command's own flags; everything else is the config's."""

    ranks: int = 8
    json: bool = False
    vary: list[tuple[str, list[str]]] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)


def split(argv: Sequence[str]) -> Options:
    """``--ranks 8``, ``--vary KEY=VALUE,VALUE`` (repeatable), ``--json``, and the rest.

    Errors: UserError for a flag without a value, or one that is not of its form.
    """
    options, words = Options(), iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--json":
            options.json = True
        elif name == "--ranks":
            options.ranks = _number("--ranks", value if equals else next(words, ""))
        elif name == "--vary":
            text = value if equals else next(words, "")
            key, _, listed = text.partition("=")
            values = [v.strip() for v in listed.split(",") if v.strip()]
            if not key or not values:
                raise UserError(f"command line: --vary takes KEY=VALUE,VALUE,..., got {text!r}")
            options.vary.append((key.strip(), values))
        else:
            options.rest.append(word)
    if not options.vary:
        raise UserError(
            "command line: what grows? give --vary KEY=VALUE,VALUE,... "
            f"(a key of the config such as training.seq_len, or {RANKS}, {LAYERS})"
        )
    return options


def _number(flag: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise UserError(f"command line: {flag} must be a whole number of at least 1, got {text!r}")
    return int(text)


def grow(argv: Sequence[str], *, key: str, values: Sequence[str], ranks: int) -> list[Growth]:
    """A step of the config that ``argv`` describes, for each value of ``key``.

    Errors: UserError for a value that the config, the model or the number of ranks does not allow.
    """
    found = []
    for value in values:
        own, world, kept = list(argv), ranks, None
        if key == RANKS:
            world = _number(RANKS, value)
        elif key == LAYERS:
            kept = _number(LAYERS, value)
        else:
            own += [f"--{key}", value]
        config = front.parse(own, make_default=default_config)
        found.append(measured(config, value=value, world=world, kept=kept))
    return found


def measured(config: Any, *, value: str, world: int, kept: int | None = None) -> Growth:
    """One step of a config, of the first ``kept`` blocks of its model alone where that is given."""
    config = copy.deepcopy(config)
    kernel = cluster._prepare(config)
    spec = models.build_spec(config)
    if kept is not None:
        spec = dataclasses.replace(spec, model=first_layers(spec.model, kept))
    config.model_spec = spec
    vocabulary: int = getattr(spec.model, "vocab_size")  # noqa: B009 - every language model has one
    config.loss.global_vocab_size = vocabulary
    dims = cluster._checked_degrees(config, vocabulary=vocabulary, world=world)
    per_pass = config.training.local_batch_size * dims["replicate"] * dims["shard"]
    microbatches = max(config.training.global_batch_size, per_pass) // per_pass
    totals = cluster._totals(config, spec, world=world, accumulates=microbatches > 1, kernel=kernel)
    return summed(totals, value=value, microbatches=microbatches)


def first_layers(model: Any, kept: int) -> Any:
    """The model's config with its first blocks alone.

    Errors: UserError for more than there are, or too few to hold its band or its temporal blocks.
    """
    have = len(getattr(model, "layers", ()))
    least = getattr(model, "end", 1)
    if (temporal := getattr(model, "temporal", None)) is not None:
        least = max(temporal) + 1
    if not least <= kept <= have:
        raise UserError(
            f"--vary {LAYERS}: this model has {have} blocks, got {kept} (allowed: {least} to {have})"
        )
    return layers.with_layers(model, range(kept))


def summed(totals: Totals, *, value: str, microbatches: int) -> Growth:
    """A step of so many microbatches."""
    calls: defaultdict[str, int] = defaultdict(int)
    nbytes: defaultdict[str, int] = defaultdict(int)
    for axis, volume in totals.volumes.items():
        times = microbatches if axis.phase == step.MICROBATCH else 1
        calls[axis.kind] += times * volume.count
        nbytes[axis.kind] += times * volume.nbytes
    return Growth(
        value=value,
        microbatches=microbatches,
        calls=dict(calls),
        nbytes=dict(nbytes),
        operations=microbatches * totals.operations + totals.update_operations,
        flops=microbatches * (totals.block_flops + totals.head_flops + totals.attention_flops),
    )


def as_text(key: str, rows: Sequence[Growth]) -> str:
    """A table: collectives and megabytes by kind, and growth over the first row in brackets."""
    kinds = sorted({kind for row in rows for kind in row.calls})
    header = [key, "microbatches"]
    for kind in kinds:
        header += [f"{kind}s", "MB"]
    lines = [[*header, "operations", "GFLOP"]]
    first = rows[0]
    for row in rows:
        line = [row.value, str(row.microbatches)]
        for kind in kinds:
            line.append(_times(row.calls.get(kind, 0), first.calls.get(kind, 0)))
            line.append(f"{row.nbytes.get(kind, 0) / MB:,.2f}")
        line += [_times(row.operations, first.operations), f"{row.flops / 1e9:,.2f}"]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def _times(count: int, first: int) -> str:
    return f"{count:,} (x{count / first:.2f})" if first else f"{count:,}"


def run(argv: Sequence[str]) -> None:
    """Measure, and print a table of each ``--vary``, or one JSON object."""
    if "--help" in argv:
        print(__doc__)
        return
    options = split(argv)
    tables = {
        key: grow(options.rest, key=key, values=values, ranks=options.ranks) for key, values in options.vary
    }
    if options.json:
        print(json.dumps({key: [row._asdict() for row in rows] for key, rows in tables.items()}))
        return
    print(
        "a step of rank 0: collectives, bytes of their whole tensors, operations launched without compilation"
    )
    print("\n\n".join(as_text(key, rows) for key, rows in tables.items()))
