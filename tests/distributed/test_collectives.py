"""Collectives of a step do not grow with the loops of a recurrent core, nor with a method.

Steps are the planner's, on fake tensors of four ranks; test_planning_step.py compares the planner's
collectives with those of real processes, to the byte.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import Any

import pytest

import tools.plan
from tests.distributed import jobs
from tests.distributed.test_planning_step import MODELS, NO_SP, TENSOR, trajectories  # noqa: F401
from torchtitan_ext import config as front
from torchtitan_ext import models
from torchtitan_ext.errors import UserError
from torchtitan_ext.planning import layers, scaling, step
from torchtitan_ext.trainer import default_config

RANKS = 4
CORE = ["--training.local_batch_size", "2", "--training.seq_len", "32"]
T2MLR = ["--model.name", "t2mlr", "--t2mlr.start", "1", "--t2mlr.end", "2", "--t2mlr.backward_depth", "2"]
LOOPED = ["--model.name", "looped", "--looped.start", "1", "--looped.end", "2"]
ALODLM = ["--model.name", "alodlm", "--alodlm.start", "1", "--alodlm.end", "2"]


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def parsed(args: list[str], folder: Any) -> Any:
    path = folder / "config.toml"
    path.write_text(jobs.CONFIG)
    return front.parse(["--job.config_file", str(path), *args], make_default=default_config)


def messages(args, folder, *, kept: int | None = None, accumulates=False) -> Counter[tuple[str, str]]:
    """(kind, phase) -> number, of a step on :data:`RANKS` ranks; of the first ``kept`` blocks alone."""
    config = parsed(args, folder)
    spec: Any = models.build_spec(config)
    if kept is not None:
        spec.model = layers.with_layers(spec.model, range(kept))
    config.model_spec, config.loss.global_vocab_size = spec, spec.model.vocab_size
    with step.fake_world(RANKS):
        found = step.measure(config, spec, world=RANKS, accumulates=accumulates, stand_in=None)
    return Counter((m.kind, m.phase) for m in found.messages)


# --- what must not grow --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "key", "values"),
    [
        ([*T2MLR, *CORE], "t2mlr.forward_depth", (2, 7)),
        ([*ALODLM, *CORE], "alodlm.passes", (2, 5)),
        slow([*LOOPED, *CORE], "looped.loops", (1, 2, 6)),
        slow([*T2MLR, *CORE, "--t2mlr.forward_depth", "8"], "t2mlr.backward_depth", (1, 2, 8)),
        slow([*T2MLR, *CORE, *MODELS["t2mlr"]], "training.seq_len", (32, 96)),
        slow([*T2MLR, *CORE, "--activation_checkpoint.mode", "full"], "t2mlr.forward_depth", (2, 7)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_collectives_do_not_grow_with_it(args, key, values, tmp_path):
    counts = [messages([*args, f"--{key}", str(value)], tmp_path, kept=3) for value in values]
    assert counts[0]["all_gather", step.MICROBATCH] > 3
    assert all(count == counts[0] for count in counts[1:])


@pytest.mark.slow
def test_a_tensor_parallel_core_does_communicate_more_with_each_pass(tmp_path):
    """Inside a block tensor parallel sums over ranks, in every pass: the count above is FSDP's."""
    few, many = (
        messages([*LOOPED, *CORE, *TENSOR, *NO_SP, "--looped.loops", loops], tmp_path, kept=3)
        for loops in "13"
    )
    assert many["all_reduce", step.MICROBATCH] > few["all_reduce", step.MICROBATCH]
    assert many["all_gather", step.MICROBATCH] == few["all_gather", step.MICROBATCH]


def test_a_further_microbatch_costs_fsdps_collectives_alone(tmp_path):
    """Each microbatch gathers and reduces as a single one does; the rest is once a step."""
    args = [*T2MLR, *CORE, "--t2mlr.forward_depth", "2"]
    once = messages(args, tmp_path, kept=3)
    later = messages(args, tmp_path, kept=3, accumulates=True)
    assert once == later
    kinds = {kind for kind, phase in once if phase == step.MICROBATCH}
    assert kinds == {"all_gather", "reduce_scatter"}


# --- methods against AR --------------------------------------------------------------------

EXTRA: dict[str, tuple[int, int, int]] = {
    # A doubled sequence, other tokens, other masks: no collective more.
    "tidar": (0, 0, 0),
    "wedlm": (0, 0, 0),
    "block_diffusion": (0, 0, 0),
}
"""Method -> all-gathers, reduce-scatters and all-reduces of a step beyond AR's of the same blocks."""


@pytest.mark.parametrize("method", ["tidar", slow("wedlm"), slow("block_diffusion")])
def test_a_method_has_ars_collectives_and_a_constant(method, tmp_path):
    own = ["--model.name", method, *MODELS[method], *CORE]
    for kept in (2, 3):
        ar = messages(["--model.name", "ar", *CORE], tmp_path, kept=kept)
        difference = messages(own, tmp_path, kept=kept)
        difference.subtract(ar)
        found = Counter[str]()
        for (kind, _), count in difference.items():
            found[kind] += count
        assert (found["all_gather"], found["reduce_scatter"], found["all_reduce"]) == EXTRA[method]


# --- the command ---------------------------------------------------------------------------


def test_the_command_prints_how_a_step_grows(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(jobs.CONFIG)
    start = ["scaling", "--job.config_file", str(path), *CORE, "--ranks", "4"]
    tools.plan.main([*start, "--vary", "layers=1,2", "--vary", "ranks=2", "--json"])
    tables = json.loads(capsys.readouterr().out)
    one, two = tables["layers"]
    assert two["calls"]["reduce_scatter"] == one["calls"]["reduce_scatter"] + 1
    assert two["operations"] > one["operations"] and two["nbytes"]["all_gather"] > one["nbytes"]["all_gather"]
    # Bytes of whole tensors do not depend on how many ranks share them, but for padding.
    assert len(tables["ranks"]) == 1
    text = scaling.as_text("layers", [scaling.Growth(**row) for row in tables["layers"]])
    assert [line.split()[0] for line in text.splitlines()] == ["layers", "1", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "what grows"),
        (["--vary", "training.seq_len"], "KEY=VALUE"),
        (["--ranks", "many", "--vary", "layers=1"], "--ranks must be a whole number"),
        (["--vary", "layers=99"], "4 blocks, got 99"),
        (["--vary", "training.seq_length=8"], "seq_len"),
        (
            ["--ranks", "3", "--parallelism.tensor_parallel_degree", "2", "--vary", "layers=1"],
            "got 3 processes",
        ),
    ],
)
def test_the_command_refuses_in_one_line(words, message, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(jobs.CONFIG)
    with pytest.raises(UserError, match=message) as refused:
        tools.plan.main(["scaling", "--job.config_file", str(path), *words])
    assert "\n" not in str(refused.value)
