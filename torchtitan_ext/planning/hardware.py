"""What the vendor says a GPU and its links do, and how much of it a training step is assumed to reach.

Peaks are those of the data sheets named in :attr:`Gpu.source`, dense (without sparsity) and in one
direction of a link. Everything else here is an assumption, and a flag of the planner changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torchtitan_ext.errors import UserError, unknown

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of a node whose GPUs are linked by NVLink, with one InfiniBand port for each GPU."""

    bf16: float
    """Dense FLOP/s of bf16 matrix products."""

    tf32: float
    """Dense FLOP/s of fp32 matrix products on tensor cores."""

    memory: int
    """GiB of HBM."""

    memory_rate: float
    """Bytes/s of the HBM."""

    nvlink: float
    """Bytes/s in one direction between the GPUs of a node."""

    infiniband: float
    """Bytes/s in one direction from one GPU to other nodes."""

    source: str
    """Where the numbers are from."""


GPUS: dict[str, Gpu] = {
    "h100": Gpu(
        bf16=989.5e12,
        tf32=494.5e12,
        memory=80,
        memory_rate=3.35e12,
        nvlink=450e9,
        infiniband=50e9,
        source="NVIDIA H100 data sheet (SXM5), DGX H100 data sheet (ConnectX-7, 400 Gb/s a GPU)",
    ),
    "h200": Gpu(
        bf16=989.5e12,
        tf32=494.5e12,
        memory=141,
        memory_rate=4.8e12,
        nvlink=450e9,
        infiniband=50e9,
        source="NVIDIA H200 data sheet (SXM), DGX H200 data sheet (ConnectX-7, 400 Gb/s a GPU)",
    ),
    "gh200": Gpu(
        bf16=989.5e12,
        tf32=494.5e12,
        memory=96,
        memory_rate=4.0e12,
        nvlink=450e9,
        infiniband=50e9,
        source="NVIDIA GH200 Grace Hopper data sheet (96 GB HBM3); 400 Gb/s a GPU is assumed",
    ),
    "b200": Gpu(
        bf16=2250e12,
        tf32=1125e12,
        memory=180,
        memory_rate=8.0e12,
        nvlink=900e9,
        infiniband=50e9,
        source="NVIDIA DGX B200 data sheet (8 x 180 GB, 64 TB/s, ConnectX-7, 400 Gb/s a GPU)",
    ),
}
"""Name -> GPU."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What of a peak is reached, and fixed costs. ``--assume name=value`` changes one."""

    matmul: float = 0.70
    """Share of the peak FLOP/s in matrix products."""

    attention: float = 0.45
    """Share of the peak FLOP/s in the attention kernel, for the blocks that it computes."""

    memory: float = 0.80
    """Share of the HBM's rate in all other operations."""

    fused: float = 0.40
    """Share of the other operations' traffic that is left when blocks are compiled."""

    host_us: float = 8.0
    """Microseconds in which the host launches one operation; the GPU waits if it is faster."""

    host_fused: float = 0.25
    """Share of the operations that is left when blocks are compiled."""

    nvlink: float = 0.80
    """Share of the NVLink rate."""

    infiniband: float = 0.80
    """Share of the InfiniBand rate."""

    latency_us: float = 20.0
    """Microseconds of a collective beside its bytes."""

    overlap: float = 0.85
    """Share of a microbatch's computation behind which FSDP's collectives can hide."""

    usable: float = 0.93
    """Share of the HBM for tensors; the rest is CUDA's, NCCL's and the allocator's fragments."""


def gpu_named(name: str) -> Gpu:
    """The GPU of this name. Errors: UserError that names the nearest."""
    if name not in GPUS:
        raise unknown("--gpu", name, GPUS)
    return GPUS[name]


def assumed(changes: Sequence[str]) -> Assumptions:
    """The assumptions with ``name=value`` changes.

    Errors: UserError for an unknown name, for what is no number, or for a share outside (0, 1].
    """
    names = {field.name for field in fields(Assumptions)}
    result = Assumptions()
    for change in changes:
        name, _, text = change.partition("=")
        if name not in names:
            raise unknown("--assume", name, names)
        try:
            value = float(text)
        except ValueError:
            raise UserError(f"--assume {change}: {text!r} is not a number (allowed: {name}=0.5)") from None
        is_time = name.endswith("_us")
        if not (0 <= value < float("inf") if is_time else 0 < value <= 1):
            allowed = "0 or more microseconds" if is_time else "more than 0, at most 1"
            raise UserError(f"--assume {change}: allowed: {allowed}")
        result = replace(result, **{name: value})
    return result
