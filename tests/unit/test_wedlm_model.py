"""WeDLM: the mask against its table, what each output may depend on, the loss, and bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.dual_streams import (
    MASK,
    build,
    gradients,
    loss_of,
    next_labels,
    positions_of,
    prepare,
    rows,
    run_config,
)
from torchtitan_ext import attention, masks
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods import wedlm
from torchtitan_ext.methods.wedlm import Section, batch, model_registry
from torchtitan_ext.methods.wedlm.objective import WeDLMObjective
from torchtitan_ext.objective import IGNORE_INDEX


def objective(**knobs) -> WeDLMObjective:
    return WeDLMObjective(**{"mask_id": MASK, "block_size": 4, "w_ar": 1.0, "weighting": "global", **knobs})


def oracle(lengths: list[int], *, block_size: int) -> torch.Tensor:
    """The table of the training mask, pair by pair."""
    places = [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    slots = [("x0", *place) for place in places] + [("xt", *place) for place in places]

    def allowed(query, key) -> bool:
        (q_half, q_doc, q), (k_half, k_doc, k) = query, key
        if q_doc != k_doc:
            return False
        if q_half == "x0":
            return k_half == "x0" and k <= q
        if k_half == "x0":
            return k // block_size < q // block_size
        return k // block_size == q // block_size and k <= q

    return torch.tensor([[allowed(q, k) for k in slots] for q in slots])


@given(
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=5),
    block_size=st.integers(1, 7),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=60)
def test_mask_is_the_table_whatever_the_order_in_the_blocks(lengths, block_size, seed):
    positions = positions_of(*lengths)
    tokens = torch.zeros_like(positions)
    noise = batch.draw_noise(tokens.shape, generator=torch.Generator().manual_seed(seed))
    labels = next_labels(tokens, positions)
    made = batch.dual_stream(tokens, labels, positions, noise=noise, mask_id=MASK, block_size=block_size)
    mask = masks.dual_stream(made.positions_BL, block_size=block_size)
    dense = attention.build_mask(mask, "dense")[0, 0]
    assert torch.equal(dense, oracle(lengths, block_size=block_size))


def test_row_that_starts_inside_a_block():
    dense = attention.build_mask(
        masks.dual_stream(torch.tensor([[5, 6, 7, 8]]).repeat(1, 2), block_size=4), "dense"
    )[0, 0]
    assert dense[6].tolist() == [False] * 4 + [True, True, True, False]
    assert dense[7].tolist() == [True, True, True, False, False, False, False, True]


def test_flex_forward_equals_dense():
    from torch.nn.attention.flex_attention import flex_attention

    mask = masks.dual_stream(positions_of(37, 60).repeat(1, 2), block_size=8)
    block_mask = attention.build_mask(mask, "flex")
    q, k, v = torch.randn(3, 1, 2, 194, 16, generator=torch.Generator().manual_seed(0))
    pad = [torch.nn.functional.pad(x, (0, 0, 0, block_mask.seq_lengths[0] - 194)) for x in (q, k, v)]
    flex = flex_attention(*pad, block_mask=block_mask)[:, :, :194]
    allowed = attention.build_mask(mask, "dense")
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


def test_outputs_change_only_where_the_table_allows():
    """Every token of a batch is changed in turn, through all layers of a model."""
    model = build(wedlm, scale=3.0, block_size=4)
    prepared = prepare(objective(), rows(7, 6))
    tokens, positions = prepared.inputs["input"], prepared.inputs["positions"]
    # What depends on what is the closure of the table.
    reach = oracle([7, 6], block_size=4)
    for _ in range(4):
        reach = reach | ((reach.float() @ reach.float()) > 0)
    attention_masks = model.get_attention_masks(positions)
    with torch.no_grad():
        before = model.hidden(tokens, positions, attention_masks)[0]
        for k in range(tokens.shape[1]):
            changed = tokens.clone()
            changed[0, k] = (changed[0, k] + 1) % 256
            after = model.hidden(changed, positions, attention_masks)[0]
            moved = (after - before).abs().amax(-1) > 1e-6
            assert not (moved & ~reach[:, k]).any(), k
            assert moved[k]


def test_the_clean_half_is_the_autoregressive_model():
    model = build(wedlm, scale=3.0, block_size=4)
    inputs, _ = rows(7, 6)
    prepared = prepare(objective(), rows(7, 6))
    positions = prepared.inputs["positions"]
    causal = attention.build_mask(masks.causal_document(inputs["positions"]), "dense")
    with torch.no_grad():
        dual = model(prepared.inputs["input"], positions, model.get_attention_masks(positions))[:, :13]
        plain = model(inputs["input"], inputs["positions"], causal)
    torch.testing.assert_close(dual, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weighting", ["global", "local"])
@pytest.mark.parametrize("w_ar", [1.0, 0.5, 0.0])
def test_loss_is_the_formula(weighting, w_ar):
    model = build(wedlm, block_size=4)
    packed = rows(9, 6, prompt=3, batch=2)
    prepared = prepare(objective(weighting=weighting, w_ar=w_ar), packed)
    got, metrics = loss_of(model, objective(weighting=weighting, w_ar=w_ar), prepared)
    streams = remade(packed)
    logits = model(
        streams.tokens_BL, streams.positions_BL, model.get_attention_masks(streams.positions_BL)
    ).float()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), streams.labels_BL.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    ).view_as(streams.labels_BL)
    ar = each[:, :15].sum() / (streams.labels_BL[:, :15] != IGNORE_INDEX).sum()
    weights = streams.weights_BL / streams.weights_BL.sum()
    diffusion = (weights * each).sum()
    torch.testing.assert_close(got, (diffusion + w_ar * ar) / (1 + w_ar), atol=1e-5, rtol=1e-5)
    assert metrics["wedlm/diffusion_loss"].item() == pytest.approx(diffusion.item(), abs=1e-5)
    assert ("wedlm/ar_loss" in metrics) == (w_ar > 0)


def remade(packed) -> batch.Streams:
    """The streams that :func:`prepare` made, from the same generator."""
    from torchtitan_ext.objective import row_generators

    inputs, labels = packed
    generator = row_generators(seed=0, step=1, rows=range(len(labels)))
    noise = batch.draw_noise(inputs["input"].shape, generator=generator)
    return batch.dual_stream(
        inputs["input"], labels, inputs["positions"], noise=noise, mask_id=MASK, block_size=4
    )


def test_next_tokens_never_cross_a_document_boundary():
    prepared = prepare(objective(), rows(7, 6))
    index = prepared.inputs["readout_M"][prepared.labels[0] != IGNORE_INDEX].tolist()
    assert 6 not in index and 12 not in index and {0, 5, 7, 11} <= set(index)


@pytest.mark.parametrize("weighting", ["global", "local"])
def test_a_batch_without_masks_has_zero_loss_and_all_gradients(weighting):
    model = build(wedlm, block_size=4)
    unlabelled = rows(9, 6, prompt=50)
    loss, named = gradients(
        model, objective(weighting=weighting), prepare(objective(weighting=weighting), unlabelled)
    )
    assert loss == 0
    assert all(gradient.isfinite().all() and not gradient.any() for gradient in named.values())


@pytest.mark.parametrize("weighting", ["global", "local"])
def test_accumulated_microbatches_of_unequal_counts_are_one_batch(weighting):
    """Global weights: two microbatches are one of both rows. Local ones: the mean of the two losses."""
    model, obj = build(wedlm, block_size=4), objective(weighting=weighting, w_ar=0.0)
    parts = [prepare(obj, rows(9, 6, prompt=p, seed=p), step=p) for p in (1, 6)]
    counts = {term: sum(part.counts[term] for part in parts) for term in obj.terms}
    together = sum(loss_of(model, obj, part, counts=counts)[0] for part in parts)
    alone = [loss_of(model, obj, part)[0] for part in parts]
    sums = [part.counts["diffusion"] for part in parts]
    expected = sum(n * loss for n, loss in zip(sums, alone, strict=True)) / sum(sums)
    torch.testing.assert_close(together, expected)
    assert (sums == [1.0, 1.0]) == (weighting == "local")


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        ("block_size", 0, "wedlm.block_size must be at least 1, got 0"),
        ("window", 0, "wedlm.window must be at least 1, got 0"),
        ("tau", -0.1, "wedlm.tau must be a finite number of at least 0, got -0.1"),
        ("position_penalty", float("nan"), "wedlm.position_penalty"),
        ("w_ar", -1.0, "wedlm.w_ar"),
        ("loss_weighting", "glocal", "wedlm.loss_weighting must be 'global' or 'local', got 'glocal'"),
    ],
)
def test_knobs_out_of_range_are_refused(knob, value, message):
    with pytest.raises(ValueError, match=message):
        Section(**{knob: value})


def test_what_the_mask_does_not_work_with_is_refused(monkeypatch):
    section = Section(mask_token_id=MASK)
    with pytest.raises(UserError, match=r"\[model\] attention = 'varlen' does not work"):
        model_registry("smollm2-debug", attention="varlen", section=section)
    with pytest.raises(UserError, match="needs a causal backbone"):
        model_registry("llada-debug", section=section)
    with pytest.raises(UserError, match=r"\[wedlm\] mask_token_id must be given"):
        model_registry("smollm2-debug")
    config = run_config("wedlm", monkeypatch)
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(UserError, match="pipeline_parallel_degree = 2 does not work"):
        model_registry("smollm2-debug", section=section).model.update_from_config(config=config)
