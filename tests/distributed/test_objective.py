"""The hooks a method gets: per-term global counts, deterministic noise, metrics reduced over ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.harness import run
from torchtitan_ext.objective import global_rows, merge_metrics, rand, row_generators

LAYOUTS = {
    "accumulated": (1, ["--training.local_batch_size", "1", "--training.global_batch_size", "8"]),
    "ranks": (2, ["--training.local_batch_size", "4"]),
    "ranks_accumulated": (2, ["--training.local_batch_size", "2", "--training.global_batch_size", "8"]),
    "tensor": (2, ["--parallelism.tensor_parallel_degree", "2"]),
    "chunks": (1, ["--loss.num_chunks", "4"]),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    (gradients,) = run(
        jobs.two_terms_gradients, world=1, folder=str(tmp_path_factory.mktemp("whole")), args=[]
    )
    return gradients


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_each_term_has_its_own_global_count(layout, whole, tmp_path):
    world, args = LAYOUTS[layout]
    gradients = run(jobs.two_terms_gradients, world=world, folder=str(tmp_path), args=args)[0]
    assert gradients.keys() == whole.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, whole[name], atol=3e-6, rtol=1e-3, msg=name)


def test_metrics_are_reduced_over_microbatches_and_ranks(tmp_path):
    args = ["--training.local_batch_size", "2", "--training.global_batch_size", "8", "--training.steps", "2"]
    result = run(jobs.two_terms_training, world=2, folder=str(tmp_path), args=args)[0]
    rows = [row for _, row in result["rows"] if "two/even_share" in row]
    assert len(rows) == 2
    for row in rows:
        # About half of the tokens are at even positions: a sum over microbatches and ranks of shares.
        assert row["two/even_share"] == pytest.approx(0.5, abs=0.03)
        assert row["two/longest/max"] == 63


def test_noise_is_a_function_of_seed_step_and_row(tmp_path):
    """A resumed run draws the numbers an uninterrupted one would have drawn; rows draw their own."""
    save = ["--checkpoint.enable", "--checkpoint.interval", "3", "--lr_scheduler.total_steps", "6"]
    args = [*save, "--training.local_batch_size", "2", "--training.global_batch_size", "8"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    job = jobs.two_terms_training
    whole = run(job, world=2, folder=folders[0], args=[*args, "--training.steps", "6"])
    first = run(job, world=2, folder=folders[1], args=[*args, "--training.steps", "3"])
    second = run(job, world=2, folder=folders[1], args=[*args, "--training.steps", "6"])
    for rank in range(2):
        assert first[rank]["seen"] + second[rank]["seen"] == whole[rank]["seen"]
        assert len(set(whole[rank]["seen"])) == 12  # six steps of two microbatches, all different
    assert first[0]["loss"] | second[0]["loss"] == whole[0]["loss"]
    assert whole[0]["seen"] != whole[1]["seen"]


def test_row_generators_depend_on_every_part():
    base = {"seed": 1, "step": 2, "row": 3}

    def draw(**parts: int) -> torch.Tensor:
        seed, step, row = {**base, **parts}.values()
        return rand((1, 4), generator=row_generators(seed=seed, step=step, rows=[row]))

    assert torch.equal(draw(), draw())
    for part in base:
        assert not torch.equal(draw(), draw(**{part: 9})), part
    # 12 then 3 is not 1 then 23.
    assert not torch.equal(draw(step=12, row=3), draw(step=1, row=23))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 4), (2, 2), (4, 1), (3, 2)])
def test_rows_have_the_same_noise_on_any_number_of_ranks(ranks, microbatches):
    """Ranks and microbatches together draw what one rank with the whole batch draws."""
    total = 24
    whole = rand((total, 5), generator=row_generators(seed=0, step=7, rows=range(total)))
    got = torch.full_like(whole, -1)
    size = total // (ranks * microbatches)
    for rank in range(ranks):
        for microbatch in range(microbatches):
            rows = global_rows(microbatch=microbatch, size=size, ranks=ranks, rank=rank)
            assert len(rows) == size and (got[list(rows)] == -1).all()
            got[list(rows)] = rand((size, 5), generator=row_generators(seed=0, step=7, rows=rows))
    assert torch.equal(got, whole)


def test_a_batch_needs_a_generator_for_each_row():
    with pytest.raises(ValueError, match="2 generators for a batch of 3 rows"):
        rand((3, 4), generator=row_generators(seed=0, step=0, rows=range(2)))


def test_merge_metrics_follows_the_names():
    into: dict[str, torch.Tensor] = {}
    for value in (1.0, 5.0, 3.0):
        tensor = torch.tensor(value)
        merge_metrics(into, {"a": tensor, "b/max": tensor, "c/min": tensor})
    assert {k: v.item() for k, v in into.items()} == {"a": 9.0, "b/max": 5.0, "c/min": 1.0}
