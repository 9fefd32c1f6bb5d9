"""What the processes of the planning tests do: a real step, counted by other means than the planner's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import jobs
from torchtitan_ext.planning import step as planned

WRAPPED = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
}
"""Collectives of torch.distributed -> kind; the whole tensor is the larger one of their arguments."""
FUNCTIONAL = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}


class Collectives(TorchDispatchMode):
    """Counts and bytes of collectives by kind: c10d's functions replaced, functional ones watched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int, int]] = Counter()

    def add(self, kind: str, tensor: torch.Tensor, group: Any) -> None:
        ranks = dist.get_world_size(group)
        self.seen[kind, ranks, tensor.numel() * tensor.element_size()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "_c10d_functional":
            name = func._overloadpacket.__name__.rstrip("_")
            if name in FUNCTIONAL:
                group = dist.distributed_c10d._resolve_process_group(args[-1])
                self.add(FUNCTIONAL[name], out if name.startswith("all_gather") else args[0], group)
        return out


def _wrap(seen: Collectives) -> None:
    for name, kind in WRAPPED.items():
        real = getattr(dist, name)

        def counted(*args: Any, real: Any = real, kind: str = kind, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            whole = max(tensors, key=torch.Tensor.numel)
            before = seen.seen.total()
            result = real(*args, **kwargs)
            if seen.seen.total() == before:  # else it called another of them
                seen.add(kind, whole, kwargs.get("group"))
            return result

        setattr(dist, name, counted)


def _trainer(folder: str, args: list[str], toml: str) -> Any:
    """A trainer fed with the planner's rows, whose second step, an unlogged one, is next."""
    trainer = jobs.build(folder, [*args, "--metrics.log_freq", "1000"], toml=toml)
    rows = planned.synthetic_rows(trainer.config)

    def endless(_: Any) -> Any:
        while True:
            yield {k: v.clone() for k, v in rows[0].items()}, rows[1].clone()

    generator = trainer.batch_generator
    trainer.batch_generator = lambda _: generator(endless(None))
    return trainer


def collectives(folder: str, args: list[str], toml: str = jobs.CONFIG) -> dict[tuple[str, int, int], int]:
    """(kind, ranks, bytes) -> number, of the second step."""
    trainer = _trainer(folder, args, toml)
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(None))
    seen = Collectives()
    _wrap(seen)
    trainer.step = 2
    with seen:
        trainer.train_step(trainer.batch_generator(None))
    jobs.finish(trainer)
    return dict(seen.seen)


def peak_memory(folder: str, args: list[str], toml: str = jobs.CONFIG) -> int:
    """Most bytes that the CPU's allocator held in the second step, beyond what it held before it."""
    trainer = _trainer(folder, args, toml)
    data = trainer.batch_generator(None)
    trainer.step = 1
    trainer.train_step(data)
    trainer.optimizers.zero_grad()
    trainer.step = 2
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        trainer.train_step(data)
    jobs.finish(trainer)
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
