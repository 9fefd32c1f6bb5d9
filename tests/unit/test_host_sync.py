"""Nothing in a training step waits for the device, apart from what is stated here.

A step on the CPU is watched for what would stop the host on a GPU: operations whose result or shape
the host must know (``.item()``, ``nonzero``, boolean indices, ...) and tensor methods that read memory.
Fetching and preparing a batch is the host's own work and is left out, and so are steps that are logged.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import jobs
from tests.distributed.test_planning_step import CHUNKS, MODELS
from tests.unit import test_trajectories_common as made
from tests.unit.test_looped_lstm import LSTM, build, padded_batch, tokens_for
from torchtitan_ext.planning import fake_run
from torchtitan_ext.planning.step import synthetic_rows
from torchtitan_ext.trainer import default_config
from torchtitan_ext.trajectories.shards import Trajectory

OPERATIONS = {
    *("_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "is_nonzero", "equal"),
    *("argwhere", "unique_consecutive", "_unique2", "unique_dim", "bincount", "allclose", "item"),
    "repeat_interleave",
}
"""Operations whose result or shape the host must know; repeat_interleave where it is given a tensor."""

READS = {"tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "item", "__contains__"}
"""Methods that read a tensor's memory, and on the CPU need no operation for it."""

PACKAGES = ("torchtitan_ext", "torchtitan")


def place() -> str:
    """The innermost function of the project or of torchtitan that is running."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        for package in PACKAGES:
            if package in parts:
                name = "/".join(parts[len(parts) - parts[::-1].index(package) :])
                return f"{package}/{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class _Methods(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS and not self.watch.paused:
            self.watch.seen[func.__name__, place()] += 1
            with self.watch.pause():  # the operation it is made of is the same wait
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, torch.distributed.tensor.DTensor) for t in types):
            return NotImplemented
        name = func._overloadpacket.__name__
        if not self.watch.paused and (name in OPERATIONS or _indexes_by_booleans(name, args)):
            self.watch.seen[name, place()] += 1
        return func(*args, **(kwargs or {}))


def _indexes_by_booleans(name: str, args: Any) -> bool:
    if name not in ("index", "index_put", "index_put_", "_unsafe_index"):
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


class Watch:
    """What made the host wait, and where, while it is entered."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.paused = 0
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        self._modes.enter_context(_Operations(self))
        self._modes.enter_context(_Methods(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._modes.close()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The host's own work."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def between(self, rows: Iterator[Any]) -> Iterator[Any]:
        """The rows, whose preparation is not watched."""
        while True:
            with self.pause():
                row = next(rows)
            yield row


# --- the watch itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("item", lambda x: x.sum().item()),
        ("__bool__", lambda x: bool((x > 9).any())),
        ("__int__", lambda x: int(x[0])),
        ("tolist", lambda x: x.tolist()),
        ("cpu", lambda x: x.cpu()),
        ("nonzero", lambda x: torch.nonzero(x)),
        ("masked_select", lambda x: x.masked_select(x > 1)),
        ("index", lambda x: x[x > 1]),
        ("index_put_", lambda x: x.clone().__setitem__(x > 1, x[:1].expand(2))),
        ("bincount", lambda x: torch.bincount(x.long())),
        ("equal", lambda x: torch.equal(x, x)),
        (None, lambda x: torch.where(x > 1, x, 0.0)[x.argsort()].softmax(0)),
    ],
)
def test_what_waits_is_seen_once(name, act):
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    with Watch() as watch:
        act(x)
    seen = Counter(found for found, _ in watch.seen.elements())
    assert seen[name] >= 1 if name == "index_put_" else seen == ({name: 1} if name else {})


# --- a step of every method ----------------------------------------------------------------


EVERY_STEP = Counter(
    {
        # On a GPU of the step before, whose values have long arrived, and with another optimizer than
        # fused Adam before the update: the guard's one read, and no other wait for it.
        ("tolist", "torchtitan_ext/faults/nonfinite.py:settle"): 1,
        # torchtitan's count of a batch that is still on the host: no wait.
        ("__int__", "torchtitan/trainer.py:train_step"): 1,
    }
)
LSTM_ARGS = ["--looped.kind", "lstm", "--looped.lstm_layers", "2", "--looped.lstm_hidden", "24"]
CASES: dict[str, list[str]] = {
    **{name: ["--model.name", name, *args] for name, args in MODELS.items()},
    "ar_chunks": ["--model.name", "ar", *CHUNKS],
    "ar_accumulated": ["--model.name", "ar", "--training.global_batch_size", "6"],
    "looped_lstm": ["--model.name", "looped", *LSTM_ARGS],
    "t2mlr_tolerance": ["--model.name", "t2mlr", *MODELS["t2mlr"], "--t2mlr.convergence_tol", "1e-9"],
}
ALLOWED: dict[str, Counter[tuple[str, str]]] = {
    # The kernel takes the number of documents at each step from the host; the rest reads that copy.
    "looped_lstm": Counter(
        {
            ("cpu", "torchtitan_ext/methods/looped/lstm.py:document_steps"): 1,
            ("__int__", "torchtitan_ext/methods/looped/lstm.py:document_steps"): 1,
            ("__int__", "torchtitan_ext/methods/looped/lstm.py:by_documents"): 1,
        }
    ),
    # Leaving early is a choice of the host's, after each iterate that has another without gradient behind it.
    "t2mlr_tolerance": Counter({("__bool__", "torchtitan_ext/methods/t2mlr/model.py:_converged"): 2}),
}
"""By case, beyond those of every step."""


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("trajectories") / "set"
    rows = [Trajectory(i, [1, 2, 3], [5] * 8, list(range(1, 9)), 8, None) for i in range(4)]
    made.made_up_set(
        folder, rows, tokenizer=default_config({"name": "ar"}).tokenizer.build(tokenizer_path="")
    )
    return ["--dataloader.dataset", "trajectories", "--dataloader.dataset_path", str(folder)]


def batch(config: Any, *, cut: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The planner's rows, cut into documents of other lengths in each row; TDLM's are one response a row."""
    inputs, labels = synthetic_rows(config)
    if config.model.name != "tdlm":
        for row in range(len(labels)):
            at = cut + 3 * row
            inputs["positions"][row, at:] -= at
            labels[row, at - 1] = -100
    return inputs, labels


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_step_waits_for_nothing_but_what_is_stated(case, trajectories, tmp_path):
    data = trajectories if case == "tdlm" else []
    small = ["--training.local_batch_size", "2", "--metrics.log_freq", "1000", "--comm.mode", "fake_backend"]
    with fake_run._world(1):
        trainer = jobs.build(str(tmp_path), [*CASES[case], *small, *data])
        rows = (batch(trainer.config, cut=cut) for cut in (5, 9, 7, 8, 6, 11))
        generator = trainer.batch_generator(rows)
        trainer.step = 1  # logged
        trainer.train_step(generator)
        trainer.step = 2
        with Watch() as watch:
            trainer.train_step(watch.between(generator))
        trainer.close()
    assert watch.seen == EVERY_STEP + ALLOWED.get(case, Counter())
    assert not dist.is_initialized()


# --- the LSTM without data -----------------------------------------------------------------


@pytest.mark.parametrize("batch", [[[5]], [[1, 1, 4], [2, 6]], [[3, 2, 1, 4], [1, 9], [10]]], ids=str)
def test_lstm_by_rows_is_lstm_by_documents(batch):
    """Outputs and gradients of the formulation whose shapes do not depend on the documents."""
    model = build(**LSTM)
    positions = padded_batch(batch)
    h = model.tok_embeddings(tokens_for(positions)).detach()
    weight = torch.randn(h.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for forward in (model.rnn.by_documents, model.rnn.by_rows):
        x = h.clone().requires_grad_()
        out = forward(x, positions)
        parameters = list(model.rnn.parameters())
        found.append((out, *torch.autograd.grad((out * weight).sum(), [x, *parameters])))
    for rows, documents in zip(*found, strict=True):
        torch.testing.assert_close(rows, documents, atol=1e-5, rtol=1e-4)


def test_lstm_by_rows_waits_for_nothing():
    model, positions = build(**LSTM), padded_batch([[3, 4], [7]])
    h = model.tok_embeddings(tokens_for(positions))
    with Watch() as watch:
        model.rnn.by_rows(h, positions).sum().backward()
    assert not watch.seen
