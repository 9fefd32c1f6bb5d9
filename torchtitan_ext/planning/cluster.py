"""What a config costs on a cluster: memory, FLOPs, communication, time."""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import utils

from torchtitan_ext import models
from torchtitan_ext.errors import UserError
from torchtitan_ext.planning import counts, layers, share, step
from torchtitan_ext.planning.hardware import GIB, Assumptions, Gpu
from torchtitan_ext.planning.layers import Totals
from torchtitan_ext.planning.timing import Cluster, Link, Times, link_of, times
from torchtitan_ext.planning.tracker import GROWING
from torchtitan_ext.trainer import check_before_start


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """All collectives of one kind over one mesh axis in a step."""

    kind: str
    axis: str
    ranks: int
    link: Link
    """Whether the group lies in one node or spans several."""

    calls: int
    nbytes: int
    """Of the whole tensors, for each rank."""

    wire_bytes: int
    """What each rank sends."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a config on a cluster. Bytes are of one GPU, FLOPs of one step of all."""

    world: int
    degrees: dict[str, int]
    microbatches: int
    """Of a step, on a rank."""

    local_batch: int
    global_batch: int
    step_tokens: int
    """Data tokens."""

    steps: int
    parameters: dict[str, int]
    trainable: int
    memory: dict[str, int]
    """At the moment of the largest use."""

    capacity: int
    largest_batch: int
    """Largest local batch whose step fits; 0 if none does."""

    flops: dict[str, int]
    """By part, as MFU counts them."""

    run_flops: dict[str, int]
    """As they run: with recomputation, and attention by the blocks that the kernel computes."""

    attention_share: float
    exchanges: list[Exchange]
    times: Times
    mfu: float
    limit: str

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.steps * self.step_tokens

    @property
    def days(self) -> float:
        """For all steps."""
        return self.steps * self.times.step / 86400

    @property
    def fits(self) -> bool:
        """Whether the largest use of memory is within the GPU's."""
        return sum(self.memory.values()) <= self.capacity


def plan(config: Any, *, nodes: int, gpus_a_node: int, gpu: Gpu, assumptions: Assumptions) -> Plan:
    """The plan of a config on ``nodes`` nodes. The config is left as it is.

    Errors: UserError for degrees that do not fit the cluster, and for what is not planned.
    """
    config, world = copy.deepcopy(config), nodes * gpus_a_node
    kernel = _prepare(config)
    spec = models.build_spec(config)
    config.model_spec = spec
    vocabulary: int = getattr(spec.model, "vocab_size")  # noqa: B009 - every language model has one
    config.loss.global_vocab_size = vocabulary
    dims = _checked_degrees(config, vocabulary=vocabulary, world=world)
    dtype = TORCH_DTYPE_MAP[config.training.dtype]
    with torch.device("meta"), utils.set_default_dtype(dtype):
        model: Any = spec.model.build()
    data_ranks = dims["replicate"] * dims["shard"]
    per_pass = config.training.local_batch_size * data_ranks
    whole = config.training.global_batch_size
    microbatches = max(whole, per_pass) // per_pass
    totals = _totals(config, spec, world=world, accumulates=microbatches > 1, kernel=kernel)
    parts = counts.flops(config.model.name, spec.model, model, seq_len=config.training.seq_len)
    if not hasattr(spec.model, "layers"):  # an LSTM's kernel is one operation, which is not taken apart
        totals.block_flops = parts[counts.BLOCKS] * config.training.local_batch_size * config.training.seq_len
    attention_share = 1.0 if kernel is None else share.computed_share(config, model)
    cluster = Cluster(gpu=gpu, gpus_a_node=gpus_a_node, assumptions=assumptions)
    found = times(
        totals,
        cluster,
        microbatches=microbatches,
        attention_share=attention_share,
        compiled=config.compile.enable and "model" in config.compile.components,
        bf16=config.training.mixed_precision_param != "float32",
    )
    tokens = per_pass * microbatches * config.training.seq_len
    memory = totals.peak()
    capacity = int(gpu.memory * GIB * assumptions.usable)
    model_flops = {part: count * tokens for part, count in parts.items()}
    # MFU is relative to bf16 whatever the run's dtype, as torchtitan's is.
    mfu = sum(model_flops.values()) / (found.step * world * gpu.bf16)
    runs = world * microbatches
    return Plan(
        world=world,
        degrees=dims,
        microbatches=microbatches,
        local_batch=config.training.local_batch_size,
        global_batch=per_pass * microbatches,
        step_tokens=tokens,
        steps=config.training.steps,
        parameters=counts.parameters(model),
        trainable=counts.trainable(model),
        memory=memory,
        capacity=capacity,
        largest_batch=largest_batch(totals, config.training.local_batch_size, capacity=capacity),
        flops=model_flops,
        run_flops={
            "blocks": totals.block_flops * runs,
            "attention": int(totals.attention_flops * attention_share) * runs,
            "head": totals.head_flops * runs,
        },
        attention_share=attention_share,
        exchanges=_exchanges(totals, cluster, microbatches=microbatches),
        times=found,
        mfu=mfu,
        limit="memory" if sum(memory.values()) > capacity else found.limit,
    )


def largest_batch(totals: Totals, batch: int, *, capacity: int) -> int:
    """The largest local batch with which every point of the step fits.

    What grows with the batch is proportional to it (:data:`tracker.GROWING`); the rest is not.
    """
    largest = None
    for held in totals.memory.values():
        growing = sum(held[label] for label in GROWING)
        fixed = sum(held.values()) - growing
        if fixed > capacity:
            return 0
        if growing:
            fits = (capacity - fixed) * batch // growing
            largest = fits if largest is None else min(largest, fits)
    return largest or 0


def _prepare(config: Any) -> str | None:
    """Leave out what needs the cluster's files; the kernel that stands in for the GPU's."""
    training, parallelism = config.training, config.parallelism
    for name in ("pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
        if getattr(parallelism, name) > 1:
            raise UserError(
                f"[parallelism] {name} = {getattr(parallelism, name)} is not planned (allowed: 1)"
            )
    if training.enable_cpu_offload:
        raise UserError("[training] enable_cpu_offload = true is not planned (allowed: false)")
    if config.activation_checkpoint.mode == "memory_budget":
        raise UserError(
            "[activation_checkpoint] mode = 'memory_budget' is the compiler's choice and is not planned "
            "(allowed: none, selective, full)"
        )
    wanted = config.model.attention
    # The config is built on this machine, which may have no GPU; the stand-in replaces the kernel.
    config.model.attention = "dense"
    own: Any = getattr(config, config.model.name, None)
    if own is not None and getattr(own, "convergence_tol", 0.0) > 0:
        own.convergence_tol = 0.0  # the plan has every iterate; leaving early depends on numbers
    assets = config.model.hf_assets_path
    if not Path(assets or "-").exists() and config.model.flavor != "hf":
        config.tokenizer.kind = "byte"
    if wanted == "dense":
        return None
    return "varlen" if wanted == "varlen" else "flex"


def _checked_degrees(config: Any, *, vocabulary: int, world: int) -> dict[str, int]:
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(world)
    try:
        check_before_start(config, vocabulary=vocabulary)
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before
    p, length = config.parallelism, config.training.seq_len
    if p.enable_sequence_parallel and length % p.tensor_parallel_degree:
        raise UserError(
            f"[training] seq_len = {length} must be a multiple of [parallelism] tensor_parallel_degree = "
            f"{p.tensor_parallel_degree} with sequence parallel"
        )
    fixed = p.data_parallel_replicate_degree * p.tensor_parallel_degree
    return {
        "replicate": p.data_parallel_replicate_degree,
        "shard": world // fixed,
        "tensor": p.tensor_parallel_degree,
    }


def _totals(config: Any, spec: Any, *, world: int, accumulates: bool, kernel: str | None) -> Totals:
    def measure(model_config: Any) -> step.Step:
        own = dataclasses.replace(spec, model=model_config)
        return step.measure(config, own, world=world, accumulates=accumulates, stand_in=kernel)

    try:
        with step.fake_world(world):
            return layers.totals(spec.model, measure)
    except (ValueError, NotImplementedError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(str(error)) from error


def _exchanges(totals: Totals, cluster: Cluster, *, microbatches: int) -> list[Exchange]:
    merged: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for axis, volume in totals.volumes.items():
        times_ = microbatches if axis.phase == step.MICROBATCH else 1
        entry = merged.setdefault((axis.kind, axis.axis, axis.ranks), [0, 0])
        entry[0] += times_ * volume.count
        entry[1] += times_ * volume.nbytes
    return [
        Exchange(
            kind=kind,
            axis=axis,
            ranks=len(ranks),
            link=link_of(ranks, cluster),
            calls=calls,
            nbytes=nbytes,
            wire_bytes=int(nbytes * (2 if kind == "all_reduce" else 1) * (len(ranks) - 1) / len(ranks)),
        )
        for (kind, axis, ranks), (calls, nbytes) in sorted(merged.items())
    ]
