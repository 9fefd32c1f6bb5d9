"""How long a step takes: work against the GPU's peaks, communication against the links'.

A model of a few lines, not a simulation. Matrix products, attention and all other operations follow
one another on the GPU; the host launches operations while the GPU works; FSDP's collectives hide behind
computation as far as there is any, those of tensor parallel do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan_ext.planning.hardware import Assumptions, Gpu
from torchtitan_ext.planning.layers import Axis, Totals, Volume
from torchtitan_ext.planning.step import MICROBATCH

Link = Literal["NVLink", "InfiniBand", "none"]

TENSOR = "tp"
"""Mesh axis whose collectives are on the critical path."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs; ranks are numbered node by node."""

    gpu: Gpu
    gpus_a_node: int
    assumptions: Assumptions


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step of one GPU."""

    matmul: float
    attention: float
    other: float
    """Operations that move memory."""

    host: float
    """What the host takes to launch everything, on the side."""

    communication: float
    """All collectives, hidden or not."""

    exposed: float
    """What of them is not hidden."""

    @property
    def gpu(self) -> float:
        """Computation on the GPU."""
        return self.matmul + self.attention + self.other

    @property
    def step(self) -> float:
        """The whole step."""
        return max(self.gpu, self.host) + self.exposed

    @property
    def limit(self) -> str:
        """What to make faster first."""
        if self.exposed > 0.5 * max(self.gpu, self.host):
            return "communication"
        if self.host > self.gpu:
            return "host (operations are launched more slowly than they run)"
        return "compute" if self.matmul + self.attention > self.other else "memory bandwidth"


def link_of(ranks: Sequence[int], cluster: Cluster) -> Link:
    """The slowest link inside a group."""
    if len(ranks) == 1:
        return "none"
    nodes = {rank // cluster.gpus_a_node for rank in ranks}
    return "InfiniBand" if len(nodes) > 1 else "NVLink"


def seconds_of(axis: Axis, volume: Volume, cluster: Cluster) -> float:
    """Time of some collectives of one kind in one group.

    Rings: each rank sends (n - 1) / n of the tensor, for an all-reduce twice. Between nodes every
    GPU of the group that a node has brings its own port.
    """
    count = len(axis.ranks)
    if count == 1 or volume.count == 0:
        return 0.0
    assumed, gpu = cluster.assumptions, cluster.gpu
    passes = 2 if axis.kind == "all_reduce" else 1
    members = Counter(rank // cluster.gpus_a_node for rank in axis.ranks)
    nodes, fewest = len(members), min(members.values())
    inside = outside = 0.0
    if max(members.values()) > 1:
        inside = passes * volume.nbytes * (count - 1) / count / (gpu.nvlink * assumed.nvlink)
    if nodes > 1:
        ports = fewest * gpu.infiniband * assumed.infiniband
        outside = passes * volume.nbytes * (nodes - 1) / nodes / ports
    return max(inside, outside) + volume.count * assumed.latency_us * 1e-6


def times(
    totals: Totals,
    cluster: Cluster,
    *,
    microbatches: int,
    attention_share: float,
    compiled: bool,
    bf16: bool,
) -> Times:
    """Seconds of a step of ``microbatches`` microbatches.

    ``attention_share``: of the pairs of positions, those that the kernel computes. ``compiled``:
    blocks are compiled.
    """
    gpu, assumed = cluster.gpu, cluster.assumptions
    peak = gpu.bf16 if bf16 else gpu.tf32
    matmul = (totals.block_flops + totals.head_flops) / (peak * assumed.matmul)
    attention = totals.attention_flops * attention_share / (peak * assumed.attention)
    fused, launched = (assumed.fused, assumed.host_fused) if compiled else (1.0, 1.0)
    rate = gpu.memory_rate * assumed.memory
    other, update = totals.traffic * fused / rate, totals.update_traffic / rate
    host = totals.operations * launched * assumed.host_us * 1e-6
    update_host = totals.update_operations * assumed.host_us * 1e-6

    tensor, hidden, once, ends = 0.0, 0.0, 0.0, 0.0
    for axis, volume in totals.volumes.items():
        seconds = seconds_of(axis, volume, cluster)
        if axis.phase != MICROBATCH:
            once += seconds
        elif axis.axis == TENSOR:
            tensor += seconds
        else:
            hidden += seconds
            if axis.kind in ("all_gather", "reduce_scatter"):
                ends += seconds / volume.count  # nothing hides the first and the last
    shelter = assumed.overlap * max(matmul + attention + other, host)
    exposed = tensor + max(hidden - shelter, min(ends, hidden))
    return Times(
        matmul=microbatches * matmul,
        attention=microbatches * attention,
        other=microbatches * other + update,
        host=microbatches * host + update_host,
        communication=microbatches * (tensor + hidden) + once,
        exposed=microbatches * exposed + once,
    )
