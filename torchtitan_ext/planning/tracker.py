"""What one training step allocates, communicates and computes, operation by operation.

The tracker is a dispatch mode: it sees every operation below autograd, so what it reports is what
the code really does, recomputation and FSDP's buffers included. It works on real tensors and,
in a fraction of a second a block and without their memory, on fake ones.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

PARAMETERS, BUFFERS, OPTIMIZER = "parameters", "buffers", "optimizer states"
GRADIENTS, GATHERED, REDUCED = "gradients", "gathered parameters", "unreduced gradients"
INPUTS, HEAD, ACTIVATIONS = "inputs and masks", "logits and loss", "activations"
LABELS = (PARAMETERS, BUFFERS, OPTIMIZER, GRADIENTS, GATHERED, REDUCED, INPUTS, HEAD, ACTIVATIONS)
"""What memory is held for; the last three grow with the batch."""

GROWING = (INPUTS, HEAD, ACTIVATIONS)
"""Labels whose bytes are proportional to the local batch."""


class Message(NamedTuple):
    """One collective."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, broadcast or all_to_all."""

    group: str
    """Name of the process group."""

    nbytes: int
    """Of the whole tensor: what an all-gather gives, a reduce-scatter or an all-reduce takes."""

    phase: str
    """In which part of the step it was sent."""


@dataclass
class Work:
    """FLOPs and traffic of the operations of one phase of a step."""

    matmul: dict[str, int] = field(default_factory=dict)
    """FLOPs of matrix products by part, "head" or "blocks"."""

    attention: int = 0
    """FLOPs of attention kernels, all pairs counted."""

    traffic: int = 0
    """Bytes that all other operations read and write, as they run without compilation."""

    operations: int = 0
    """Operations, views excluded."""


class Segment(NamedTuple):
    """The largest use of memory between two marks."""

    key: tuple[Any, ...]
    """The mark it begins with."""

    nbytes: dict[str, int]
    """By label, at the moment of the largest total."""


class StepTracker(TorchDispatchMode):
    """Records storages, collectives and FLOPs while it is entered.

    ``mark(key)`` begins a segment, whose largest use of memory :meth:`segments` gives;
    ``phase`` is noted with each message, ``part`` ("blocks" or "head") with each matrix product.
    """

    def __init__(self, *, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.fake = fake
        """Fake tensors of this mode stand for real ones; any others are DTensor's own sums over shapes."""
        self.phase = "step"
        self.part = "blocks"
        self.messages: list[Message] = []
        self.work: defaultdict[str, Work] = defaultdict(Work)
        """By phase."""
        self._serial = 0
        self._live: dict[int, tuple[int, weakref.ref[Any], int]] = {}
        """Storage -> serial number, what tells its end, bytes."""
        self._label: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []
        """Serial number and change of bytes, in the order of time."""
        self._marks: list[tuple[int, tuple[Any, ...]]] = [(0, ("begin",))]

    # --- memory ------------------------------------------------------------------------

    def mark(self, *key: Any) -> None:
        """A new segment begins."""
        self._marks.append((len(self._events), key))

    def note(self, tensor: torch.Tensor, label: str) -> None:
        """This tensor's memory is held for ``label``; it is known from now on if it was not."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        serial = self._known(local.untyped_storage())
        if serial is not None:
            self._label[serial] = label

    def _known(self, storage: torch.UntypedStorage) -> int | None:
        """The serial number of a storage, which is new here if it has none; None if it is empty."""
        key = storage._cdata
        if key in self._live:
            return self._live[key][0]
        nbytes = storage.nbytes()
        if nbytes == 0:
            return None
        self._serial += 1
        self._live[key] = (self._serial, weakref.ref(storage, lambda _: self._freed(key)), nbytes)
        self._events.append((self._serial, nbytes))
        self._label[self._serial] = HEAD if self.part == "head" else ACTIVATIONS
        return self._serial

    def _freed(self, key: int) -> None:
        serial, _, nbytes = self._live.pop(key)
        self._events.append((serial, -nbytes))

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """FSDP gathers into, and frees, storages that stay the same object."""
        key = storage._cdata
        if key in self._live:
            self._freed(key)
        if nbytes > 0 and (serial := self._known(storage)) is not None:
            self._label[serial] = GATHERED

    def segments(self) -> list[Segment]:
        """The largest use of memory of each segment, in the order of time."""
        held: dict[str, int] = dict.fromkeys(LABELS, 0)
        total, result = 0, []
        ends = [index for index, _ in self._marks[1:]] + [len(self._events)]
        for (start, key), end in zip(self._marks, ends, strict=True):
            most, peak = total, dict(held)
            for serial, change in self._events[start:end]:
                held[self._label[serial]] += change
                total += change
                if total > most:
                    most, peak = total, dict(held)
            result.append(Segment(key, peak))
        return result

    def __enter__(self) -> StepTracker:
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            tracker._resized(storage, nbytes)
            return result

        # A resize is no operation that a dispatch mode sees.
        torch.UntypedStorage.resize_ = resize_  # pyrefly: ignore[bad-assignment]
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # pyrefly: ignore[bad-assignment]
        super().__exit__(exc_type, exc_val, exc_tb)

    # --- operations --------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under it, and the guard against that takes as long as a small operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # asked at least once for every operation
            return args[0].fake_device
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it becomes operations on its local tensor, which come back here
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.HigherOrderOperator) or self._foreign(out, args):
            return out
        for tensor in _tensors(out):
            self._known(tensor.untyped_storage())
        namespace = func.namespace
        if namespace in ("c10d", "_c10d_functional"):
            self._communicated(func, args, out)
        elif namespace == "fsdp":
            self._of_fsdp(func, args, kwargs, out)
        elif not _moves_nothing(func):
            self._computed(func, args, kwargs, out)
        return out

    def _foreign(self, out: Any, args: Any) -> bool:
        # Operations in place on lists, such as the optimizer's, give nothing back.
        first = next(_tensors((out, args)), None)
        return isinstance(first, FakeTensor) and first.fake_mode is not self.fake

    def _communicated(self, func: Any, args: Any, out: Any) -> None:
        message = message_of(func, args, out, phase=self.phase)
        if message is None:
            return
        self.messages.append(message)
        if func.namespace == "c10d" and message.kind in ("all_gather", "reduce_scatter"):
            label = GATHERED if message.kind == "all_gather" else REDUCED
            for tensor in args[:2]:
                # A reduce-scatter's output lives on as, or in, the gradients, which are noted later.
                self.note(tensor, label)

    def _of_fsdp(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """FSDP's own copies: gradients into what is reduced, shards into what is gathered, and out of it."""
        name = func._overloadpacket.__name__
        if name == "chunk_cat":
            noted, label = (args, kwargs), REDUCED
        elif name == "all_gather_copy_in":
            noted, label = out, GATHERED
        else:  # split_with_sizes_copy
            noted, label = kwargs, GATHERED
        for tensor in _tensors(noted):
            self.note(tensor, label)

    def _computed(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        work, packet = self.work[self.phase], func._overloadpacket
        work.operations += 1
        if "attention" in packet.__name__:
            work.attention += _attention_flops(packet.__name__, args)
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            work.matmul[self.part] = work.matmul.get(self.part, 0) + flops
        else:
            work.traffic += sum(map(_nbytes, _tensors((args, kwargs)))) + sum(map(_nbytes, _tensors(out)))


_DEVICE = torch.ops.prim.device.default


@functools.cache
def _moves_nothing(func: Any) -> bool:
    """Views, bare allocations, and questions about a tensor."""
    if func.namespace == "prim" or "empty" in func._overloadpacket.__name__:
        return True
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _attention_flops(name: str, args: Any) -> int:
    """All pairs of one kernel call; a backward has five matrix products, one of them a recomputation."""
    backward = name.endswith("backward")
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    batch, heads, q_len, width = query.shape
    return (10 if backward else 4) * batch * heads * q_len * key.shape[-2] * width


def message_of(func: Any, args: Any, out: Any, *, phase: str) -> Message | None:
    """The collective that an operation of ``c10d`` or ``_c10d_functional`` is; None for others (waits)."""
    name = func._overloadpacket.__name__.strip("_")
    found = next((entry for entry in _COLLECTIVES if name.startswith(entry[0])), None)
    if found is None:
        return None
    _, kind, side = found
    # The whole tensor is the larger side: the output of an all-gather, else the input.
    if func.namespace == "c10d" and name in ("allgather_base", "reduce_scatter_base", "alltoall_base"):
        whole = args[0] if side == "out" else args[1]
    else:
        whole = out if side == "out" else args[0]
    nbytes = sum(map(_nbytes, _tensors(whole)))
    return Message(kind, _group_name(args), nbytes, phase)


_COLLECTIVES = (
    ("allgather", "all_gather", "out"),
    ("all_gather", "all_gather", "out"),
    ("reduce_scatter", "reduce_scatter", "in"),
    ("allreduce", "all_reduce", "in"),
    ("all_reduce", "all_reduce", "in"),
    ("broadcast", "broadcast", "in"),
    ("alltoall", "all_to_all", "in"),
    ("all_to_all", "all_to_all", "in"),
)


def _group_name(args: Iterable[Any]) -> str:
    for value in args:
        if isinstance(value, dist.ProcessGroup):
            return value.group_name
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).group_name
    # Functional collectives name it; the last text is the group, the one before the operation.
    return [value for value in args if isinstance(value, str)][-1]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
