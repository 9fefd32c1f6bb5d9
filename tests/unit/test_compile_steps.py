"""Every method's blocks compile whole, and once, whatever the documents of a batch.

Blocks are compiled as the trainer does it, ``fullgraph=True``, where a graph break is an error; a backend
that counts stands in for the compiler, so a case takes seconds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.distributed import jobs
from tests.unit.test_decoding_autoregressive import random_model, random_prompts
from tests.unit.test_host_sync import CASES, batch, trajectories  # noqa: F401
from torchtitan_ext.decoding import KVCache, autoregressive
from torchtitan_ext.planning import fake_run

GRAPHS = {
    # No gradient at all, gradient in the blocks' weights and, from the second iterate with gradient on, in
    # their input too.
    "t2mlr": 3,
    # Plain blocks and temporal ones, before and after the first whose weights are trained.
    "tdlm": 4,
    # It has no blocks.
    "looped_lstm": 0,
}
"""Case -> graphs of its blocks; 1 for the others, whose blocks are all alike."""

LONG = ["--training.seq_len", "640", "--training.local_batch_size", "2"]
CASES = {
    **CASES,
    "ar_long": ["--model.name", "ar", *LONG],
    "ar_full": ["--model.name", "ar", "--activation_checkpoint.mode", "full"],
    "ar_selective": ["--model.name", "ar", "--activation_checkpoint.mode", "selective"],
}
FAST = ("ar", "t2mlr")


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """A backend "counting", and the sizes of the graphs that it has been given."""
    graphs: list[int] = []

    def counting(module: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.register_backend(counting, name="counting")
    try:
        yield graphs
    finally:
        torch._dynamo.backends.registry._BACKENDS.pop("counting", None)
        torch._dynamo.backends.registry._COMPILER_FNS.pop("counting", None)
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def graphs_by_step(args: list[str], folder: Any, *, steps: int) -> list[int]:
    """Graphs compiled up to each step, over batches whose documents all differ."""
    small = ["--training.local_batch_size", "2", "--metrics.log_freq", "1000", "--comm.mode", "fake_backend"]
    compiled = ["--compile.enable", "true", "--compile.components", "model", "--compile.backend", "counting"]
    with fake_run._world(1), counted() as graphs:
        trainer = jobs.build(str(folder), [*args, *small, *compiled])
        length = trainer.config.training.seq_len
        cuts = iter(range(1, 10**6))
        rows = (batch(trainer.config, cut=2 + (7 * next(cuts)) % (length - 8)) for _ in iter(int, 1))
        generator, seen = trainer.batch_generator(rows), []
        for number in range(2, steps + 2):  # the first would be logged
            trainer.step = number
            trainer.train_step(generator)
            seen.append(len(graphs))
        trainer.close()
    assert not counters["graph_break"]
    return seen


@pytest.mark.parametrize(
    "case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in sorted(CASES)]
)
def test_blocks_compile_in_the_first_step_and_never_again(case, trajectories, tmp_path):  # noqa: F811
    data = trajectories if case == "tdlm" else []
    seen = graphs_by_step([*CASES[case], *data], tmp_path, steps=6 if case in FAST else 50)
    expected = GRAPHS.get(case.removesuffix("_tolerance"), 1)
    assert seen == [expected] * len(seen)


def test_a_decoded_token_compiles_nothing_new():
    """A block is captured for its first lengths of a cache, then once for any."""
    model = random_model().__class__(random_model().config)
    model.load_state_dict(random_model().state_dict())
    model.eval().requires_grad_(False)
    eager, rows = random_model(), random_prompts(9, 9)
    with counted() as graphs, torch.no_grad():
        expected = decoded(eager, rows, steps=12)
        for block in model.layers.values():
            block.compile(backend="counting", fullgraph=True)
        found = decoded(model, rows, steps=12, graphs=graphs)
    seen = found.pop()
    assert all(torch.equal(a, b) for a, b in zip(found, expected[:-1], strict=True))
    assert seen[0] > 0 and seen[3:] == [seen[3]] * len(seen[3:]), seen


def decoded(model: Any, rows: list[list[int]], *, steps: int, graphs: Any = ()) -> list[Any]:
    """Logits after the prompts and after each of ``steps`` tokens; last, the graphs compiled by then."""
    cache, counts = KVCache(len(rows), capacity=64), []
    with autoregressive.headless(model):
        logits = [autoregressive.prefill(model, cache, rows)]
        for token in range(steps):
            logits.append(autoregressive.step(model, cache, torch.full((len(rows),), token)))
            counts.append(len(graphs))
    return [*logits, counts]
