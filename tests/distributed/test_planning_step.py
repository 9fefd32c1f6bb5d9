"""The planner's step against real ones: collectives to the byte, memory against the CPU's allocator."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.distributed import jobs, planning_jobs
from tests.distributed.harness import run
from tests.unit import test_trajectories_common as made
from torchtitan_ext import config as front
from torchtitan_ext import models
from torchtitan_ext.planning import layers, step, tracker
from torchtitan_ext.trainer import default_config
from torchtitan_ext.trajectories.shards import Trajectory

SHORT = ["--training.seq_len", "48"]
MODELS = {
    "ar": [],
    "looped": ["--looped.start", "2", "--looped.end", "3", "--looped.loops", "3"],
    "tidar": ["--tidar.block_size", "4", *SHORT],
    "t2mlr": [
        *("--t2mlr.start", "2", "--t2mlr.end", "3"),
        *("--t2mlr.forward_depth", "6", "--t2mlr.backward_depth", "2"),
    ],
    "alodlm": ["--alodlm.start", "1", "--alodlm.end", "3", "--alodlm.passes", "3", *SHORT],
    "tdlm": [
        *("--model.flavor", "llada-debug", "--training.seq_len", "24", "--tdlm.mask_token_id", "263"),
        *("--tdlm.head_dim", "6", "--tdlm.heads", "2", "--tdlm.states", "3"),
    ],
    "mdlm": ["--model.flavor", "llada-debug", *SHORT],
    "wedlm": ["--wedlm.block_size", "8", *SHORT],
    "block_diffusion": ["--block_diffusion.block_size", "4", *SHORT],
}
FSDP = ["--training.local_batch_size", "4"]
TENSOR = ["--parallelism.tensor_parallel_degree", "2"]
HSDP = [
    *("--training.local_batch_size", "2", "--parallelism.data_parallel_replicate_degree", "2"),
    *("--parallelism.data_parallel_shard_degree", "2"),
]
NO_SP = ["--parallelism.enable_sequence_parallel", "false"]
SELECTIVE = ["--activation_checkpoint.mode", "selective"]
FULL = ["--activation_checkpoint.mode", "full"]
CHUNKS = ["--loss.num_chunks", "4"]
MORE = ["--training.local_batch_size", "2", "--training.global_batch_size", "8"]


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def case_id(value):
    return "_".join(value)[:60] if isinstance(value, list) else str(value)


def measured(folder: Path, args: list[str], *, world: int) -> tuple[step.Step, int]:
    """The planner's step of the same config, and the microbatches of a step."""
    argv = ["--job.config_file", str(folder / "config.toml"), *args]
    config = front.parse(argv, make_default=default_config)
    spec = models.build_spec(config)
    config.model_spec = spec
    config.loss.global_vocab_size = spec.model.vocab_size
    training = config.training
    ranks = world // config.parallelism.tensor_parallel_degree
    microbatches = max(training.global_batch_size // (training.local_batch_size * ranks), 1)
    with step.fake_world(world):
        found = step.measure(config, spec, world=world, accumulates=microbatches > 1, stand_in=None)
    return found, microbatches


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory) -> list[str]:
    """A set for TDLM's loader, which is opened and not read: the rows are the planner's."""
    folder = tmp_path_factory.mktemp("trajectories") / "set"
    steps = list(range(1, 9))
    rows = [Trajectory(i, [1, 2, 3], [5] * 8, steps, 8, None) for i in range(4)]
    tokenizer = default_config({"name": "ar"}).tokenizer.build(tokenizer_path="")
    made.made_up_set(folder, rows, tokenizer=tokenizer)
    return ["--dataloader.dataset", "trajectories", "--dataloader.dataset_path", str(folder)]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("method", "world", "args"),
    [
        ("ar", 4, [*HSDP, *SELECTIVE]),
        ("ar", 2, [*TENSOR, *FULL]),
        ("ar", 2, [*MORE, *CHUNKS, *SELECTIVE, "--training.mixed_precision_param", "bfloat16"]),
        ("looped", 2, FSDP),
        ("tidar", 2, [*TENSOR, *NO_SP]),
        slow("ar", 2, [*TENSOR, *NO_SP]),
        slow("ar", 4, [*FSDP, *TENSOR]),
        slow("ar", 2, [*FSDP, "--parallelism.fsdp_reshard_after_forward", "always"]),
        slow("ar", 2, [*FSDP, "--parallelism.fsdp_reshard_after_forward", "never"]),
        slow("looped", 2, TENSOR),
        slow("looped", 2, [*FSDP, "--looped.core_sharding", "layer"]),
        slow(
            "looped", 2, ["--looped.kind", "pause", "--looped.start", "0", "--looped.end", "0", *FSDP, *SHORT]
        ),
        slow("tidar", 2, FSDP),
        slow("tidar", 4, HSDP),
        slow("t2mlr", 2, FSDP),
        slow("t2mlr", 2, TENSOR),
        slow("t2mlr", 2, [*FSDP, "--t2mlr.core_sharding", "layer"]),
        slow("alodlm", 2, FSDP),
        slow("alodlm", 2, [*FSDP, *CHUNKS]),
        slow("alodlm", 2, TENSOR),
        slow("tdlm", 2, FSDP),
        slow("tdlm", 2, TENSOR),
        slow("mdlm", 2, FSDP),
        slow("wedlm", 2, FSDP),
        slow("block_diffusion", 2, FSDP),
    ],
    ids=case_id,
)
def test_collectives_are_those_of_a_real_step(method, world, args, trajectories, tmp_path):
    """Number and bytes of each, on every rank."""
    args = ["--model.name", method, *MODELS[method], *args, *(trajectories if method == "tdlm" else [])]
    real = run(planning_jobs.collectives, world=world, folder=str(tmp_path), args=args, timeout=400)
    found, microbatches = measured(tmp_path, args, world=world)
    planned: Counter[tuple[str, int, int]] = Counter()
    for message in found.messages:
        times = microbatches if message.phase == step.MICROBATCH else 1
        planned[message.kind, len(found.groups[message.group][1]), message.nbytes] += times
    assert len(planned) > 2
    for counts in real:
        assert counts == dict(planned)


@pytest.mark.parametrize(
    ("method", "world", "args"),
    [
        ("ar", 1, []),
        ("ar", 2, [*SELECTIVE, "--training.mixed_precision_param", "bfloat16"]),
        ("tidar", 1, []),
        slow("ar", 1, SELECTIVE),
        slow("ar", 1, FULL),
        slow("ar", 2, CHUNKS),
        slow("ar", 2, TENSOR),
        slow("ar", 2, MORE),
        slow("looped", 1, []),
        slow("looped", 2, FULL),
        slow("t2mlr", 1, []),
        slow("alodlm", 1, []),
        slow("alodlm", 1, ["--alodlm.checkpoint_core", "1"]),
        slow("tdlm", 1, []),
        slow("mdlm", 1, []),
        slow("wedlm", 1, []),
    ],
    ids=case_id,
)
def test_peak_memory_is_that_of_the_allocator(method, world, args, trajectories, tmp_path):
    """What a step holds at most beyond parameters and optimizer states; activations dominate it."""
    long = ["--training.seq_len", "256", "--training.local_batch_size", "2"]
    args = [
        "--model.name",
        method,
        *MODELS[method],
        *long,
        *args,
        *(trajectories if method == "tdlm" else []),
    ]
    real = run(planning_jobs.peak_memory, world=world, folder=str(tmp_path), args=args, timeout=400)
    found, _ = measured(tmp_path, args, world=world)
    held = max(found.segments, key=lambda segment: sum(segment.nbytes.values())).nbytes
    kept = (tracker.PARAMETERS, tracker.BUFFERS, tracker.OPTIMIZER)
    planned = sum(held.values()) - sum(held[label] for label in kept)
    assert held[tracker.ACTIVATIONS] > 0.5 * planned
    for nbytes in real:
        assert planned == pytest.approx(nbytes, rel=0.05)


def test_a_parameter_of_the_plan_is_one_of_the_run(tmp_path):
    """Static memory: shards of parameters and both moments, tied weights once."""
    (tmp_path / "config.toml").write_text(jobs.CONFIG)
    found, _ = measured(tmp_path, FSDP, world=4)
    config = front.parse(["--job.config_file", str(tmp_path / "config.toml")], make_default=default_config)
    with torch.device("meta"):
        model = models.build_spec(config).model.build()
    shard = sum(-(-p.shape[0] // 4) * p[0].numel() * 4 for p in model.parameters())
    held = layers._summed(found, places={}).peak()
    assert held[tracker.PARAMETERS] == shard
    steps = held[tracker.OPTIMIZER] - 2 * shard
    assert 0 <= steps <= 8 * len(list(model.parameters()))
