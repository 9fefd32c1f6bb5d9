"""TDLM on several processes: the losses and gradients of one, and a backbone that stays as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.distributed import jobs
from tests.distributed.harness import run
from tests.unit import test_trajectories_common as made
from torchtitan_ext import registry
from torchtitan_ext.initialization import seed_from
from torchtitan_ext.methods.tdlm.temporal import sample_steps
from torchtitan_ext.trainer import default_config
from torchtitan_ext.trajectories.shards import Trajectory

TEMPORAL = ["--tdlm.head_dim", "6", "--tdlm.heads", "2", "--tdlm.states", "3", "--tdlm.mask_token_id", "263"]
BASE = ["--model.name", "tdlm", "--model.flavor", "llada-debug", "--training.seq_len", "24", *TEMPORAL]
TENSOR = ["--parallelism.tensor_parallel_degree", "2"]
NO_SP = ["--parallelism.enable_sequence_parallel", "false"]
SMALLER = ["--training.local_batch_size", "4"]
LAYOUTS = {
    "fsdp2": (2, SMALLER),
    "fsdp2_full_chunked": (2, [*SMALLER, "--activation_checkpoint.mode", "full", "--loss.num_chunks", "4"]),
    "fsdp2_selective": (2, [*SMALLER, "--activation_checkpoint.mode", "selective"]),
    "tp2": (2, TENSOR),
    "tp2_no_sp_chunked": (2, [*TENSOR, *NO_SP, "--loss.num_chunks", "4"]),
    "fsdp2_tp2": (4, [*SMALLER, *TENSOR]),
    "accumulated": (1, ["--training.local_batch_size", "2", "--training.global_batch_size", "8"]),
}
QUICK = ("fsdp2_full_chunked", "tp2", "tp2_no_sp_chunked")


def noise(trainer: Any) -> None:
    """Larger embeddings and temporal parameters, the same in every layout, so that all gradients matter."""
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            if name.endswith("tok_embeddings.weight"):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.data.mul_(50)
            if ".temporal." not in name:
                continue
            full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.15
            if isinstance(parameter, DTensor):
                full = distribute_tensor(
                    full, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            with torch.no_grad():
                parameter.copy_(full)


def keyed_states(trainer: Any) -> None:
    """Sampled steps that are a function of the row alone, so that every layout has the same."""
    states = trainer.objective.states

    def draw(reveal_step_BL: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
        rows = []
        for row in reveal_step_BL:
            own = torch.Generator().manual_seed(seed_from(*row.tolist()))
            rows.append(sample_steps([int(row.max())], states=states, generator=own))
        return torch.cat(rows)

    trainer.objective.draw = draw


def _change(trainer: Any) -> None:
    noise(trainer)
    keyed_states(trainer)


def _register() -> None:
    for name in ("mdlm", "tdlm"):
        registry.METHODS.setdefault(name, f"torchtitan_ext.methods.{name}")


def gradients(folder: str, args: list[str]) -> dict[str, torch.Tensor]:
    _register()
    return jobs.gradients(folder, args, change=_change)


def train(folder: str, args: list[str]) -> dict[str, Any]:
    _register()
    return jobs.train(folder, args, with_weights=True)


def trained(folder: str, args: list[str]) -> dict[str, Any]:
    """Weights before and after a run, and the names of the parameters with optimizer state."""
    _register()
    trainer = jobs.build(folder, args)
    before = jobs.weights(trainer)
    trainer.train()
    (part,) = trainer.model_parts
    names = {parameter: name for name, parameter in part.named_parameters()}
    state = sorted(names[p] for optimizer in trainer.optimizers for p in optimizer.state)
    result = {"before": before, "after": jobs.weights(trainer), "state": state}
    jobs.finish(trainer)
    return result


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Arguments that choose a set of 16 trajectories of 6 to 9 tokens in unequal orders."""
    folder = tmp_path_factory.mktemp("data") / "set"
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(16):
        new = 6 + i % 4
        prompt = torch.randint(260, (3 + i % 5,), generator=generator).tolist()
        response = torch.randint(260, (new,), generator=generator).tolist()
        steps = (torch.randperm(new, generator=generator) + 1).clamp(max=6).tolist()
        rows.append(Trajectory(i, prompt, response, steps, new, None))
    tokenizer = default_config({"name": "ar"}).tokenizer.build(tokenizer_path="")
    made.made_up_set(folder, rows, tokenizer=tokenizer)
    return ["--dataloader.dataset", "trajectories", "--dataloader.dataset_path", str(folder)]


@pytest.fixture(scope="module")
def single(data, tmp_path_factory):
    return run(gradients, world=1, folder=str(tmp_path_factory.mktemp("one")), args=[*BASE, *data])[0]


def check(got, want):
    assert got.keys() == want.keys() and len(want) == 10
    for name, gradient in got.items():
        assert ".temporal." in name and want[name].abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, want[name], atol=2e-6, rtol=2e-3, msg=name)


@pytest.mark.parametrize(
    "layout",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(LAYOUTS)],
)
def test_gradients_are_those_of_one_process(layout, data, single, tmp_path):
    world, args = LAYOUTS[layout]
    check(run(gradients, world=world, folder=str(tmp_path), args=[*BASE, *data, *args])[0], single)


@pytest.mark.parametrize("shift", [pytest.param("literal", marks=pytest.mark.slow), "moved"])
def test_shifted_gradients_are_those_of_one_process(shift, data, tmp_path):
    """The moved correction crosses from one rank's part of the sequence to another's."""
    args = ["--model.flavor", "dream-debug", "--tdlm.shift", shift]
    results = []
    for name, world, extra in (("one", 1, []), ("two", 2, TENSOR)):
        (tmp_path / name).mkdir()
        found = [*BASE, *args, *_dream(data, tmp_path), *extra]
        results.append(run(gradients, world=world, folder=str(tmp_path / name), args=found)[0])
    check(results[1], results[0])


def _dream(data: list[str], folder: Path) -> list[str]:
    """The same trajectories as if Dream had made them."""
    from torchtitan_ext import backbones

    target = folder / "set"
    if not target.exists():
        tokenizer = default_config({"name": "ar"}).tokenizer.build(tokenizer_path="")
        size = backbones.lookup("dream-debug")
        rows = made.trajectories_of(Path(data[-1]))
        made.made_up_set(target, rows, tokenizer=tokenizer, family=size.family, parameters=size.n_params)
    return [*data[:-1], str(target)]


def test_training_changes_the_temporal_parameters_alone(data, tmp_path, monkeypatch):
    """They alone have optimizer state, too; the checkpoint is that of a whole model."""
    from torchtitan_ext.checkpoint.load import load_model

    args = [*BASE, *data, *SMALLER, "--training.steps", "3", "--checkpoint.enable"]
    result = run(trained, world=2, folder=str(tmp_path), args=args)[0]
    temporal = sorted(name for name in result["after"] if ".temporal." in name)
    for name, weight in result["after"].items():
        # W_O starts at 0, so the other matrices move from the second step on.
        assert torch.equal(weight, result["before"][name]) == (name not in temporal), name
    assert result["state"] == temporal and len(temporal) == 10
    for name in ("mdlm", "tdlm"):
        monkeypatch.setitem(registry.METHODS, name, f"torchtitan_ext.methods.{name}")
    for name, weight in load_model(tmp_path / "out").model.state_dict().items():
        assert torch.equal(weight, result["after"][name]), name


@pytest.mark.slow
def test_resume_is_bit_exact(data, tmp_path):
    """The sampled states of a step are those of the uninterrupted run."""
    args = [*BASE, *data, *SMALLER, "--checkpoint.enable", "--checkpoint.interval", "1"]
    args += ["--lr_scheduler.total_steps", "3", "--training.steps", "3"]
    whole = run(train, world=2, folder=str(tmp_path), args=args)[0]
    for step in (2, 3):
        shutil.rmtree(tmp_path / "out" / "checkpoint" / f"step-{step}")
    resumed = run(train, world=2, folder=str(tmp_path), args=args)[0]
    assert resumed["loss"] == {step: whole["loss"][step] for step in (2, 3)}
    rows = [row for _, row in whole["rows"] if "n_tokens_seen" in row]
    assert [row["n_tokens_seen"] for row in rows] == [step * 8 * 24 for step in (1, 2, 3)]


@pytest.mark.slow
def test_compile_changes_nothing(data, tmp_path):
    results = {}
    for name, extra in (("eager", []), ("compiled", ["--compile.enable"])):
        (tmp_path / name).mkdir()
        args = [*BASE, *data, *SMALLER, *extra]
        results[name] = run(train, world=2, folder=str(tmp_path / name), args=args, timeout=500)[0]
    for step, loss in results["eager"]["loss"].items():
        assert results["compiled"]["loss"][step] == pytest.approx(loss, abs=1e-4)
