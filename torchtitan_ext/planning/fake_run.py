"""One training step of any TOML on any machine, on tensors without data.

The run is built as on the cluster, for its real number of ranks: the model, its parallelism
(FSDP2, HSDP, tensor parallel), activation checkpointing, the method's objective, the optimizer.
Process groups and tensors are fake: every shape, placement and collective is real, no number is.

What differs from a run: torch.compile is off, the attention kernel is replaced by an operation of
the same shapes, the batch is random tokens of which each is supervised, nothing is read or written.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torchtitan_ext import config as front
from torchtitan_ext import device
from torchtitan_ext.errors import UserError
from torchtitan_ext.planning.fake_trainer import FakeTrainer
from torchtitan_ext.trainer import ExtTrainer, default_config

FLAG = "--validate"
GPUS_A_NODE = 8
_HEADER = re.compile(r"^# (\d+) GPUs?\b(?:.*?\b(?:nodes?|node) of (\d+))?", re.MULTILINE)
_START = re.compile(r"^#.*\bNGPU=(\d+) CONFIG_FILE=", re.MULTILINE)


# --- what to validate ------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Request:
    """A command line with ``--validate``."""

    argv: list[str]
    """What is left for the config."""

    world_size: int | None = None
    nodes: int | None = None


def request(argv: list[str]) -> Request:
    """Take ``--validate``, ``--nodes N`` and ``--world-size W`` out of a command line."""
    found = Request(argv=[])
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name == FLAG:
            continue
        if name.startswith("--") and key in ("nodes", "world_size"):
            setattr(found, key, _count(name, value if equals else next(rest, "")))
        else:
            found.argv.append(word)
    if found.nodes is not None and found.world_size is not None:
        raise UserError("command line: give --nodes or --world-size, not both")
    return found


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"command line: {name} needs a number of at least 1, got {text!r}")
    return int(text)


def stated_ranks(text: str) -> tuple[int, int] | None:
    """Ranks and ranks of a node that a TOML's comments state, or None.

    ``# 64 GPUs (8 nodes of 8)`` at the start of a line, else the ``NGPU=2`` of the command that starts
    it on one machine.
    """
    if header := _HEADER.search(text):
        ranks = int(header[1])
        return ranks, int(header[2]) if header[2] else min(ranks, GPUS_A_NODE)
    if start := _START.search(text):
        return int(start[1]), int(start[1])
    return None


def ranks_of(asked: Request, *, text: str, parallelism: Any) -> int:
    """The number of ranks: as asked, as the TOML states, or as its degrees multiply to.

    Errors: UserError where none of them says.
    """
    if asked.world_size is not None:
        return asked.world_size
    stated = stated_ranks(text)
    if asked.nodes is not None:
        return asked.nodes * (stated[1] if stated and stated[1] > 1 else GPUS_A_NODE)
    if stated is not None:
        return stated[0]
    shard = parallelism.data_parallel_shard_degree
    if shard < 0:
        raise UserError(
            "--validate: the number of ranks is open ([parallelism] data_parallel_shard_degree = -1); give "
            "--nodes N or --world-size W, or state it in the file as '# 64 GPUs (8 nodes of 8)'"
        )
    fixed = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
    return shard * fixed * parallelism.pipeline_parallel_degree * parallelism.context_parallel_degree


# --- the step --------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What a step has shown of rank 0."""

    ranks: int
    degrees: dict[str, int]
    parameters: int
    trained: int
    """Parameters with a gradient."""

    on_rank: int
    """Elements of parameters that rank 0 holds."""

    microbatches: int
    """Of a step, on a rank."""

    global_batch: int
    """Rows of a step."""

    shapes: dict[str, tuple[int, ...]]
    """Of a prepared microbatch."""

    memory: dict[str, int]
    """Bytes by what they are held for, where their sum is greatest."""

    collectives: dict[str, tuple[int, int]]
    """Calls and bytes of each kind in a step of one microbatch."""

    seconds: float


def validate(config: ExtTrainer.Config, *, ranks: int) -> Outcome:
    """Build and run one step of a config as rank 0 of ``ranks`` on tensors without data.

    The config is changed. Errors: UserError for whatever would stop the run at its start, and for
    what cannot be run without data.
    """
    begin = time.perf_counter()
    _prepare(config)
    with _world(ranks):
        trainer = _build(config)
        microbatches = trainer.gradient_accumulation_steps
        try:
            trainer.later_step()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise UserError(
                f"--validate: what [model] name = {config.model.name!r} runs here depends on its data "
                f"({error.func}), which a run without data does not have; it was built without an error"
            ) from error
        finally:
            trainer.close()
        outcome = _outcome(trainer, ranks=ranks, microbatches=microbatches)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _prepare(config: ExtTrainer.Config) -> None:
    """Leave out what needs the cluster's devices or files."""
    if config.parallelism.pipeline_parallel_degree > 1:
        raise UserError(
            f"--validate: [parallelism] pipeline_parallel_degree = "
            f"{config.parallelism.pipeline_parallel_degree} cannot be validated (allowed: 1)"
        )
    if config.training.enable_cpu_offload:
        raise UserError("--validate: [training] enable_cpu_offload = true cannot be validated")
    config.comm.mode = "fake_backend"
    config.compile.enable = False
    config.checkpoint.enable = config.checkpoint.create_seed_checkpoint = False
    config.validator.enable = False
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.metrics.log_freq = sys.maxsize  # a line of the log needs numbers
    if config.activation_checkpoint.mode == "memory_budget":  # a pass of the compiler
        config.activation_checkpoint.mode = "selective"
    if not Path(config.model.hf_assets_path or ".").exists():
        config.tokenizer.kind = "byte"
    device.cpu_peak_flops()  # it measures, which it could not do on tensors without data


@contextlib.contextmanager
def _world(ranks: int) -> Generator[None]:
    """The environment and the process group of rank 0 of a run."""
    before, threads = dict(os.environ), torch.autograd.is_multithreading_enabled()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), NGPU=str(ranks))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # What DTensor remembers of operations names meshes, and those of this world are gone.
        _clear_sharding_prop_cache()
        torch.autograd.set_multithreading_enabled(threads)
        # torchtitan sets some more, such as PYTHONHASHSEED.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _build(config: ExtTrainer.Config) -> FakeTrainer:
    try:
        return FakeTrainer(config)
    except (ValueError, NotImplementedError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(str(error)) from error


def _outcome(trainer: FakeTrainer, *, ranks: int, microbatches: int) -> Outcome:
    parameters, dims = trainer.parameters(), trainer.parallel_dims
    collectives: dict[str, tuple[int, int]] = {}
    for message in trainer.tracker.messages:
        calls, nbytes = collectives.get(message.kind, (0, 0))
        collectives[message.kind] = (calls + 1, nbytes + message.nbytes)
    return Outcome(
        ranks=ranks,
        degrees={"replicate": dims.dp_replicate, "shard": dims.dp_shard, "tensor": dims.tp},
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        on_rank=sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters),
        microbatches=microbatches,
        global_batch=trainer.config.training.local_batch_size
        * dims.dp_replicate
        * dims.dp_shard
        * microbatches,
        shapes=trainer.shapes,
        memory=max((s.nbytes for s in trainer.tracker.segments()), key=lambda held: sum(held.values())),
        collectives=collectives,
        seconds=0.0,
    )


# --- the command -----------------------------------------------------------------------


def run(argv: list[str]) -> None:
    """``python -m torchtitan_ext.train --validate --job.config_file X.toml [--nodes N]``."""
    warnings.simplefilter("ignore")  # PyTorch's, of CPU meshes and of views; the run itself prints them
    asked = request(argv)
    config = front.parse(asked.argv, make_default=default_config)
    path = _config_file(asked.argv)
    ranks = ranks_of(asked, text=path.read_text() if path else "", parallelism=config.parallelism)
    absent = _not_here(config)
    named = (config.model.name, config.model.flavor)
    outcome = validate(config, ranks=ranks)
    print(f"valid: {path or 'the defaults of ' + named[0]}")
    print(report(outcome, config, absent=absent))


def _config_file(argv: list[str]) -> Path | None:
    """The TOML of a command line that :func:`front.parse` has accepted."""
    found = None
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") == "__job.config_file":
            found = value if equals else argv[i + 1]
    return Path(found) if found else None


def _not_here(config: ExtTrainer.Config) -> list[str]:
    """Files of the run that this machine lacks, or that were not opened."""
    absent = []
    if (assets := config.model.hf_assets_path) and not Path(assets).exists():
        absent.append(f"tokenizer ({assets})")
    for source in config.dataloader.sources or [config.dataloader]:
        absent.append(f"data ({source.dataset_path or source.dataset})")
    if weights := config.checkpoint.initial_load_path:
        absent.append(f"initial weights ({os.path.relpath(weights)})")
    return absent


def report(outcome: Outcome, config: ExtTrainer.Config, *, absent: list[str]) -> str:
    """The outcome as lines."""
    degrees = " x ".join(f"{name} {degree}" for name, degree in outcome.degrees.items())
    training = config.training
    lines = {
        "ranks": f"{outcome.ranks} = {degrees}",
        "model": f"{config.model.name} {config.model.flavor}: {outcome.parameters:,} parameters"
        + (f", {outcome.trained:,} trained" if outcome.trained < outcome.parameters else "")
        + f", {outcome.on_rank:,} on a rank",
        "step": f"{outcome.global_batch} rows of {training.seq_len:,} = "
        f"{outcome.global_batch * training.seq_len:,} tokens; {outcome.microbatches} "
        f"{'microbatch' if outcome.microbatches == 1 else 'microbatches'} of {training.local_batch_size}",
        "run": f"{training.steps:,} steps = "
        f"{training.steps * outcome.global_batch * training.seq_len / 1e9:,.2f} billion tokens",
        "batch": ", ".join(f"{name} {list(shape)}" for name, shape in outcome.shapes.items()),
        "peak memory": f"{_gib(sum(outcome.memory.values()))} GiB on a rank, eager: "
        + ", ".join(f"{kind} {_gib(n)}" for kind, n in outcome.memory.items() if _gib(n) != "0.00"),
        "collectives": ", ".join(f"{calls} {kind}" for kind, (calls, _) in outcome.collectives.items())
        or "none",
        "not checked": "; ".join(absent) or "nothing",
        "seconds": f"{outcome.seconds:.0f}",
    }
    width = max(map(len, lines))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in lines.items())


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"
