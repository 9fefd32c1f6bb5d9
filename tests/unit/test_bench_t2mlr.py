"""When a T2MLR's iterates settle: which tolerance is kept, on which data, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.unit.test_t2mlr_model import build
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import bench_t2mlr
from torchtitan_ext.trainer import default_config

LENGTH = 16


class Core:
    """A core whose iterates settle after so many passes, whatever the tolerance."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(convergence_tol=0.0)
        self.depth = 16
        self.statistics: dict = {}


class Settling(torch.nn.Module):
    """Logits that are worse the earlier the iterates are left."""

    def __init__(self) -> None:
        super().__init__()
        self.core = Core()

    def get_attention_masks(self, positions):
        return None

    def forward(self, tokens, positions, masks):
        tolerance, depth = self.core.config.convergence_tol, self.core.depth
        used = depth if tolerance < 0.02 else 10 if tolerance < 0.2 else 5
        self.core.statistics["t2mlr/iterates/mean"] = torch.tensor(float(used))
        self.core.statistics["t2mlr/residual/max"] = torch.tensor(2.0**-used)
        logits = torch.zeros(*tokens.shape, 264)
        logits[..., 0] += 0.0 if used >= 10 else 5.0
        return logits


@pytest.fixture
def loaded(monkeypatch):
    """A run on a task that settles as the class above says."""
    config = default_config({"name": "t2mlr"})
    config.dataloader.dataset = "group_retrieval"
    task = config.dataloader.task
    task.group, task.key_length, task.fixed_length = 3, 0, 4
    run = SimpleNamespace(model=Settling(), method="t2mlr", config=config)
    monkeypatch.setattr(bench_t2mlr, "load_model", lambda path, device: run)
    return run


@pytest.fixture
def text_run(loaded, tmp_path):
    """A random model with open gates, whose data are short lines of text."""
    lines = [f"{i} + {i * i} is {i + i * i}" for i in range(40)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    loaded.model = build(forward_depth=LENGTH, backward_depth=3)
    loaded.tokenizer = Tokenizer.Config().build(tokenizer_path="")
    loaded.config.dataloader.dataset = "text"
    loaded.config.training.seq_len, loaded.config.training.local_batch_size = LENGTH, 3
    validator = loaded.config.validator
    validator.enable, validator.dataloader.dataset = True, "text"
    validator.dataloader.dataset_path, validator.dataloader.txt_documents = str(tmp_path), "line"
    return loaded


def held_out(run):
    return bench_t2mlr._held_out(run, run=Path("run"), quick=True)[0]


def test_the_tolerance_that_saves_most_and_keeps_the_loss(loaded):
    passes, loss = bench_t2mlr.convergence(Path("run"), quick=True)
    assert "convergence_tol 0.1 / off" in passes.what
    assert (passes.ours, passes.peer) == (11, 17) and passes.reached and passes.goal == pytest.approx(1 / 0.7)
    assert (
        "35% saved" in passes.note and "0.2: 6.0 (+" in passes.note and "0.1: 11.0 (+0.00000)" in passes.note
    )
    assert loss.ours == 0 and loss.reached
    assert "by iterate 2: 0.25, 3: 0.12" in loss.note and "12: +0.00000" in loss.note
    core = loaded.model.core
    assert (core.config.convergence_tol, core.depth) == (0.0, 16)


def test_the_losses_of_text_are_those_of_its_documents_alone(text_run):
    batches, pieces = held_out(text_run), []
    for batch in batches:
        assert batch.tokens_BL.shape == (3, LENGTH)
        for tokens, labels, positions in zip(*batch, strict=True):
            lengths = positions.eq(0).nonzero().flatten().diff(append=torch.tensor([LENGTH])).tolist()
            pieces += zip(tokens.split(lengths), labels.split(lengths), strict=True)
    assert len(pieces) > 6 + 3, "rows hold several documents"
    losses = []
    for tokens, labels in pieces:
        positions = torch.arange(len(tokens))[None]
        with torch.no_grad():
            logits = text_run.model(tokens[None], positions, text_run.model.get_attention_masks(positions))
        losses.append(F.cross_entropy(logits[0], labels, reduction="none")[labels != IGNORE_INDEX])
    measured = bench_t2mlr.measure(text_run.model, batches, depth=LENGTH)
    assert measured.loss == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    # The recurrence counts: one iterate gives another loss.
    assert abs(bench_t2mlr.measure(text_run.model, batches, depth=1).loss - measured.loss) > 1e-3


def test_the_passes_with_gradient_are_run_whatever_the_tolerance(text_run):
    model, batches = text_run.model, held_out(text_run)
    off = bench_t2mlr.measure(model, batches, depth=LENGTH)
    loosest = bench_t2mlr.measure(model, batches, depth=LENGTH, tolerance=1e9)
    assert off.passes == LENGTH + 1
    # The seed, the first iterate, which is compared with it, D_b with gradient, and the last pass.
    assert loosest.passes == 1 + 1 + 3 + 1
    assert (loosest.loss, loosest.change) == pytest.approx(
        bench_t2mlr.measure(model, batches, depth=5)[2:5:2], abs=1e-6
    )


def test_rows_of_a_text_run(text_run):
    passes, loss = bench_t2mlr.convergence(Path("run"), quick=True)
    assert f"6 held-out rows of {LENGTH}: convergence_tol" in passes.what
    assert passes.peer == LENGTH + 1 and 6 <= passes.ours <= passes.peer
    assert "by iterate 2: " in loss.note and f"fewer iterates than {LENGTH} 1: " in loss.note


def test_other_methods_and_data_are_refused_in_one_line(loaded):
    loaded.method = "ar"
    with pytest.raises(UserError, match=r"is a run of 'ar' \(allowed: t2mlr\)"):
        bench_t2mlr.convergence(Path("run"))
    loaded.method = "t2mlr"
    loaded.config.dataloader.dataset = "stdlib"
    with pytest.raises(UserError, match=r"--t2mlr-run run: .* no \[validation\]") as refused:
        bench_t2mlr.convergence(Path("run"))
    assert "\n" not in str(refused.value)
