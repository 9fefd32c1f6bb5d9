"""The LSTM baseline on one process: torch's LSTM on each document, causality, cost, refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.test_looped_model import build, rows, tokens_for
from torchtitan_ext import models
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.looped import Section, model_registry
from torchtitan_ext.methods.looped.lstm import document_steps
from torchtitan_ext.trainer import default_config

LSTM = {"kind": "lstm", "lstm_layers": 2, "lstm_hidden": 24, "scale": 1.0}

packed_rows = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3)


def reference(model) -> torch.nn.LSTM:
    """torch's own LSTM with the same weights."""
    lstm = torch.nn.LSTM(24, 24, 2, batch_first=True)
    lstm.load_state_dict(model.rnn.state_dict(), strict=True)
    return lstm


def padded_batch(batch: list[list[int]]) -> torch.Tensor:
    """Positions of rows of equal length: the last document of a row fills it."""
    longest = max(sum(lengths) for lengths in batch)
    return torch.cat([rows(*lengths[:-1], lengths[-1] + longest - sum(lengths)) for lengths in batch])


@given(batch=packed_rows)
@settings(deadline=None, max_examples=25)
def test_packed_documents_are_torchs_lstm_on_each(batch):
    model = build(**LSTM)
    lstm = reference(model)
    positions = padded_batch(batch)
    tokens = tokens_for(positions)
    ours = model(tokens, positions)
    expected = torch.empty_like(ours)
    for b in range(len(tokens)):
        starts = [*(positions[b] == 0).nonzero()[:, 0].tolist(), positions.shape[1]]
        for begin, end in pairwise(starts):
            states, _ = lstm(model.tok_embeddings(tokens[b : b + 1, begin:end]))
            expected[b, begin:end] = model.lm_head(states)[0]
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0))
    (ours * weight).sum().backward()
    (expected * weight).sum().backward()  # through torch's LSTM
    for name, parameter in lstm.named_parameters():
        torch.testing.assert_close(getattr(model.rnn, name).grad, parameter.grad, atol=1e-5, rtol=1e-4)


@given(batch=packed_rows)
@settings(deadline=None, max_examples=25)
def test_steps_are_a_permutation_in_which_documents_run_side_by_side(batch):
    positions = padded_batch(batch)
    steps = document_steps(positions)
    assert sorted(steps.order_M.tolist()) == list(range(positions.numel()))
    assert sum(steps.batch_sizes.tolist()) == positions.numel()
    assert steps.batch_sizes.tolist() == sorted(steps.batch_sizes.tolist(), reverse=True)
    places = positions.flatten()[steps.order_M].split(steps.batch_sizes.tolist())
    assert [set(place.tolist()) for place in places] == [{t} for t in range(len(places))]


def test_a_row_that_begins_inside_a_document_begins_afresh():
    model = build(**LSTM)
    tokens = tokens_for(rows(5))
    with torch.no_grad():
        late = model(tokens, rows(8)[:, 3:])
        assert torch.equal(late, model(tokens, rows(5)))
        assert torch.equal(late, model(tokens))


@pytest.mark.parametrize("changed", [0, 5, 6, 15])
def test_a_token_changes_nothing_before_it_nor_in_another_document(changed):
    model = build(**LSTM)
    positions = rows(6, 10)
    tokens = tokens_for(positions)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 256
    with torch.no_grad():
        difference = (model(tokens, positions) - model(other, positions)).abs().amax(-1)[0]
    document = range(6) if changed < 6 else range(6, 16)
    for t in range(16):
        assert (difference[t] > 0) == (t >= changed and t in document), t


def test_counted_flops_are_those_of_the_matrices():
    model = build(**LSTM)
    positions = rows(64)
    # The counter knows matrix products, not the CPU's fused recurrence.
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        model(tokens_for(positions), positions).sum().backward()
    counted = sum(f for op, f in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    parameters, ours = model.config.get_nparams_and_flops(model, 64)
    assert parameters == sum(p.numel() for p in model.parameters())
    # The gradient with respect to the first state and input is not needed for every step.
    assert ours == pytest.approx(counted / 64, rel=0.02)


def test_the_papers_size():
    """4 layers of 456: about as many parameters as 4 transformer layers of 384."""
    spec = model_registry("smollm2-debug", section=Section(kind="lstm"))
    with torch.device("meta"):
        model = spec.model.build()
    assert sum(p.numel() for p in model.rnn.parameters()) == 4 * (8 * 456**2 + 8 * 456)
    assert spec.state_dict_adapter is None


def test_every_parameter_is_drawn_from_its_name():
    first, second = build(**LSTM), build(**LSTM)
    drawn = dict(first.named_parameters())
    for name, parameter in second.named_parameters():
        assert torch.equal(parameter, drawn[name]), name
    weights = [drawn[f"rnn.weight_{side}_l{k}"] for side in ("ih", "hh") for k in (0, 1)]
    assert all(w.abs().max() <= 24**-0.5 and w.std() > 0.1 for w in weights)
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "context"])
def test_other_parallelisms_than_data_parallel_are_refused(kind):
    config = default_config({"name": "looped"})
    config.model.flavor = "smollm2-debug"
    config.looped = Section(kind="lstm")
    setattr(config.parallelism, f"{kind}_parallel_degree", 2)
    with pytest.raises(UserError, match=f"{kind}_parallel_degree = 2 does not work"):
        models.build_spec(config).model.update_from_config(config=config)
