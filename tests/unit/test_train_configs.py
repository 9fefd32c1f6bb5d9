"""Every shipped TOML parses and builds on the meta device; those for clusters say true numbers."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch

import torchtitan_ext  # noqa: F401
from tests.paths import ROOT
from torchtitan_ext import config as front
from torchtitan_ext import models
from torchtitan_ext.planning.fake_run import stated_ranks
from torchtitan_ext.trainer import default_config

FOLDER = ROOT / "train_configs"
FILES = sorted(FOLDER.rglob("*.toml"))
CLUSTER = [f for f in FILES if re.search(r"_(h100|gh200)$", f.stem) or f.stem.startswith("s5_")]
HEADER = re.compile(
    r"^# (?:1 GPU|(?P<gpus>\d+) GPUs \((?P<nodes>\d+) nodes? of (?P<each>\d+)\)): (?P<steps>[\d,]+) steps x "
    r"(?P<batch>[\d,]+) x (?P<length>[\d,]+) = (?P<tokens>[\d.]+)(?P<unit>[BM]) tokens\.",
    re.MULTILINE,
)


def ids(path):
    return str(path.relative_to(FOLDER))


@functools.cache
def load(path):
    """The config, which no test may change."""
    return front.load_toml(path, make_default=default_config)


def header(path):
    """What the comments state, as numbers: gpus, nodes, each, steps, batch, length, and tokens in words."""
    found = HEADER.search(path.read_text())
    assert found, f"{ids(path)} does not state its GPUs and tokens"
    words = found.groupdict(default="1")
    numbers = {k: int(v.replace(",", "")) for k, v in words.items() if k not in ("tokens", "unit")}
    return {**numbers, "tokens": words["tokens"], "unit": words["unit"]}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_parses_and_builds_on_meta(path):
    config = copy.deepcopy(load(path))
    spec = models.build_spec(config)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    parameters, flops = spec.model.get_nparams_and_flops(model, config.training.seq_len)
    assert parameters > 0 and flops > 0
    assert models.build_objective(config).terms


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_says_how_to_start_it(path):
    assert f"CONFIG_FILE={path.relative_to(ROOT)}" in path.read_text()


def test_each_method_has_a_debug_config():
    from torchtitan_ext.registry import METHODS

    for name in METHODS:
        assert (FOLDER / name / "debug.toml").is_file()


# --- configs for clusters ----------------------------------------------------------------


def test_each_method_of_a_paper_has_a_cluster_config():
    from torchtitan_ext.registry import METHODS

    # WeDLM and masked diffusion are what ALoDLM and TDLM stand on.
    assert {f.parent.name for f in CLUSTER} == set(METHODS) - {"wedlm", "mdlm"}


@pytest.mark.parametrize("path", CLUSTER, ids=ids)
def test_tokens_in_the_comment_are_those_of_the_run(path):
    training, stated = load(path).training, header(path)
    keys = ("steps", "global_batch_size", "seq_len")
    assert [stated["steps"], stated["batch"], stated["length"]] == [getattr(training, k) for k in keys]
    tokens = training.steps * training.global_batch_size * training.seq_len
    scale = {"B": 1e9, "M": 1e6}[stated["unit"]]
    assert stated["tokens"] == f"{tokens / scale:.2f}"


@pytest.mark.parametrize("path", CLUSTER, ids=ids)
def test_ranks_in_the_comment_fit_the_batch_and_the_command(path):
    config, stated, text = load(path), header(path), path.read_text()
    gpus, nodes, each = stated["gpus"], stated["nodes"], stated["each"]
    assert gpus == nodes * each
    assert stated_ranks(text) == (gpus, each)
    parallelism, training = config.parallelism, config.training
    model_ranks = parallelism.tensor_parallel_degree * parallelism.pipeline_parallel_degree
    replicas, rest = divmod(gpus, model_ranks)
    assert rest == 0 and replicas % parallelism.data_parallel_replicate_degree == 0
    # Global batch = local batch x data-parallel ranks x microbatches.
    microbatches, rest = divmod(training.global_batch_size, training.local_batch_size * replicas)
    assert rest == 0 and microbatches >= 1
    if nodes > 1:
        assert f"NNODES={nodes} NGPU={each} MASTER_ADDR=" in text and "./launch/run_multinode.sh" in text
    else:
        assert f"NGPU={each} CONFIG_FILE=" in text and "./launch/run_train.sh" in text
    if each == 4 and config.model.name == "tdlm":
        assert path.stem.endswith("_gh200")


@pytest.mark.parametrize("path", CLUSTER, ids=ids)
def test_cluster_configs_save_in_the_background_and_often_enough(path):
    config = load(path)
    checkpoint = config.checkpoint
    assert checkpoint.enable and checkpoint.async_mode == "async_with_pinned_mem"
    # A run that dies loses at most a fifth, or half where it is short.
    assert checkpoint.interval <= config.training.steps / (5 if config.training.steps > 1000 else 2)
    assert checkpoint.keep_latest_k >= 2, "the newest may be the one that was being written"
    assert config.compile.enable and config.metrics.enable_tensorboard
    if checkpoint.initial_load_path:
        # Published weights, or those of another run here, which the comment names.
        path_, own = checkpoint.initial_load_path, "/checkpoint/step-"
        assert checkpoint.initial_load_in_hf or own in path_
        assert config.model.hf_assets_path
        if own in path_:
            before = Path(path_.split(own)[0]).name
            assert f"CONFIG_FILE=train_configs/t2mlr/{before}.toml" in path.read_text()
            run = load(FOLDER / "t2mlr" / f"{before}.toml")
            assert (run.model.name, run.model.flavor) == (config.model.name, config.model.flavor)
            assert path_.endswith(f"step-{run.training.steps}")


@pytest.mark.parametrize("path", CLUSTER, ids=ids)
def test_data_of_cluster_configs_suffice(path):
    config, gpus = load(path), header(path)["gpus"]
    loader = config.dataloader
    if config.model.name == "tdlm":
        assert {s.dataset for s in loader.sources} == {"trajectories"}
        for source in loader.sources:  # the commands in the comments make them
            assert source.dataset_path.removesuffix("128").removesuffix("256") in path.read_text()
        return
    assert loader.dataset in ("fineweb_edu", "chat", "group_retrieval")
    if loader.dataset == "chat":
        assert loader.dataset_path.startswith("./data/") and loader.dataset_path in path.read_text()
    if loader.dataset == "fineweb_edu":
        size = int(re.fullmatch(r"sample-(\d+)BT", loader.subset)[1]) * 1e9
        training = config.training
        # One epoch; the samples are counted with another tokenizer.
        assert training.steps * training.global_batch_size * training.seq_len < 1.06 * size
        files = {10: 14, 100: 140, 350: 490}[int(size / 1e9)]
        assert loader.num_streams <= files, "more streams than files read every file several times"
        assert loader.num_streams == 14 or loader.num_streams % gpus == 0
        if config.validator.enable:
            assert config.validator.dataloader.subset == loader.subset


# --- the papers' numbers -------------------------------------------------------------------

T2MLR = {
    "optimizer.lr": 5e-4,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.98,
    "optimizer.weight_decay": 0.01,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.min_lr_factor": 0.001,
    "training.global_batch_size": 256,
    "training.seq_len": 2048,
    "training.steps": 20000,
}
T2MLR_TUNED = {
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.weight_decay": 0.01,
    "lr_scheduler.decay_type": "cosine",
}
GSM8K_AUG = {**T2MLR_TUNED, "optimizer.lr": 5e-5, "training.steps": 8000}
HOTPOTQA = {**T2MLR_TUNED, "optimizer.lr": 1e-4, "training.steps": 5000}
TIDAR = {
    "optimizer.lr": 1e-5,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.min_lr_factor": 0.3,
    "training.global_batch_size": 512,
    "training.seq_len": 4096,
    "training.steps": 23842,
    "lr_scheduler.warmup_steps": 238,
}
ALODLM = {
    "optimizer.lr": 1e-5,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.weight_decay": 0.01,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.warmup_steps": 1035,
    "training.seq_len": 4096,
    "training.steps": 34512,
    "training.max_norm": 1.0,
    "alodlm.block_size": 32,
    "alodlm.passes": 4,
    "alodlm.a": 0.1,
    "alodlm.b": 1.0,
    "alodlm.prior_decay": 0.4,
    "alodlm.feedback": "cumulative",
    "alodlm.w_ar": 1.0,
}
PAPER = {
    **{
        f"t2mlr/smollm2-135M_{a}-{b}_h100": {**T2MLR, "t2mlr.start": a, "t2mlr.end": b}
        for a, b in ((1, 30), (5, 26), (9, 22), (13, 18), (15, 16))
    },
    "t2mlr/smollm2-135M_9-22_50B_h100": {**T2MLR, "training.steps": 100000},
    "t2mlr/smollm2-360M_9-24_h100": {**T2MLR, "t2mlr.start": 9, "t2mlr.end": 24},
    "t2mlr/smollm2-360M_9-24_50B_h100": {**T2MLR, "training.steps": 100000},
    "t2mlr/smollm2-1B_9-24_h100": {**T2MLR, "t2mlr.start": 9, "t2mlr.end": 24},
    "t2mlr/smollm2-360M_baseline_h100": T2MLR,
    "t2mlr/smollm2-360M_baseline_50B_h100": {**T2MLR, "training.steps": 100000},
    "t2mlr/smollm2-1B_baseline_h100": T2MLR,
    "t2mlr/smollm2-135M-584_baseline_50B_h100": {**T2MLR, "training.steps": 100000},
    "t2mlr/smollm2-135M_9-22_gsm8k_aug_h100": {**GSM8K_AUG, "t2mlr.start": 9, "t2mlr.end": 22},
    "t2mlr/smollm2-135M_9-22_hotpotqa_h100": {**HOTPOTQA, "t2mlr.start": 9, "t2mlr.end": 22},
    "t2mlr/smollm2-135M-584_baseline_gsm8k_aug_h100": {**GSM8K_AUG, "model.name": "ar"},
    "t2mlr/smollm2-135M-584_baseline_hotpotqa_h100": {**HOTPOTQA, "model.name": "ar"},
    "t2mlr/smollm2-1.7B_retrofit_baseline_h100": {**T2MLR_TUNED, "model.name": "ar"},
    "t2mlr/smollm2-135M_baseline_h100": T2MLR,
    "t2mlr/smollm2-135M-584_baseline_h100": {**T2MLR, "model.flavor": "smollm2-135M-584"},
    **{f"looped/smollm2-135M-{kind}_h100": T2MLR for kind in ("full", "middle", "pause")},
    "t2mlr/s5_retrieval": {"optimizer.lr": 1e-3, "training.global_batch_size": 64, "training.steps": 150000},
    "t2mlr/s5_retrieval_transformer": {"training.global_batch_size": 64, "training.steps": 400000},
    "t2mlr/s5_retrieval_lstm": {"looped.lstm_hidden": 456, "looped.lstm_layers": 4, "training.steps": 400000},
    **{
        f"tidar/qwen2_5-1.5B_block{size}_h100": {**TIDAR, "tidar.block_size": size, "tidar.alpha": 1.0}
        for size in (4, 8, 16)
    },
    "tidar/qwen3-8B_block16_h100": {
        **TIDAR,
        "training.steps": 71526,
        "lr_scheduler.warmup_steps": 715,
        "activation_checkpoint.mode": "full",
        "tidar.block_size": 16,
    },
    "block_diffusion/qwen2_5-1.5B_block16_h100": {**TIDAR, "block_diffusion.block_size": 16},
    "alodlm/qwen3-1.7B_h100": {**ALODLM, "alodlm.start": 0, "alodlm.end": 28},
    "alodlm/qwen3-8B_h100": {**ALODLM, "alodlm.start": 10, "alodlm.end": 26, "alodlm.checkpoint_core": 2},
    "alodlm/qwen3-8B_last_h100": {**ALODLM, "alodlm.start": 20, "alodlm.end": 36},
    "alodlm/qwen3-8B_K2_h100": {**ALODLM, "alodlm.passes": 2},
    "alodlm/qwen3-8B_K8_h100": {**ALODLM, "alodlm.passes": 8},
    "alodlm/qwen3-8B_exit_only_h100": {**ALODLM, "alodlm.intermediate_supervision": False},
    "tdlm/llada-8B_gh200": {"training.steps": 750, "tdlm.count": 16, "tdlm.heads": 4, "tdlm.head_dim": 64},
    "tdlm/llada-8B_1x64_gh200": {"training.steps": 500, "tdlm.heads": 1, "tdlm.head_dim": 64},
    "tdlm/dream-7B_h100": {"training.steps": 750, "tdlm.count": 14, "tdlm.heads": 4, "tdlm.head_dim": 84},
}


@pytest.mark.parametrize("name", sorted(PAPER))
def test_settings_that_a_paper_gives(name):
    config = load(FOLDER / f"{name}.toml")
    for key, expected in PAPER[name].items():
        section, field = key.split(".")
        assert getattr(getattr(config, section), field) == expected, key
