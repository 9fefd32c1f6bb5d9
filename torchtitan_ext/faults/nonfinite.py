"""A step whose loss or gradient is not finite changes no weight.

Each rank puts its loss and the square of its part of the gradient norm into a
vector with two places a rank, which is summed over all ranks: one small
all-reduce a step, after which every rank knows every rank's values and takes
the same decision. The norm is taken before clipping, which would turn an
infinite norm into a gradient of zeros.

The decision is on the device. A fused Adam takes it from there (``found_inf``,
the way of PyTorch's gradient scaler: the kernel returns without touching weights,
moments or step counts), so the host need not wait for the backward pass: it
reads the vector one step later, or before a checkpoint is written. On the CPU,
and for other optimizers, the host reads it before the optimizer's step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.tools.logging import logger

from torchtitan_ext.faults.errors import NonFinite
from torchtitan_ext.faults.section import FaultsSection
from torchtitan_ext.faults.spikes import SpikeWatch


class Layout(NamedTuple):
    """How the ranks share the work, as far as the sums over all ranks need it."""

    world: int = 1
    rank: int = 0
    stages: int = 1
    """Pipeline stages; each holds parameters of its own."""
    loss_copies: int = 1
    """Ranks that hold the same loss (tensor parallel)."""
    has_loss: bool = True
    """Whether this rank is on the last pipeline stage."""


class Measured(NamedTuple):
    """A step's loss on each rank, and each rank's share of the squared gradient norm."""

    step: int
    losses: list[float]
    squares: list[float]
    finite: bool

    @property
    def grad_norm(self) -> float:
        return math.sqrt(sum(self.squares))

    def describe(self) -> str:
        """``loss nan on rank 1 (finite on the other 3), gradient norm nan``."""
        bad = [rank for rank, loss in enumerate(self.losses) if not math.isfinite(loss)]
        if bad:
            values = sorted({str(self.losses[rank]) for rank in bad})
            rest = len(self.losses) - len(bad)
            where = f"{' or '.join(values)} on {_ranks(bad)}" + (f", finite on {rest}" if rest else "")
        else:
            where = f"{sum(self.losses):.5g}, finite on every rank"
        shards = [rank for rank, square in enumerate(self.squares) if not math.isfinite(square)]
        held = f" in the part of {_ranks(shards)}" if shards and len(shards) < len(self.squares) else ""
        return f"loss {where}; gradient norm {self.grad_norm:.5g}{held}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


@torch.no_grad()
def square_of_norm(tensors: Iterable[torch.Tensor | None], *, ranks: int) -> torch.Tensor:
    """This rank's share of a squared norm: the shares of ``ranks`` ranks add up to it.

    A tensor that several ranks hold (replicated, or not a DTensor) is divided among them.
    """
    groups: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor is None:
            continue
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            copies = ranks // mesh.size()
            for size, placement in zip(mesh.shape, tensor.placements, strict=True):
                copies *= 1 if placement.is_shard() else size
            groups[copies].append(tensor.to_local())
        else:
            groups[ranks].append(tensor)
    shares = [
        torch.nn.utils.get_total_norm(local).float().square() / copies for copies, local in groups.items()
    ]
    return torch.stack(shares).sum() if shares else torch.zeros(())


class NonFiniteGuard:
    """Keeps steps that are not finite away from the weights, and ends the run by the policy."""

    def __init__(
        self, section: FaultsSection, *, layout: Layout, device: torch.device, on_device: bool,
        last_good: Callable[[], str], on_skip: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self.section, self._layout, self._device, self._on_device = section, layout, device, on_device
        self._last_good, self._on_skip = last_good, on_skip
        self._loss_spikes = SpikeWatch("loss", factor=section.spike_factor)
        self._norm_spikes = SpikeWatch("gradient norm", factor=section.grad_norm_spike_factor)
        self.skipped = 0
        self._in_a_row = 0
        self._last: Measured | None = None
        self._pending: tuple[int, torch.Tensor, Any] | None = None
        self._found: torch.Tensor | None = None
        self.begin(0, microbatches=1)

    def begin(self, step: int, *, microbatches: int) -> None:
        """A step of so many backward passes begins."""
        self._step, self._left = step, microbatches
        self._loss = torch.zeros((), device=self._device)

    @torch.no_grad()
    def after_backward(self, loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        """Take a microbatch's local loss; after the last one, compare notes with the other ranks."""
        if self._layout.has_loss:
            local = loss.to_local() if isinstance(loss, DTensor) else loss
            self._loss = self._loss + local.detach().float().sum()
        self._left -= 1
        if self._left:
            return
        self.settle()  # the step before, whose values have arrived meanwhile
        world, rank = self._layout.world, self._layout.rank
        vector = torch.zeros(2 * world, device=self._device)
        vector[rank] = self._loss / self._layout.loss_copies
        vector[world + rank] = square_of_norm(
            (p.grad for p in parameters), ranks=world // self._layout.stages
        )
        if world > 1:
            dist.all_reduce(vector)
        # Each square may be finite and the sum overflow, as the norm that clipping uses does.
        finite = vector.isfinite().all() & vector[world:].sum().isfinite()
        self._found = 1.0 - finite.float()
        self._pending = (self._step, *_to_host(torch.cat([vector, self._found[None]])))

    def step(self, optimizers: Iterable[Any], apply: Callable[[], Any]) -> None:
        """The optimizers' step, unless the gradient is not finite.

        Raises:
            NonFinite: by the policy, before anything has changed.
        """
        if self._found is None:  # nothing was measured: a caller that steps by itself
            apply()
            return
        if not self._on_device:
            self.settle()
            if self._last is not None and self._last.finite:
                apply()
            return
        optimizers = list(optimizers)
        for optimizer in optimizers:
            optimizer.found_inf = self._found
        try:
            apply()
        finally:
            for optimizer in optimizers:
                del optimizer.found_inf

    def settle(self) -> None:
        """Read what was measured last, warn about it, and end the run if the policy says so.

        Raises:
            NonFinite: the step is not finite and may not be skipped.
        """
        if self._pending is None:
            return
        (step, host, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        values, world = host.tolist(), self._layout.world
        self._last = Measured(step, values[:world], values[world:-1], finite=values[-1] == 0)
        if not self._last.finite:
            self._not_finite(self._last)
            return
        self._in_a_row = 0
        self._loss_spikes.see(step, sum(self._last.losses))
        self._norm_spikes.see(step, self._last.grad_norm)

    def was_skipped(self, step: int) -> bool:
        """Whether the step was not finite and was passed over."""
        self.settle()
        return self._last is not None and self._last.step == step and not self._last.finite

    def _not_finite(self, measured: Measured) -> None:
        what = f"step {measured.step}: not finite: {measured.describe()}"
        if self.section.non_finite == "stop":
            raise NonFinite(
                f"{what}; the weights were not changed by it; last good checkpoint: {self._last_good()}"
            )
        self._in_a_row += 1
        if self._in_a_row > self.section.max_skipped:
            raise NonFinite(
                f"{what}; {self._in_a_row} batches in a row, [faults] max_skipped = "
                f"{self.section.max_skipped}; last good checkpoint: {self._last_good()}"
            )
        self.skipped += 1
        logger.warning(
            f"{what}; the batch was skipped ({self._in_a_row} in a row, at most {self.section.max_skipped})"
        )
        self._on_skip(measured.step, self.skipped)

    @torch.no_grad()
    def before_save(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse to write weights that are not finite; called on every rank.

        Raises:
            NonFinite: a weight is NaN or infinite, or the last step was and may not be skipped.
        """
        self.settle()
        own = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        bad = (~torch.nn.utils.get_total_norm(own).isfinite()).float().to(self._device)
        if self._layout.world > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            raise NonFinite(
                f"step {self._step}: weights are not finite, and are not saved; "
                f"newest checkpoint: {self._last_good()}"
            )


def _to_host(vector: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The vector on the host, and the event after which it is there (None: at once)."""
    if vector.device.type == "cpu":
        return vector, None
    host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
    host.copy_(vector, non_blocking=True)
    event = torch.Event(vector.device)
    event.record()
    return host, event


def takes_found_inf(optimizers: Iterable[Any], *, device: torch.device) -> bool:
    """Whether the device itself can leave out these optimizers' step: all are fused Adam on it."""
    return device.type != "cpu" and all(
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and all(
            group.get("fused") and all(p.device.type == device.type for p in group["params"])
            for group in optimizer.param_groups
        )
        for optimizer in optimizers
    )


class GuardedOptimizers:
    """torchtitan's optimizer container, whose step goes through the guard."""

    def __init__(self, optimizers: Any, guard: NonFiniteGuard) -> None:
        self._optimizers, self._guard = optimizers, guard

    def step(self) -> None:
        self._guard.step(self._optimizers, self._optimizers.step)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._optimizers)

    def __len__(self) -> int:
        return len(self._optimizers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizers, name)
