"""A run stopped and resumed on another number of ranks, and back: the same samples, noise and losses."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed import rescale_jobs as jobs
from tests.distributed.harness import run
from tests.unit import test_trajectories_common as made
from torchtitan_ext.methods.alodlm.config import Section as ALoDLMSection
from torchtitan_ext.methods.alodlm.objective import ALoDLMObjective
from torchtitan_ext.methods.block_diffusion.objective import BlockDiffusionObjective
from torchtitan_ext.methods.mdlm.objective import MaskedDiffusion
from torchtitan_ext.methods.tdlm.objective import TrajectoryDistillation
from torchtitan_ext.methods.tidar.objective import TiDARObjective
from torchtitan_ext.methods.wedlm.objective import WeDLMObjective
from torchtitan_ext.objective import global_rows, row_generators
from torchtitan_ext.trainer import default_config
from torchtitan_ext.trajectories.shards import Trajectory

GLOBAL_BATCH = 8
STEPS = 2
"""Steps of each part."""
TOLERANCE = 1e-5
"""Relative, of losses: sums of float32 in another order, over six steps. Gradient norms: 20 times that."""


class Layout(NamedTuple):
    """How one part of a run is spread over processes."""

    world: int
    local: int
    tp: int = 1
    replicate: int = 1

    @property
    def args(self) -> list[str]:
        return [
            *("--training.local_batch_size", str(self.local)),
            *("--training.global_batch_size", str(GLOBAL_BATCH)),
            *("--parallelism.tensor_parallel_degree", str(self.tp)),
            *("--parallelism.data_parallel_replicate_degree", str(self.replicate)),
        ]


def steps(count: int, *, interval: int = STEPS, total: int = 3 * STEPS) -> list[str]:
    return [
        *("--checkpoint.enable", "--checkpoint.interval", str(interval), "--checkpoint.keep_latest_k", "0"),
        *("--training.steps", str(count), "--lr_scheduler.total_steps", str(total)),
    ]


def merged(ranks: list[dict[str, Any]]) -> dict[tuple[int, int], jobs.Seen]:
    """The rows of all ranks; ranks that share a batch saw the same."""
    rows: dict[tuple[int, int], jobs.Seen] = {}
    for rank in ranks:
        for place, seen in rank["seen"].items():
            assert rows.setdefault(place, seen) == seen, place
    return rows


def start(folder: Path, layout: Layout, count: int, args: Sequence[str], **kwargs: Any) -> dict[str, Any]:
    """One start of the run until step ``count``; rank 0's result with all ranks' rows."""
    folder.mkdir(exist_ok=True)
    all_args = [*steps(count, **kwargs), *layout.args, *args]
    ranks = run(jobs.part, world=layout.world, timeout=500, folder=str(folder), args=all_args)
    return {**ranks[0], "seen": merged(ranks), "warnings": [w for r in ranks for w in r["warnings"]]}


def check_carried_over(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Weights, both moments and step counters are bit for bit those that were saved."""
    assert before["end"].keys() == after["loaded"].keys()
    moments = [name for name in before["end"] if "exp_avg" in name]
    assert any(before["end"][name].abs().max() > 0 for name in moments) and len(moments) > 2
    for name, value in before["end"].items():
        assert torch.equal(value, after["loaded"][name]), name


def rescaled(folder: Path, layouts: Sequence[Layout], args: Sequence[str] = ()) -> dict[str, Any]:
    """The joined parts of a run that changes its layout every few steps."""
    parts = [start(folder / "parts", layout, (i + 1) * STEPS, args) for i, layout in enumerate(layouts)]
    for before, after in itertools.pairwise(parts):
        check_carried_over(before, after)
    joined: dict[str, Any] = {
        key: {k: v for one in parts for k, v in one[key].items()} for key in ("loss", "grad_norm", "seen")
    }
    assert sum(len(one["seen"]) for one in parts) == len(joined["seen"])
    joined["warnings"] = [line for one in parts for line in one["warnings"]]
    return joined


def undisturbed(folder: Path, layout: Layout, args: Sequence[str] = ()) -> dict[str, Any]:
    """The same steps in one go."""
    return start(folder / "whole", layout, 3 * STEPS, args, interval=100)


def check_rows(whole: dict[str, Any], joined: dict[str, Any]) -> None:
    """The same rows with the same noise, in the same places, each once."""
    places = [(step, i) for step in range(1, 3 * STEPS + 1) for i in range(GLOBAL_BATCH)]
    assert sorted(whole["seen"]) == sorted(joined["seen"]) == places
    rows = Counter(seen.data for seen in joined["seen"].values())
    assert rows == Counter(seen.data for seen in whole["seen"].values())
    assert set(rows.values()) == {1}
    for place in places:
        assert joined["seen"][place] == whole["seen"][place], place


def check_curve(whole: dict[str, Any], joined: dict[str, Any]) -> None:
    assert list(joined["loss"]) == list(whole["loss"]) == list(range(1, 3 * STEPS + 1))
    worst = {
        key: max(abs(joined[key][s] / whole[key][s] - 1) for s in whole[key]) for key in ("loss", "grad_norm")
    }
    print(f"largest relative difference: loss {worst['loss']:.1e}, gradient norm {worst['grad_norm']:.1e}")
    assert worst["loss"] < TOLERANCE and worst["grad_norm"] < 20 * TOLERANCE
    # The curve moves, or else equal ones say little.
    assert max(whole["loss"].values()) / min(whole["loss"].values()) - 1 > 100 * TOLERANCE


# --- autoregressive --------------------------------------------------------------------


def test_two_ranks_one_rank_two_ranks(tmp_path):
    """Ranks, local batch and accumulation change; samples, order, state and losses do not."""
    layouts = [Layout(2, 2), Layout(1, 4), Layout(2, 4)]
    whole, joined = undisturbed(tmp_path, layouts[0]), rescaled(tmp_path, layouts)
    check_rows(whole, joined)
    check_curve(whole, joined)
    assert not [line for line in joined["warnings"] if "batch" in line]


SCALES = {
    "fsdp": [Layout(4, 2), Layout(2, 2), Layout(4, 1)],
    "hsdp": [Layout(4, 2), Layout(2, 4, replicate=2), Layout(4, 1, replicate=2)],
    "tp": [Layout(4, 4, tp=2), Layout(2, 4, tp=2), Layout(4, 2)],
    "hsdp_tp": [Layout(4, 2, tp=2, replicate=2), Layout(2, 1), Layout(4, 2, replicate=2)],
    "fsdp_to_tp": [Layout(4, 1, replicate=2), Layout(2, 8, tp=2), Layout(4, 2, tp=2)],
}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> dict[str, Any]:
    return undisturbed(tmp_path_factory.mktemp("four"), Layout(4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("scale", sorted(SCALES))
def test_four_ranks_two_ranks_four_ranks(scale, four_ranks, tmp_path):
    joined = rescaled(tmp_path, SCALES[scale])
    check_rows(four_ranks, joined)
    check_curve(four_ranks, joined)


# --- every method ----------------------------------------------------------------------

MASK = ["--model.flavor", "llada-debug"]
METHODS = {
    "alodlm": [
        *("--alodlm.start", "1", "--alodlm.end", "3", "--alodlm.passes", "3", "--alodlm.block_size", "8")
    ],
    "ar": [],
    "block_diffusion": ["--block_diffusion.block_size", "4"],
    "looped": ["--looped.start", "2", "--looped.end", "3", "--looped.loops", "2"],
    "mdlm": MASK,
    "t2mlr": ["--t2mlr.start=2", "--t2mlr.end=3", "--t2mlr.forward_depth=4", "--t2mlr.backward_depth=2"],
    "tdlm": [
        *MASK,
        *("--training.seq_len", "24", "--tdlm.head_dim", "6", "--tdlm.heads", "2", "--tdlm.states", "3"),
        *("--tdlm.mask_token_id", "263"),
    ],
    "tidar": ["--tidar.block_size", "4", "--tidar.corruption", "random"],
    "wedlm": ["--wedlm.block_size", "8"],
}
SAME_MICROBATCH = [Layout(2, 4), Layout(1, 8), Layout(2, 4)]
ACCUMULATED = [Layout(2, 4), Layout(1, 4), Layout(2, 2)]


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory) -> list[str]:
    """Arguments that choose a set of 64 made-up trajectories of 6 to 9 tokens."""
    folder = tmp_path_factory.mktemp("data") / "set"
    draw = torch.Generator().manual_seed(0)
    rows = []
    for i in range(64):
        new = 6 + i % 4
        prompt = torch.randint(260, (3 + i % 5,), generator=draw).tolist()
        response = torch.randint(260, (new,), generator=draw).tolist()
        order = (torch.randperm(new, generator=draw) + 1).clamp(max=6).tolist()
        rows.append(Trajectory(i, prompt, response, order, new, None))
    tokenizer = default_config({"name": "ar"}).tokenizer.build(tokenizer_path="")
    made.made_up_set(folder, rows, tokenizer=tokenizer)
    return ["--dataloader.dataset", "trajectories", "--dataloader.dataset_path", str(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_each_method_goes_on_at_another_scale(method, trajectories, tmp_path):
    """Noise belongs to a row, so it is the same on any number of ranks, and so are the losses.

    ALoDLM's depth prior looks at the mean over one microbatch of all ranks, so there the number of
    rows in these is kept; the others accumulate.
    """
    args = ["--model.name", method, *METHODS[method], *(trajectories if method == "tdlm" else [])]
    layouts = SAME_MICROBATCH if method == "alodlm" else ACCUMULATED
    whole, joined = undisturbed(tmp_path, layouts[0], args), rescaled(tmp_path, layouts, args)
    assert all(math.isfinite(loss) for loss in joined["loss"].values())
    check_rows(whole, joined)
    check_curve(whole, joined)


OBJECTIVES = {
    "alodlm": lambda: ALoDLMObjective(ALoDLMSection(start=1, end=3, passes=3, block_size=8), mask_id=263),
    "block_diffusion": lambda: BlockDiffusionObjective(
        mask_id=263, block_size=4, alpha=1.0, weighting="elbo"
    ),
    "mdlm": lambda: MaskedDiffusion(mask_id=263),
    "tdlm": lambda: TrajectoryDistillation(mask_id=263, states=3),
    "tidar": lambda: TiDARObjective(mask_id=263, block_size=4, alpha=1.0, corruption="random"),
    "wedlm": lambda: WeDLMObjective(mask_id=263, block_size=8, w_ar=0.5, weighting="global"),
}


def batch_of(method: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Eight rows of two documents each; of trajectories for TDLM, whose labels are steps."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (GLOBAL_BATCH, 32), generator=draw)
    positions = torch.cat([torch.arange(13), torch.arange(19)]).repeat(GLOBAL_BATCH, 1)
    labels = torch.cat([tokens[:, 1:], torch.full((GLOBAL_BATCH, 1), -100)], dim=1)
    labels[:, 12] = -100
    if method == "tdlm":
        positions = torch.arange(32).repeat(GLOBAL_BATCH, 1)
        labels[:, :10] = -100
        labels[:, 10:] = torch.stack([torch.randperm(22, generator=draw) + 1 for _ in range(GLOBAL_BATCH)])
    return {"input": tokens, "positions": positions}, labels


@pytest.mark.parametrize("method", sorted(OBJECTIVES))
@pytest.mark.parametrize(("ranks", "size"), [(1, 2), (2, 4), (4, 1)])
def test_a_row_is_prepared_alike_at_every_scale(method, ranks, size):
    """A row's corrupted tokens, and the sums of counts, are those of one rank with the whole batch."""
    inputs, labels = batch_of(method)

    def prepared(rows: range) -> Any:
        chosen = {key: value[list(rows)] for key, value in inputs.items()}
        generators = row_generators(seed=0, step=5, rows=rows)
        return OBJECTIVES[method]().prepare(chosen, labels[list(rows)], generator=generators)

    whole = prepared(range(GLOBAL_BATCH))
    tokens = whole.inputs["input"].reshape(GLOBAL_BATCH, -1)
    counts = dict.fromkeys(whole.counts, 0.0)
    for microbatch in range(GLOBAL_BATCH // (ranks * size)):
        for rank in range(ranks):
            rows = global_rows(microbatch=microbatch, size=size, ranks=ranks, rank=rank)
            part = prepared(rows)
            assert torch.equal(part.inputs["input"].reshape(size, -1), tokens[list(rows)])
            counts = {name: count + part.counts[name] for name, count in counts.items()}
    assert counts == pytest.approx(whole.counts)
    plain = inputs["input"].repeat(1, tokens.shape[1] // 32)
    hidden = (tokens != plain).float().mean(dim=1)
    assert len(set(hidden.tolist())) > 1  # rows differ in their noise


# --- the global batch ------------------------------------------------------------------


def test_another_global_batch_is_warned_of(tmp_path):
    """-1 follows the ranks and the local batch: a resume that changes it names both numbers."""

    def part(local: int, count: int, whole: int = -1) -> dict[str, Any]:
        batch = ["--training.local_batch_size", str(local), "--training.global_batch_size", str(whole)]
        args = [*steps(count, interval=1), *batch]
        return run(jobs.part, world=1, folder=str(tmp_path), args=args)[0]

    part(8, 1)
    saved = tmp_path / "out" / "checkpoint" / "step-1" / "config.toml"
    assert tomllib.loads(saved.read_text())["training"]["global_batch_size"] == 8
    changed = [line for line in part(4, 2)["warnings"] if "global batch size" in line]
    assert len(changed) == 1 and "from 8 to 4 rows a step" in changed[0] and "step-1" in changed[0]
    assert "[training] global_batch_size = 8" in changed[0] and "\n" not in changed[0]
    # Accumulating keeps it, so there is nothing to say: 4 since the last checkpoint.
    assert not [line for line in part(2, 3, whole=4)["warnings"] if "global batch size" in line]
