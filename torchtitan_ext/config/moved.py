"""Keys of earlier torchtitan configs (0.2.2 and before) that have another place now, or none.

Read only when a key is unknown, so a section that still has the key is not
affected. Facts: torchtitan's job_config.py at v0.2.2 and its history.
"""

from __future__ import annotations

from typing import NamedTuple


class Moved(NamedTuple):
    """Where a key went: the new dotted key or section, or an empty string and why."""

    to: str = ""
    why: str = ""


_QUANTIZED = Moved(why="low-precision training is not offered here")
_FAULT_TOLERANCE = Moved(why="replica groups (torchft) are not offered; resume from a checkpoint instead")
_ALWAYS = Moved(why="the resolved config is always printed, and saved as config.toml in job.dump_folder")
_EXTENSION = Moved(why="a method brings its own section; [model] name chooses it")
_SELECTIVE = Moved(
    "activation_checkpoint.mode",
    'mode = "selective" is per operation ("op"); every n-th layer no longer exists',
)
_TRAINING_BATCH = Moved(why="validation uses training.local_batch_size and training.seq_len")
_LOSS_PARALLEL = Moved(why="the loss is parallel wherever tensor parallel is on")
_ROTATE = Moved(why="torchtitan chooses the exchange itself; see parallelism.context_parallel_load_balancer")
_ESTIMATE = Moved(why="memory is estimated by tools/plan.py from the same config")
_STEP_IN_BACKWARD = Moved(why="the optimizer always steps after the whole backward pass")
_COMPILED_AUTOGRAD = Moved(why="compiled autograd is no longer offered")

MOVED: dict[str, Moved] = {
    # outside any section
    "dump_folder": Moved("job.dump_folder"),
    "hf_assets_path": Moved("model.hf_assets_path"),
    # [job]
    "job.config_file": Moved(why="it is an option of the command line only: --job.config_file X.toml"),
    "job.print_config": _ALWAYS,
    "job.print_args": _ALWAYS,
    "job.save_config_file": _ALWAYS,
    "job.save_config_folder": _ALWAYS,
    "job.custom_config_module": _EXTENSION,
    "job.use_for_integration_test": Moved(why="the tests list their configs themselves"),
    # [model]
    "model.tokenizer_path": Moved("model.hf_assets_path", "the folder that holds the tokenizer files"),
    "model.converters": _QUANTIZED,
    "model.print_after_conversion": _QUANTIZED,
    "model.use_flex_attn": Moved("model.attention", '"flex" or "auto"'),
    "model.attn_mask_type": Moved(why="the method decides its attention mask"),
    "model.norm_type": Moved(why="the flavor decides the norm"),
    # [optimizer], [lr_scheduler]
    "optimizer.early_step_in_backward": _STEP_IN_BACKWARD,
    "optimizer.fused": Moved("optimizer.implementation", '"fused", "foreach" or "for-loop"'),
    "optimizer.param_groups": Moved("optimizer.lr", "keys are flat; see also optimizer.no_weight_decay"),
    "lr_scheduler.lr_min": Moved("lr_scheduler.min_lr_factor"),
    # [training]
    "training.dataset": Moved("dataloader.dataset"),
    "training.dataset_path": Moved("dataloader.dataset_path"),
    "training.dataloader": Moved("dataloader"),
    "training.batch_size": Moved("training.local_batch_size"),
    "training.warmup_steps": Moved("lr_scheduler.warmup_steps"),
    "training.seed": Moved("debug.seed"),
    "training.deterministic": Moved("debug.deterministic"),
    "training.debug_moe_force_load_balance": Moved("debug.moe_force_load_balance"),
    "training.compile": Moved("compile.enable"),
    "training.data_parallel_degree": Moved("parallelism.data_parallel_shard_degree"),
    "training.data_parallel_shard_degree": Moved("parallelism.data_parallel_shard_degree"),
    "training.data_parallel_replicate_degree": Moved("parallelism.data_parallel_replicate_degree"),
    "training.data_parallel_type": Moved(
        "parallelism.data_parallel_shard_degree", "with parallelism.data_parallel_replicate_degree for HSDP"
    ),
    "training.fsdp_reshard_after_forward": Moved("parallelism.fsdp_reshard_after_forward"),
    "training.tensor_parallel_degree": Moved("parallelism.tensor_parallel_degree"),
    "training.pipeline_parallel_degree": Moved("parallelism.pipeline_parallel_degree"),
    "training.context_parallel_degree": Moved("parallelism.context_parallel_degree"),
    "training.disable_loss_parallel": _LOSS_PARALLEL,
    "training.enable_loss_parallel": _LOSS_PARALLEL,
    "training.enable_float8_linear": _QUANTIZED,
    "training.enable_fp8_linear": _QUANTIZED,
    # [parallelism]
    "parallelism.enable_async_tensor_parallel": Moved("compile.enable_async_tensor_parallel"),
    "parallelism.enable_compiled_autograd": _COMPILED_AUTOGRAD,
    "parallelism.disable_loss_parallel": _LOSS_PARALLEL,
    "parallelism.context_parallel_rotate_method": _ROTATE,
    "parallelism.pipeline_parallel_split_points": Moved("parallelism.module_fqns_per_model_part"),
    "parallelism.pipeline_parallel_microbatches": Moved(
        "parallelism.pipeline_parallel_microbatch_size", "a size, not a count"
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": Moved(why="it belonged to mixtures of experts"),
    "parallelism.expert_tensor_parallel_degree": Moved(why="experts no longer have a degree of their own"),
    "parallelism.expert_parallel_comm_backend": Moved(why="it belonged to mixtures of experts"),
    # [checkpoint]
    "checkpoint.enable_checkpoint": Moved("checkpoint.enable"),
    "checkpoint.model_weights_only": Moved("checkpoint.last_save_model_only"),
    "checkpoint.last_save_model_weights_only": Moved("checkpoint.last_save_model_only"),
    "checkpoint.initial_load_model_weights_only": Moved("checkpoint.initial_load_model_only"),
    "checkpoint.last_save_in_safetensors_format": Moved("checkpoint.last_save_in_hf"),
    "checkpoint.interval_type": Moved("checkpoint.interval", "always in steps"),
    "checkpoint.enable_ft_dataloader_checkpoints": _FAULT_TOLERANCE,
    # [activation_checkpoint]
    "activation_checkpoint.selective_ac_option": _SELECTIVE,
    "activation_checkpoint.early_stop": Moved(why="torch's default is used"),
    "activation_checkpoint.determinism_check": Moved(why="torch's default is used"),
    "activation_checkpoint.debug": Moved(why="torch's default is used"),
    "activation_checkpoint.visualize_memory_budget_pareto": Moved(why="the drawing is not offered"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Moved(
        why="torchtitan's default is used"
    ),
    # [metrics], [profiling]
    "metrics.rank_0_only": Moved("metrics.save_for_all_ranks", "with the opposite meaning"),
    "metrics.enable_color_printing": Moved("metrics.disable_color_printing", "with the opposite meaning"),
    "metrics.disable_logging_from_checkpoint": Moved(why="checkpoints are always logged"),
    "profiling.profile_every_x_iter": Moved("profiling.profile_freq"),
    "profiling.run_profiler": Moved("profiling.enable_profiling"),
    # [validation]
    "validation.enabled": Moved("validation.enable"),
    "validation.dataset": Moved("validation.dataloader.dataset"),
    "validation.dataset_path": Moved("validation.dataloader.dataset_path"),
    "validation.local_batch_size": _TRAINING_BATCH,
    "validation.seq_len": _TRAINING_BATCH,
    # sections that are gone
    "experimental.enable_async_tensor_parallel": Moved("compile.enable_async_tensor_parallel"),
    "experimental.enable_compiled_autograd": _COMPILED_AUTOGRAD,
    "experimental.context_parallel_degree": Moved("parallelism.context_parallel_degree"),
    "experimental.context_parallel_rotate_method": _ROTATE,
    "experimental.pipeline_parallel_degree": Moved("parallelism.pipeline_parallel_degree"),
    "experimental.pipeline_parallel_schedule": Moved("parallelism.pipeline_parallel_schedule"),
    "experimental.pipeline_parallel_schedule_csv": Moved("parallelism.pipeline_parallel_schedule_csv"),
    "experimental.pipeline_parallel_split_points": Moved("parallelism.module_fqns_per_model_part"),
    "experimental.pipeline_parallel_microbatches": Moved(
        "parallelism.pipeline_parallel_microbatch_size", "a size, not a count"
    ),
    "experimental": _EXTENSION,
    "fault_tolerance": _FAULT_TOLERANCE,
    "float8": _QUANTIZED,
    "mx": _QUANTIZED,
    "quantize": _QUANTIZED,
    "memory_estimation": _ESTIMATE,
    "estimate": _ESTIMATE,
}


def moved(key: str) -> str:
    """What became of a dotted key (or of the section it is in), as the rest of a sentence; or nothing.

    The longest entry that is the key or a dotted prefix of it counts.
    """
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        entry = MOVED.get(".".join(parts[:length]))
        if entry is None:
            continue
        if not entry.to:
            return f"was removed: {entry.why}"
        to = ".".join([entry.to, *parts[length:]])
        return f"moved to {to}" + (f" ({entry.why})" if entry.why else "")
    return ""
