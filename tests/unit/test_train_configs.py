"""Every shipped TOML parses and builds on the meta device, and says true numbers."""

from __future__ import annotations

import re

import pytest
import torch

import torchtitan_ext  # noqa: F401
from tests.paths import ROOT
from torchtitan_ext import config as front
from torchtitan_ext import models
from torchtitan_ext.trainer import default_config

FILES = sorted((ROOT / "train_configs").rglob("*.toml"))


def ids(path):
    return str(path.relative_to(ROOT / "train_configs"))


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_parses_and_builds_on_meta(path):
    config = front.load_toml(path, make_default=default_config)
    spec = models.build_spec(config)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    parameters, flops = spec.model.get_nparams_and_flops(model, config.training.seq_len)
    assert parameters > 0 and flops > 0
    assert models.build_objective(config).terms


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_says_how_to_start_it(path):
    assert f"CONFIG_FILE={path.relative_to(ROOT)}" in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_token_budget_in_the_comment_is_true(path):
    text = path.read_text()
    stated = re.search(r"# Tokens: (\d+) steps x (\d+) x (\d+) = ([\d.]+) billion", text)
    config = front.load_toml(path, make_default=default_config)
    if stated is None:
        assert "h100" not in path.name, "a cluster config states its tokens"
        return
    t = config.training
    assert [int(stated[i]) for i in (1, 2, 3)] == [t.steps, t.global_batch_size, t.seq_len]
    assert float(stated[4]) == pytest.approx(t.steps * t.global_batch_size * t.seq_len / 1e9, abs=0.005)


def test_each_method_has_a_debug_config():
    from torchtitan_ext.registry import METHODS

    for name in METHODS:
        assert (ROOT / "train_configs" / name / "debug.toml").is_file()
