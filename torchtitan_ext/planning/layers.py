"""A step of a deep model from steps of shallow ones.

Blocks of one kind are alike, so whatever a step moves or computes is a linear function of how many
there are, and so is what it holds at a given point. Two depths of each kind give it: FLOPs and messages
exactly, the largest use of memory to some thousandths. A model of 36 blocks is planned in seconds.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan_ext.planning.step import MICROBATCH, UPDATE, Step

Key = tuple[Any, ...]
"""A point of a step: ("forward" or "backward", kind, place), or another mark."""


class Axis(NamedTuple):
    """Who communicates what, and when."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, ..."""

    axis: str
    """Mesh axis."""

    ranks: tuple[int, ...]
    """The ranks of rank 0's group."""

    phase: str
    """Once a microbatch or once a step."""


class Volume(NamedTuple):
    """Calls, and the bytes of their whole tensors."""

    count: int
    nbytes: int


@dataclass(kw_only=True)
class Totals:
    """One microbatch and what is done once a step; each number is linear in the blocks of a kind."""

    memory: dict[Key, dict[str, int]] = field(default_factory=dict)
    """Bytes by label at the largest use of memory near each point."""

    volumes: dict[Axis, Volume] = field(default_factory=dict)
    head_flops: int = 0
    block_flops: int = 0
    """Matrix products outside the head, recomputed ones included."""

    attention_flops: int = 0
    """Every pair of positions that the kernel was given."""

    traffic: int = 0
    """Bytes that the other operations read and write, without compilation."""

    operations: int = 0
    update_traffic: int = 0
    """The same of clipping and the optimizer, once a step."""

    update_operations: int = 0

    def peak(self) -> dict[str, int]:
        """The largest use of memory, by label."""
        return max(self.memory.values(), key=lambda held: sum(held.values()))


COUNTED = tuple(f.name for f in dataclasses.fields(Totals) if f.type == "int")
"""The fields of :class:`Totals` that are single numbers."""


# --- kinds of blocks -------------------------------------------------------------------


def kinds_of(model: Any) -> list[list[int]]:
    """Indices of a model config's blocks by kind; a kind without blocks is left out."""
    count = len(model.layers)
    if (temporal := getattr(model, "temporal", None)) is not None:
        first = temporal[0]
        plain = [i for i in range(first, count) if i not in temporal]
        kinds = [list(range(first)), list(temporal), plain]
    elif hasattr(model, "start"):
        kinds = [list(range(model.start)), list(range(model.start, model.end)), list(range(model.end, count))]
    else:
        kinds = [list(range(count))]
    return [kind for kind in kinds if kind]


def with_layers(model: Any, kept: Sequence[int]) -> Any:
    """A copy of a model config with some of its blocks alone."""
    model = copy.deepcopy(model)
    model.layers = [model.layers[i] for i in kept]
    if hasattr(model, "size"):
        model.size = dataclasses.replace(model.size, n_layers=len(kept))
    if getattr(model, "temporal", None) is not None:
        model.temporal = tuple(kept.index(i) for i in model.temporal if i in kept)
    if hasattr(model, "start"):
        start, end = (sum(i < edge for i in kept) for edge in (model.start, model.end))
        model.start, model.end = start, end
        for name, value in (("end", end), ("n_layers", len(kept))):
            if hasattr(model.core, name):
                setattr(model.core, name, value)
    return model


def ends_of(model: Any) -> int:
    """Blocks at either end of a kind that may differ from those between.

    Two where each block is an FSDP unit, since the next one is gathered ahead; one in a model with a
    recurrent core, whose few kinds would make many passes of that.
    """
    return 1 if hasattr(model, "core") else 2


def _kept(kind: list[int], count: int, *, ends: int) -> list[int]:
    """So many blocks of a kind, those at the ends before the others."""
    return kind if count >= len(kind) else kind[: count - ends] + kind[-ends:]


# --- measuring -------------------------------------------------------------------------


def totals(model: Any, measure: Callable[[Any], Step]) -> Totals:
    """The numbers of a step of a model, from ``measure`` of the model or of smaller ones."""
    if not hasattr(model, "layers"):
        return _summed(measure(model), places={})
    kinds = kinds_of(model)
    least = [min(len(kind), 2 * ends_of(model)) for kind in kinds]
    base = _measured(model, kinds, least, measure)
    result = base
    for i, kind in enumerate(kinds):
        if len(kind) > least[i]:
            more = [count + (i == j) for j, count in enumerate(least)]
            result = _add(result, len(kind) - least[i], _measured(model, kinds, more, measure), base)
    return result


def _measured(
    model: Any, kinds: list[list[int]], counts: list[int], measure: Callable[[Any], Step]
) -> Totals:
    ends = ends_of(model)
    chosen = [_kept(kind, count, ends=ends) for kind, count in zip(kinds, counts, strict=True)]
    kept = sorted(i for kind in chosen for i in kind)
    places = {}
    for number, kind in enumerate(chosen):
        for place, i in enumerate(kind):
            # Blocks are known by their distance from the nearer end; those in the middle have no name.
            near = place if place < ends else place - len(kind) if place >= len(kind) - ends else None
            places[kept.index(i)] = None if near is None else (number, near)
    return _summed(measure(with_layers(model, kept)), places=places)


def _summed(step: Step, *, places: dict[int, tuple[int, int] | None]) -> Totals:
    inner, outer = step.work[MICROBATCH], step.work[UPDATE]
    result = Totals(
        head_flops=inner.matmul.get("head", 0),
        block_flops=inner.matmul.get("blocks", 0),
        attention_flops=inner.attention,
        traffic=inner.traffic,
        operations=inner.operations,
        update_traffic=outer.traffic,
        update_operations=outer.operations,
    )
    for message in step.messages:
        axis, ranks = step.groups[message.group]
        key = Axis(message.kind, axis, ranks, message.phase)
        before = result.volumes.get(key, Volume(0, 0))
        result.volumes[key] = Volume(before.count + 1, before.nbytes + message.nbytes)
    for segment in step.segments:
        where = segment.key
        if len(where) == 2 and where[1] in places:
            place = places[where[1]]
            if place is None:
                continue
            where = (where[0], *place)
        held = result.memory.get(where)
        if held is None or sum(segment.nbytes.values()) > sum(held.values()):
            result.memory[where] = segment.nbytes
    return result


def _add(result: Totals, times: int, more: Totals, base: Totals) -> Totals:
    """``result`` plus ``times`` the difference that one block makes."""

    def number(value: int, larger: int, smaller: int) -> int:
        return value + times * (larger - smaller)

    changes: dict[str, Any] = {
        name: number(*(getattr(t, name) for t in (result, more, base))) for name in COUNTED
    }
    zero = Volume(0, 0)
    changes["volumes"] = {
        axis: Volume(*map(number, *(t.volumes.get(axis, zero) for t in (result, more, base))))
        for axis in {**result.volumes, **more.volumes}
    }
    changes["memory"] = {
        key: {label: number(held[label], more.memory[key][label], base.memory[key][label]) for label in held}
        for key, held in result.memory.items()
        if key in more.memory
    }
    return Totals(**changes)
