"""Products of few rows are the same products, and decoding uses them where it says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.unit.test_decoding_autoregressive import random_model, random_prompts
from torchtitan_ext.decoding import autoregressive, narrow
from torchtitan_ext.decoding.narrow import ROWS, narrow_linear, narrow_products

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="no MKL")


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (3, 1), (1, 4), (5,), (2, 4), (0, 1)])
@pytest.mark.parametrize("outputs", [12, 13])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear(shape, outputs, bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, 8, generator=generator, dtype=torch.float64)
    added = torch.randn(outputs, generator=generator, dtype=torch.float64) if bias else None
    x = torch.randn(*shape, 8, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(narrow_linear(x, weight, added), F.linear(x, weight, added))


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_any_strides_of_the_input(rows):
    weight = torch.randn(6, 4, dtype=torch.float64)
    wide = torch.randn(4, 3, rows, dtype=torch.float64)
    for x in (wide.permute(2, 1, 0)[:, 1], wide[:, 0].T, wide[:, 2, :1].T.expand(rows, 4)):
        found = narrow_linear(x, weight)
        torch.testing.assert_close(found, F.linear(x, weight))
        assert found.is_contiguous()


def test_only_few_rows_leave_the_plain_product(monkeypatch):
    asked = []
    monkeypatch.setattr(narrow.F, "linear", lambda x, *_: asked.append(x.shape[0]) or x)
    for rows in range(1, ROWS + 3):
        narrow_linear(torch.randn(rows, 4), torch.randn(4, 4))
    assert asked == [ROWS + 1, ROWS + 2]


@needs_mkl
def test_serves_fp32_linears_alone_and_leaves_nothing_behind(monkeypatch):
    asked = []
    monkeypatch.setattr(narrow, "narrow_linear", lambda x, w, b: asked.append(w) or F.linear(x, w, b))
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).double()])
    with pytest.raises(KeyError), narrow_products(model):
        for linear in model:
            linear(torch.zeros(1, 4, dtype=linear.weight.dtype))
        raise KeyError
    assert len(asked) == 1 and asked[0] is model[0].weight
    assert not any("forward" in vars(linear) for linear in model)
    model[0](torch.zeros(1, 4))
    assert len(asked) == 1


@needs_mkl
def test_every_product_of_a_step_is_narrow(monkeypatch):
    model, seen = random_model(), []

    def counted(x, weight, bias):
        seen.append(x.numel() // x.shape[-1])
        return narrow_linear(x, weight, bias)

    monkeypatch.setattr(narrow, "narrow_linear", counted)
    with_them = autoregressive.generate(model, random_prompts(5, 7), max_new_tokens=6)
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert seen.count(2) == 5 * linears + 1  # five steps, and the head after the prompts
    monkeypatch.setattr(narrow, "_is_served", lambda module: False)
    without = autoregressive.generate(model, random_prompts(5, 7), max_new_tokens=6)
    assert [row.new_tokens for row in with_them.results] == [row.new_tokens for row in without.results]
