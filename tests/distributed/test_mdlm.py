"""Masked diffusion on several processes: the losses and gradients of one."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run
from torchtitan_ext import registry
from torchtitan_ext.methods.mdlm.objective import MaskedDiffusion, document_starts

BASE = ["--model.name", "mdlm", "--model.flavor", "llada-debug", "--training.seq_len", "48"]
DREAM = ["--model.name", "mdlm", "--model.flavor", "dream-debug", "--training.seq_len", "48"]
LAYOUTS = {
    "tp2_no_sp_chunked": (
        2,
        [
            *("--parallelism.tensor_parallel_degree", "2", "--loss.num_chunks", "4"),
            *("--parallelism.enable_sequence_parallel", "false"),
        ],
    ),
    "fsdp2_full_chunked": (
        2,
        [
            *("--training.local_batch_size", "4", "--activation_checkpoint.mode", "full"),
            *("--loss.num_chunks", "4"),
        ],
    ),
}


class FixedNoise(MaskedDiffusion):
    """Noise that is a function of the tokens alone; some rows are supervised at their beginning only.

    So every layout masks the same tokens, and ranks and microbatches have unequal counts.
    """

    nothing_on: int | None = None
    """A rank on which nothing is masked."""

    def draw(self, positions_BL: torch.Tensor, *, generator: torch.Generator) -> Any:
        key = self.tokens_BL.double() + 0.1 * positions_BL
        t = (key * 12.9898).sin().mul(43758.5453).remainder(1).float()
        level = (key * 78.233).sin().mul(43758.5453).remainder(1).float()
        return t.gather(1, document_starts(positions_BL)), level

    def prepare(self, inputs: Any, labels: torch.Tensor, *, generator: torch.Generator) -> Any:
        self.tokens_BL = inputs["input"]
        short_B1 = self.tokens_BL.sum(1, keepdim=True) % 3 == 0
        late_L = torch.arange(labels.shape[1]) > 8
        labels = labels.masked_fill(short_B1 & late_L, -100)
        if self.nothing_on is not None:
            labels = torch.full_like(labels, -100)
        return super().prepare(inputs, labels, generator=generator)


def fix_noise(trainer: Any) -> None:
    own = trainer.objective
    trainer.objective = FixedNoise(
        mask_id=own.mask_id, prediction=own.prediction, multiple=own.multiple, eos_id=own.eos_id
    )


def _register() -> None:
    registry.METHODS.setdefault("mdlm", "torchtitan_ext.methods.mdlm")


def gradients(folder: str, args: list[str]) -> dict[str, torch.Tensor]:
    _register()
    return jobs.gradients(folder, args, change=fix_noise)


def train(folder: str, args: list[str]) -> dict[str, Any]:
    _register()
    return jobs.train(folder, args)


def train_with_an_idle_rank(folder: str, args: list[str]) -> dict[str, Any]:
    """Rank 1 has no supervised token."""
    _register()

    def change(trainer: Any) -> None:
        fix_noise(trainer)
        if os.environ["RANK"] == "1":
            trainer.objective.nothing_on = 1

    return jobs.train(folder, args, change=change, with_weights=True)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run(gradients, world=1, folder=str(tmp_path_factory.mktemp("one")), args=BASE)[0]


def check(got, want):
    assert got.keys() == want.keys() and any(g.abs().max() > 1e-3 for g in want.values())
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], atol=2e-5, rtol=2e-3, msg=name)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_gradients_are_those_of_one_process(layout, single, tmp_path):
    world, args = LAYOUTS[layout]
    check(run(gradients, world=world, folder=str(tmp_path), args=[*BASE, *args])[0], single)


def test_shifted_gradients_are_those_of_one_process(tmp_path):
    results = []
    for name, world, args in (("one", 1, []), ("two", 2, ["--parallelism.tensor_parallel_degree", "2"])):
        (tmp_path / name).mkdir()
        results.append(run(gradients, world=world, folder=str(tmp_path / name), args=[*DREAM, *args])[0])
    check(results[1], results[0])


def test_resume_is_bit_exact_noise_included_and_metrics_are_logged(tmp_path):
    args = [*BASE, "--checkpoint.enable", "--checkpoint.interval", "1", "--training.local_batch_size", "4"]
    args += ["--lr_scheduler.total_steps", "3", "--training.steps", "3"]
    whole = run(train, world=2, folder=str(tmp_path), args=args)[0]
    for step in (2, 3):
        shutil.rmtree(tmp_path / "out" / "checkpoint" / f"step-{step}")
    resumed = run(train, world=2, folder=str(tmp_path), args=args)[0]
    assert resumed["loss"] == {step: whole["loss"][step] for step in (2, 3)}
    rows = [(step, row) for step, row in whole["rows"] if "mdlm/masked_loss" in row]
    assert [step for step, _ in rows] == [1, 2, 3]
    assert all(0.1 < row["mdlm/masked_share"] < 0.9 and 3 < row["mdlm/masked_loss"] < 7 for _, row in rows)
    assert [row["n_tokens_seen"] for _, row in rows] == [step * 8 * 48 for step, _ in rows]


@pytest.mark.slow
def test_a_rank_without_supervised_tokens_takes_part(tmp_path):
    args = [*BASE, "--training.local_batch_size", "4", "--training.steps", "2"]
    first, second = run(train_with_an_idle_rank, world=2, folder=str(tmp_path), args=args)
    assert first["loss"] == second["loss"] and all(3 < loss < 30 for loss in first["loss"].values())
    assert all(bool(weight.isfinite().all()) for weight in first["weights"].values())


@pytest.mark.slow
def test_compile_changes_nothing(tmp_path):
    results = {}
    for name, extra in (("eager", []), ("compiled", ["--compile.enable"])):
        (tmp_path / name).mkdir()
        args = [*BASE, *extra, "--training.local_batch_size", "4"]
        results[name] = run(train, world=2, folder=str(tmp_path / name), args=args, timeout=500)[0]
    for step, loss in results["eager"]["loss"].items():
        assert results["compiled"]["loss"][step] == pytest.approx(loss, abs=1e-4)
