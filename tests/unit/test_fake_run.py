"""``--validate``: what is validated, on how many ranks, what a step shows, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torchtitan.models.common.attention import BaseAttention
from torchtitan.tools import utils

import torchtitan_ext  # noqa: F401
from tests.paths import ROOT
from tests.unit.test_train_configs import CLUSTER, FOLDER, header, ids
from torchtitan_ext import config as front
from torchtitan_ext import models, train
from torchtitan_ext.backbones import Backbone
from torchtitan_ext.errors import UserError
from torchtitan_ext.planning import fake_run
from torchtitan_ext.trainer import default_config

DEBUG = str(FOLDER / "ar" / "debug.toml")
METHODS = sorted(f.parent.name for f in FOLDER.glob("*/debug.toml"))

MEMORY = {"h100": 79 * 2**30, "gh200": 94 * 2**30}
"""Bytes of a GPU that programs can have."""

SPARE = 4 * 2**30
"""For what is no tensor: the CUDA context, NCCL's buffers, fragments."""


def outcome(*args, toml=DEBUG, ranks=2):
    config = front.parse(["--job.config_file", str(toml), *args], make_default=default_config)
    return fake_run.validate(config, ranks=ranks)


# --- the command line -----------------------------------------------------------------------


def test_its_own_options_are_taken_out_of_the_command_line():
    argv = ["--validate", "--job.config_file", "X.toml", "--world-size=16", "--training.steps", "3"]
    asked = fake_run.request(argv)
    assert asked.argv == ["--job.config_file", "X.toml", "--training.steps", "3"]
    assert (asked.world_size, asked.nodes) == (16, None)
    assert fake_run.request(["--nodes", "2"]).nodes == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nodes", "0"], "--nodes needs a number of at least 1, got '0'"),
        (["--nodes"], "--nodes needs a number of at least 1, got ''"),
        (["--world_size", "two"], "--world_size needs a number of at least 1, got 'two'"),
        (["--nodes", "2", "--world-size", "16"], "--nodes or --world-size, not both"),
    ],
)
def test_wrong_numbers_of_ranks(argv, words):
    with pytest.raises(UserError, match=words):
        fake_run.request(argv)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A run.\n# 64 GPUs (8 nodes of 8): 10 steps\n#   NGPU=2 CONFIG_FILE=x\n", (64, 8)),
        ("# 4 GPUs (1 node of 4): 10 steps\n", (4, 4)),
        ("# 1 GPU: 10 steps\n", (1, 1)),
        ("#   NGPU=2 CONFIG_FILE=train_configs/ar/debug.toml ./launch/run_train.sh\n", (2, 2)),
        ("# on one node of four H100\n[job]\n", None),
    ],
)
def test_ranks_that_a_file_states(text, expected):
    assert fake_run.stated_ranks(text) == expected


def test_ranks_asked_for_come_before_those_stated_and_these_before_degrees():
    def ranks(text="", shard=-1, **asked):
        argv = ["--job.config_file", DEBUG, "--parallelism.data_parallel_shard_degree", str(shard)]
        argv += ["--parallelism.tensor_parallel_degree", "2"]
        parallelism = front.parse(argv, make_default=default_config).parallelism
        return fake_run.ranks_of(fake_run.Request(argv=[], **asked), text=text, parallelism=parallelism)

    assert ranks("# 64 GPUs (8 nodes of 8)", world_size=6) == 6
    assert ranks("# 64 GPUs (16 nodes of 4)", nodes=2) == 8
    assert ranks(nodes=2) == 16
    assert ranks("# 64 GPUs (8 nodes of 8)") == 64
    assert ranks(shard=3) == 6
    with pytest.raises(UserError, match="number of ranks is open .* --nodes N or --world-size W"):
        ranks()


@pytest.mark.parametrize("argv", [["--help"], ["--validate", "--job.config_file", DEBUG, "-h"]])
def test_help_lists_the_options_that_are_no_keys(argv, capsys, monkeypatch):
    def parse(argv, *, make_default):
        raise SystemExit(0)

    monkeypatch.setattr(front, "parse", parse)  # prints the keys, which has a test of its own
    with pytest.raises(SystemExit):
        train.run(argv)
    printed = capsys.readouterr().out
    for option in ("--job.config_file", "--validate", "--nodes", "--world-size", "--help", train.DEBUG):
        assert option in printed, option


@pytest.mark.parametrize("toml", [DEBUG, str(FOLDER / "llama3" / "debug.toml")])
def test_a_spec_for_another_device_than_this_one(toml):
    argv = ["--job.config_file", toml, "--model.attention", "auto"]

    def kernels(**device):
        spec = models.build_spec(front.parse(argv, make_default=default_config), **device)
        return {
            type(c.inner_attention).__qualname__ for _, c, _, _ in spec.model.traverse(BaseAttention.Config)
        }

    assert len(kernels(device_type="cuda")) == 1
    assert kernels(device_type="cuda") != kernels(device_type="cpu")
    assert kernels() == kernels(device_type=utils.device_type)


# --- a step ---------------------------------------------------------------------------------


def test_a_step_shows_shards_shapes_memory_and_collectives():
    threads = torch.autograd.is_multithreading_enabled()
    before = dict(os.environ)
    shown = outcome("--training.global_batch_size", "96", ranks=4)
    assert (shown.ranks, shown.degrees) == (4, {"replicate": 1, "shard": 4, "tensor": 1})
    # Norms of 64 elements and matrices divide by four: a rank holds exactly a quarter.
    assert shown.parameters == shown.trained == 4 * shown.on_rank == 214_080
    assert (shown.microbatches, shown.global_batch) == (3, 96)
    assert shown.shapes == {"input": (8, 256), "positions": (8, 256), "labels": (8, 256)}
    memory = shown.memory
    # fp32; two moments, and a step count for each of the parameters.
    assert memory["parameters"] == 4 * shown.on_rank
    assert 0 < memory["optimizer states"] - 8 * shown.on_rank < 200
    assert memory["gradients"] >= 4 * shown.on_rank, "those of the microbatches before are held"
    # The logits of 8 x 256 tokens alone, fp32.
    assert memory["activations"] > 4 * 8 * 256 * 264
    # FSDP2 gathers a block in the forward and again in the backward; embedding, norm and head stay.
    units = 4 + 1
    assert shown.collectives["reduce_scatter"][0] == units
    assert shown.collectives["all_gather"][0] == 2 * units - 1
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    assert torch.autograd.is_multithreading_enabled() == threads


def test_tensor_parallel_and_hsdp_as_the_run_would():
    degrees = (
        "--parallelism.data_parallel_replicate_degree",
        "2",
        "--parallelism.tensor_parallel_degree",
        "2",
    )
    shown = outcome(*degrees, ranks=8)
    assert shown.degrees == {"replicate": 2, "shard": 2, "tensor": 2}
    assert shown.global_batch == 8 * 4
    # Norms are whole on every tensor-parallel rank: a little more than a quarter.
    assert 0 < shown.on_rank - shown.parameters / 4 < 1000
    # Gradients over the replicas, and the norms' over the tensor-parallel ranks.
    assert shown.collectives["all_reduce"][0] > outcome(ranks=2).collectives["all_reduce"][0] + 4


def test_what_dtensor_tries_on_global_shapes_is_no_memory_of_a_rank():
    args = (
        "--training.seq_len",
        "8",
        "--training.local_batch_size",
        "1",
        "--training.global_batch_size",
        "64",
    )
    shown = outcome(*args, ranks=64)
    # Units as they are gathered, their gradients, and little else; clipping and update see shards.
    assert sum(shown.memory.values()) < 2 * 4 * shown.parameters


@pytest.mark.parametrize("method", [m for m in METHODS if m != "ar"])
def test_every_method_makes_a_step(method):
    shown = outcome(toml=FOLDER / method / "debug.toml")
    assert shown.on_rank < shown.parameters
    assert sum(shown.memory.values()) > 12 * shown.on_rank * shown.trained / shown.parameters
    if method in ("tidar", "block_diffusion", "wedlm", "alodlm"):
        rows, data = shown.shapes["input"]
        assert (rows, data) == (8, 256), "a doubled sequence of 128"
    if method == "tdlm":
        assert shown.trained < shown.parameters / 2, "the backbone is frozen"


# --- what is refused ------------------------------------------------------------------------

REFUSED = {
    "mesh": (DEBUG, ["--parallelism.tensor_parallel_degree", "3"], 4, "tensor 3 .* got 4 processes"),
    "batch": (DEBUG, ["--training.global_batch_size", "20"], 2, "global_batch_size = 20 must be a multiple"),
    "heads": (DEBUG, ["--parallelism.tensor_parallel_degree", "4"], 4, "tensor_parallel_degree|heads"),
    "length": (DEBUG, ["--training.seq_len", "99999"], 2, "99999"),
    "pipeline": (DEBUG, ["--parallelism.pipeline_parallel_degree", "2"], 2, "pipeline_parallel_degree = 2"),
    "band": (FOLDER / "t2mlr" / "debug.toml", ["--t2mlr.end", "9"], 2, "not a band of layers"),
    "core": (FOLDER / "alodlm" / "debug.toml", ["--alodlm.end", "9"], 2, "not a core of layers"),
    "kernel": (FOLDER / "tidar" / "debug.toml", ["--model.attention", "varlen"], 2, "varlen"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused_in_one_line(case):
    toml, args, ranks, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as refused:
        outcome(*args, toml=toml, ranks=ranks)
    assert "\n" not in str(refused.value)
    assert not dist.is_initialized()


def test_a_model_whose_shapes_depend_on_its_data_is_refused(monkeypatch):
    plain = Backbone.hidden

    def hidden(self, tokens, *args):
        assert tokens.nonzero().shape[1] == 2
        return plain(self, tokens, *args)

    monkeypatch.setattr(Backbone, "hidden", hidden)
    with pytest.raises(UserError, match="depends on its data") as refused:
        outcome(toml=DEBUG, ranks=1)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(400)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the tokenizer has 400 tokens .* vocabulary of 264"):
        outcome("--model.hf_assets_path", str(tmp_path))


# --- the command ----------------------------------------------------------------------------


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "torchtitan_ext.train", "--validate", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_command_reports_a_real_cluster_config():
    done = command("--job.config_file", "train_configs/ar/smollm2-135M_h100.toml", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines()[1:])
    assert done.stdout.startswith("valid: train_configs/ar/smollm2-135M_h100.toml")
    assert lines["ranks"].strip() == "16 = replicate 1 x shard 16 x tensor 1"
    assert "134,515,008 parameters" in lines["model"]
    assert "1 microbatch of 32" in lines["step"]
    assert "10.49 billion tokens" in lines["run"]
    assert "fineweb_edu" in done.stdout and not (ROOT / "outputs" / "ar_smollm2-135M").exists()


def test_the_command_ends_with_one_line_and_code_2():
    done = command("--job.config_file", "train_configs/ar/smollm2-135M_h100.toml", "--world-size", "24")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: [training] global_batch_size = 512 must be a multiple of local_batch_size x data-parallel "
        "ranks = 32 x 24 = 768"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("path", CLUSTER, ids=ids)
def test_every_cluster_config_makes_a_step_and_fits(path):
    ranks, _ = fake_run.stated_ranks(path.read_text())
    shown = outcome(toml=path, ranks=ranks)
    memory = MEMORY["gh200" if path.stem.endswith("gh200") else "h100"]
    assert sum(shown.memory.values()) < memory - SPARE
    assert shown.global_batch == header(path)["batch"]
