"""A plan as tables for people, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torchtitan_ext.planning.cluster import Plan
from torchtitan_ext.planning.hardware import GIB, Assumptions, Gpu

NOTES = (
    "memory: a step of this code on tensors without data, eager; compiled blocks keep less",
    "attention runs in blocks of 128 x 128 that the mask does not empty, rows of one document",
    "time: the data sheet's peaks times the assumed shares; --assume NAME=VALUE changes one",
)


def as_data(plan: Plan, *, gpu_name: str, gpu: Gpu, assumptions: Assumptions) -> dict[str, Any]:
    """Everything, for machines: bytes, FLOPs and seconds."""
    data = asdict(plan)
    data["times"] |= {"gpu": plan.times.gpu, "step": plan.times.step}
    derived = {"fits": plan.fits, "tokens": plan.tokens, "days": plan.days}
    return {
        **data,
        **derived,
        "memory_total": sum(plan.memory.values()),
        "parameters_total": sum(plan.parameters.values()),
        "flops_total": sum(plan.flops.values()),
        "gpu": {"name": gpu_name, **asdict(gpu)},
        "assumptions": asdict(assumptions),
    }


def as_text(plan: Plan, *, title: str, gpu_name: str, gpu: Gpu, assumptions: Assumptions) -> str:
    """Tables, one below the other."""
    degrees = " x ".join(f"{name} {degree}" for name, degree in plan.degrees.items())
    lines = [
        title,
        f"{plan.world} x {gpu_name} = {degrees}; {plan.global_batch:,} rows a step = {plan.microbatches} x "
        f"{plan.local_batch} x {plan.degrees['replicate'] * plan.degrees['shard']} ranks, "
        f"{plan.step_tokens:,} tokens",
        "",
        table(("parameters", "number", "share"), _shares(plan.parameters, "{:,}".format)),
        f"trained: {plan.trainable:,} of {sum(plan.parameters.values()):,}",
        "",
        table(("memory of a GPU", "bytes", "share"), _shares(plan.memory, _bytes)),
        _capacity(plan, gpu=gpu, assumptions=assumptions),
        "",
        table(("FLOPs of a step, as MFU counts", "FLOP", "share"), _shares(plan.flops, _flop)),
        table(("FLOPs of a step, as they run", "FLOP", "share"), _shares(plan.run_flops, _flop)),
        f"attention computes {plan.attention_share:.1%} of all pairs of positions",
        "",
        _exchanges(plan),
        "",
        _times(plan),
        "",
        *(f"({note})" for note in NOTES),
        f"(peaks: {gpu.source})",
        "(assumed: " + ", ".join(f"{name} {value:g}" for name, value in asdict(assumptions).items()) + ")",
    ]
    return "\n".join(lines)


def _capacity(plan: Plan, *, gpu: Gpu, assumptions: Assumptions) -> str:
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return (
        f"{verdict}: {plan.capacity / GIB:.1f} GiB to use ({gpu.memory} x {assumptions.usable:g}); "
        f"largest local batch that fits: {plan.largest_batch or 'none'}"
    )


def _times(plan: Plan) -> str:
    found = plan.times
    rows = [
        ("matrix products", f"{found.matmul:.4g}"),
        ("attention", f"{found.attention:.4g}"),
        ("other operations", f"{found.other:.4g}"),
        ("communication, all", f"{found.communication:.4g}"),
        ("communication, not hidden", f"{found.exposed:.4g}"),
        ("launching operations (host)", f"{found.host:.4g}"),
        ("step", f"{found.step:.4g}"),
    ]
    rate = plan.step_tokens / found.step
    return "\n".join(
        (
            table(("time of a step", "seconds"), rows),
            f"MFU {plan.mfu:.1%}, {rate:,.0f} tokens/s, {rate / plan.world:,.0f} a GPU; "
            f"limited by: {plan.limit}",
            f"{plan.steps:,} steps = {plan.tokens / 1e9:,.2f} billion tokens: {plan.days:.2f} days",
        )
    )


def _exchanges(plan: Plan) -> str:
    header = ("communication of a step", "over", "ranks", "link", "calls", "bytes", "sent by a rank")
    rows = [
        (
            e.kind.replace("_", "-"),
            e.axis,
            str(e.ranks),
            e.link,
            f"{e.calls:,}",
            _bytes(e.nbytes),
            _bytes(e.wire_bytes),
        )
        for e in plan.exchanges
        if e.ranks > 1
    ]
    return table(header, rows) if rows else "communication of a step: none"


def _shares(parts: dict[str, int], shown: Any) -> list[tuple[str, str, str]]:
    total = sum(parts.values())
    rows = [(name, shown(value), f"{value / max(total, 1):.1%}") for name, value in parts.items() if value]
    return [*rows, ("total", shown(total), "")]


def _bytes(count: int) -> str:
    return _scaled(count, base=1024, units=("B", "KiB", "MiB", "GiB", "TiB"))


def _flop(count: int) -> str:
    return _scaled(count, base=1000, units=("", "k", "M", "G", "T", "P", "E"))


def _scaled(value: float, *, base: int, units: Sequence[str]) -> str:
    """Three or four digits and a unit."""
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:,.4g} {units[power]}".rstrip()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns that line up, the first to the left, numbers to the right."""
    lines = [tuple(header), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, lines))
