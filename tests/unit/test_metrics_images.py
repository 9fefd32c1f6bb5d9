"""Pictures and numbers that go to TensorBoard: a run's mask, and evaluations."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger

from tests.paths import ROOT
from tests.unit.test_load import random_model, write_checkpoint
from torchtitan_ext import backbones, masks, metrics, models
from torchtitan_ext.attention import evaluate_mask
from torchtitan_ext.config import load_toml
from torchtitan_ext.errors import UserError
from torchtitan_ext.metrics import ExtMetricsProcessor
from torchtitan_ext.planning import mask_picture
from torchtitan_ext.trainer import default_config

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")

DOCUMENTS = (5, 9, 18)
LENGTH = sum(DOCUMENTS)
POSITIONS = torch.cat([torch.arange(length) for length in DOCUMENTS])
"""Of a row; the other rows of a batch are one document."""

KINDS = {
    "alodlm": "dual_stream",
    "ar": "causal",
    "block_diffusion": "doubled",
    "llama3": "causal",
    "looped": "causal",
    "mdlm": "bidirectional",
    "t2mlr": "causal",
    "tdlm": "bidirectional",
    "tidar": "doubled",
    "wedlm": "dual_stream",
}


def events(folder):
    (file,) = folder.glob("events*")
    found = EventAccumulator(str(file), size_guidance={"images": 0, "scalars": 0})
    return found.Reload()


def model_of(method: str, *, file: str = "debug.toml"):
    config = load_toml(ROOT / "train_configs" / method / file, make_default=default_config)
    config.model.attention = "dense"
    with torch.device("meta"):
        return models.build_spec(config).model.build()


def batch(*, parts: int = 1) -> torch.Tensor:
    rows = torch.stack([POSITIONS, torch.arange(LENGTH)])
    return torch.cat([rows] * parts, dim=1)


def processor(folder, **settings) -> ExtMetricsProcessor:
    """One that writes, as a run's has it on the rank that does."""
    one = ExtMetricsProcessor.__new__(ExtMetricsProcessor)
    one.config = ExtMetricsProcessor.Config(**settings)
    one.logger = LoggerContainer()
    one.logger.add_logger(TensorBoardLogger(str(folder)))
    return one


# --- the mask of a run -----------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(KINDS))
@pytest.mark.parametrize("tokens", [11, 99])
def test_the_mask_is_the_method_s_over_the_first_tokens(method, tokens):
    model = model_of(method)
    parts = 2 if KINDS[method] in ("doubled", "dual_stream") else 1
    given = batch(parts=parts)
    mask, found = metrics.prefix_mask(model, given, data_length=LENGTH, tokens=tokens)
    assert mask is not None and found == parts
    first = POSITIONS[:tokens].repeat(parts)[None]
    config = model.config
    expected = {
        "causal": masks.causal_document,
        "bidirectional": masks.bidirectional_document,
        "dual_stream": lambda p: masks.dual_stream(p, block_size=config.block_size),
        "doubled": lambda p: masks.doubled_blocks(
            p, block_size=config.block_size, layout=config.mask_layout, clean=config.clean_attention
        ),
    }[KINDS[method]](first)
    assert torch.equal(mask.positions_BL, first)
    assert torch.equal(evaluate_mask(mask), evaluate_mask(expected))


def test_the_kernel_of_the_run_does_not_matter_and_stays():
    model = model_of("ar")
    for kernel in ("flex", "varlen"):
        model.config.attention = kernel
        mask, _ = metrics.prefix_mask(model, batch(), data_length=LENGTH, tokens=8)
        assert mask is not None and model.config.attention == kernel
        assert torch.equal(evaluate_mask(mask), evaluate_mask(masks.causal_document(POSITIONS[None, :8])))


def test_long_masks_are_put_together_from_their_tiles():
    positions = torch.arange(256).repeat(2)[None]  # two documents: half of the tiles are empty
    mask, _ = metrics.prefix_mask(model_of("ar"), positions, data_length=512, tokens=512)
    assert mask is not None
    assert torch.equal(evaluate_mask(mask), evaluate_mask(masks.causal_document(positions)))


@needs_matplotlib
def test_one_picture_of_the_first_batch_alone(tmp_path, monkeypatch):
    drawn, real = [], mask_picture.mask_figure
    monkeypatch.setattr(
        mask_picture, "mask_figure", lambda mask, **told: drawn.append((mask, told)) or real(mask, **told)
    )
    one, model = processor(tmp_path), model_of("tidar")
    for step in (3, 4):
        one.show_mask(model, batch(parts=2), data_length=LENGTH, step=step)
    one.logger.close()
    ((mask, told),) = drawn
    assert mask.q_len == 2 * LENGTH and told["labels"] == ("clean", "mask") and told["block"] == 4
    found = events(tmp_path)
    assert found.Tags()["images"] == [metrics.MASK_TAG]
    (image,) = found.Images(metrics.MASK_TAG)
    assert image.step == 3 and image.width > 600 and image.height > 600
    assert image.encoded_image_string.startswith(b"\x89PNG")


@needs_matplotlib
def test_nothing_is_drawn_where_nothing_is_written_or_asked_for(tmp_path, monkeypatch, caplog):
    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(metrics, "prefix_mask", never)
    quiet = processor(tmp_path)
    quiet.logger = metrics.LoggerContainer()  # another rank's, or only Weights & Biases
    off = processor(tmp_path, mask_picture_tokens=0)
    for one in (quiet, off):
        one.show_mask(None, batch(), data_length=LENGTH, step=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        processor(tmp_path).show_mask(None, batch(), data_length=LENGTH, step=1)
    assert "matplotlib is not installed" in caplog.text


@needs_matplotlib
def test_a_model_without_attention_has_no_picture(tmp_path):
    one = processor(tmp_path)
    model = model_of("t2mlr", file="s5_retrieval_lstm.toml")
    one.show_mask(model, batch(), data_length=LENGTH, step=1)
    one.logger.close()
    assert events(tmp_path).Tags()["images"] == []


def test_a_negative_number_of_tokens_is_refused():
    with pytest.raises(UserError, match="mask_picture_tokens must be at least 0, got -1"):
        ExtMetricsProcessor.Config(mask_picture_tokens=-1)


# --- evaluations -----------------------------------------------------------------------


def test_tags_say_prefix_column_and_row():
    rows = [
        {"tau": 0.1, "left1": True, "accuracy": 0.5, "samples": 8, "frontier": True, "note": None},
        {"tau": 0.4, "left1": False, "accuracy": 1, "samples": 8, "frontier": False, "note": "x"},
    ]
    assert metrics.scalars_of(rows, names=["tau", "left1"], prefix="chain_sum/sweep") == {
        "chain_sum/sweep/accuracy/tau_0.1/True": 0.5,
        "chain_sum/sweep/accuracy/tau_0.4/False": 1.0,
    }
    named = metrics.scalars_of([{"kind": "end of text", "mean_pass": 2}], names=["kind"], prefix="a")
    assert named == {"a/mean_pass/end_of_text": 2.0}


def test_the_folder_is_the_run_s_own_unless_one_is_given(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint" / "step-40"
    checkpoint.mkdir(parents=True)
    assert metrics.evaluation_folder(checkpoint, "") == tmp_path / "run" / "tb" / "evaluation"
    assert metrics.evaluation_folder(checkpoint, "", folder="x") == tmp_path / "run" / "x" / "evaluation"
    assert metrics.evaluation_folder(checkpoint, str(tmp_path / "b")) == tmp_path / "b" / "evaluation"
    assert metrics.step_of(checkpoint) == 40 and metrics.step_of(tmp_path) is None
    with pytest.raises(UserError, match="is no step-N of a run: give --tensorboard a folder"):
        metrics.evaluation_folder(tmp_path, "")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, expected a folder"):
        metrics.evaluation_folder(checkpoint, str(tmp_path / "file"))


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("evaluate_tool", ROOT / "tools" / "evaluate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "run" / "checkpoint" / "step-40"
    write_checkpoint(folder, random_model(backbones.lookup("smollm2-debug")))
    lines = ['[model]\nname = "ar"\nflavor = "smollm2-debug"', '[dataloader]\ndataset = "group_retrieval"']
    task = "[dataloader.task]\ngroup = 3\nkey_length = 1\nmax_length = 3"
    (folder / "config.toml").write_text("\n\n".join([*lines, task]) + "\n")
    return tmp_path / "run"


GROUP = ["--task", "group_retrieval", "--samples", "4", "--lengths", "1,2"]


@needs_matplotlib
@pytest.mark.parametrize("png", [True, False])
def test_an_evaluation_s_numbers_and_picture(tool, run, tmp_path, png, capsys):
    file = tmp_path / "a.png"
    tool.main([str(run), *GROUP, "--json", "--tensorboard", *(["--png", str(file)] if png else [])])
    captured = capsys.readouterr()
    results = json.loads(captured.out)["results"]
    found = events(run / "tb" / "evaluation")
    assert found.Tags()["images"] == ["group_retrieval"] and file.exists() == png
    for result in results:
        for name in ("exact_match", "token_accuracy"):
            (scalar,) = found.Scalars(f"group_retrieval/{name}/length_{result['length']}")
            assert (scalar.step, scalar.value) == (40, pytest.approx(result[name]))
    (image,) = found.Images("group_retrieval")
    assert image.step == 40
    if png:
        pixels = metrics._read_png(file)
        assert (image.height, image.width) == pixels.shape[:2]
        again = tmp_path / "again.png"
        again.write_bytes(image.encoded_image_string)
        assert np.array_equal(metrics._read_png(again), pixels)


def test_without_matplotlib_there_are_numbers(tool, run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "matplotlib" else real(n))
    tool.main([str(run), *GROUP, "--tensorboard", str(run / "board")])
    found = events(run / "board" / "evaluation").Tags()
    assert found["images"] == [] and "group_retrieval/exact_match/length_2" in found["scalars"]
    assert f"numbers in {run / 'board' / 'evaluation'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks", "arc_easy", "--samples", "5"], "--samples has no use with --tasks: --limit N takes"),
        (["--decode", "ar", "--samples", "5"], "--samples belongs to --task, which is not given"),
        ([*GROUP, "--tensorboard", __file__], "is a file, expected a folder"),
    ],
)
def test_refusals_before_the_model_is_loaded(tool, argv, message):
    with pytest.raises(UserError, match=message):
        tool.main(["nowhere", *argv])
