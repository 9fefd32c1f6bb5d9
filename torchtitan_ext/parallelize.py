"""One function that parallelises every backbone and every method.

Order: tensor (and sequence) parallel, activation checkpointing, compile per
block, FSDP2/HSDP. Pipeline stages pass through it one by one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh, validate_config
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext.errors import UserError
from torchtitan_ext.initialization import key_initialisers


def use_plain_sums_on_gloo(model: nn.Module) -> None:
    """Let FSDP2 reduce with SUM on gloo.

    A gradient divide factor of 1 makes FSDP2 use PREMUL_SUM, which gloo lacks.
    """
    if dist.get_backend() != "gloo":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def parallelize_decoder(
    model: Any,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Apply TP/SP, activation checkpointing, compile and FSDP2/HSDP to a decoder on the meta device.

    Raises:
        UserError: a parallelism that the masks of this project do not support.
    """
    if parallel_dims.cp_enabled:
        raise UserError(
            f"[parallelism] context_parallel_degree = {parallel_dims.cp} is not supported (allowed: 1)"
        )
    if parallelism.spmd_backend != "spmd_types":
        raise UserError(
            f"[parallelism] spmd_backend = {parallelism.spmd_backend!r} is not supported "
            "(allowed: 'spmd_types')"
        )
    validate_config(parallel_dims, model)
    model.parallelize(parallel_dims)

    # A recurrent core holds blocks of its own.
    containers = getattr(model, "containers", [model])
    for container in containers:
        if ac_config is not None:
            ac_config.build(dump_folder=dump_folder).apply(container)
        if compile_config.enable and "model" in compile_config.components:
            apply_compile(container, compile_config=compile_config, parallel_dims=parallel_dims)

    if _needs_no_fsdp(parallel_dims, training):
        return model
    mesh, mesh_dims = resolve_fsdp_mesh(parallel_dims)
    for container in containers:
        if container is not model:
            _shard_core(
                container, mesh, mesh_dims, by=model.core_sharding, training=training, parallelism=parallelism
            )
    apply_fsdp_to_decoder(
        model,
        mesh,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        dp_mesh_dims=mesh_dims,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    return model


def _needs_no_fsdp(parallel_dims: ParallelDims, training: TrainingConfig) -> bool:
    """Whether one process computes in its parameters' own dtype.

    FSDP2 would then only copy every parameter and gradient to itself, some
    percent of a step on a CPU. Anything else (mixed precision, offload, any
    other rank) is FSDP2's work.
    """
    dtypes = {training.dtype, training.mixed_precision_param, training.mixed_precision_reduce}
    return parallel_dims.world_size == 1 and len(dtypes) == 1 and not training.enable_cpu_offload


def _shard_core(
    core: Any,
    mesh: DeviceMesh,
    mesh_dims: DataParallelMeshDims | None,
    *,
    by: str,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
) -> None:
    """Make a recurrent core one FSDP unit, or each of its blocks one.

    As one unit the core is gathered once a step however often it loops; by
    layer it is kept gathered between the passes of a step.
    """
    config: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
    }
    if mesh_dims is not None:
        config["dp_mesh_dims"] = mesh_dims
    if training.enable_cpu_offload:
        config["offload_policy"] = CPUOffloadPolicy()
    always = parallelism.fsdp_reshard_after_forward == "always"
    if by == "layer":
        for block in core.layers.values():
            fully_shard(block, **config, reshard_after_forward=always)
    fully_shard(core, **config, reshard_after_forward=parallelism.fsdp_reshard_after_forward != "never")


def with_keyed_weights(spec: ModelSpec, *, seed: int) -> ModelSpec:
    """The spec with weights that do not depend on the parallelism, on any backend.

    It wraps the spec's own ``parallelize_fn``, so torchtitan's models get it too.
    """
    parallelize: Callable[..., nn.Module] = spec.parallelize_fn

    def wrapped(model: nn.Module, **kwargs: Any) -> nn.Module:
        model = parallelize(model, **kwargs)
        use_plain_sums_on_gloo(model)
        key_initialisers(model, seed=seed)
        return model

    return dataclasses.replace(spec, parallelize_fn=wrapped)
