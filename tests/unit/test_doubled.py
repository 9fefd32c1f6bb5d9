"""Doubled sequences: the mask against an oracle, what each output may depend on, batches and losses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchtitan_ext  # noqa: F401
from torchtitan_ext import attention, backbones, doubled, initialization, masks
from torchtitan_ext.evaluation.bench_memory import PeakBytes
from torchtitan_ext.losses import LossSection, TokenCrossEntropy, weighted_token_losses
from torchtitan_ext.methods.block_diffusion.objective import BlockDiffusionObjective
from torchtitan_ext.methods.tidar.objective import TiDARObjective, factors
from torchtitan_ext.readout import labelled

MASK = 259
documents = st.lists(st.integers(1, 11), min_size=1, max_size=5)


def positions_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def oracle(lengths: list[int], *, block_size: int, layout: str, clean: str) -> torch.Tensor:
    """The table of TiDAR's training mask, pair by pair."""
    places = [(d, i) for d, n in enumerate(lengths) for i in range(n)]
    last = {d: (n - 1) // block_size for d, n in enumerate(lengths)}
    tokens = [("clean", *place) for place in places] + [("mask", *place) for place in places]

    def allowed(query, key) -> bool:
        (q_kind, q_doc, q), (k_kind, k_doc, k) = query, key
        q_block, k_block = q // block_size, k // block_size
        if q_doc != k_doc:
            return False
        if q_kind == "clean":
            return k_kind == "clean" and (k <= q if clean == "causal" else k_block <= q_block)
        if k_kind == "clean":
            return k < q_block * block_size
        both_ways = layout == "block" or q_block == last[q_doc]
        return q_block == k_block and (both_ways or k <= q)

    return torch.tensor([[allowed(q, k) for k in tokens] for q in tokens])


@given(
    lengths=documents,
    block_size=st.integers(1, 7),
    layout=st.sampled_from(["block", "last_block"]),
    clean=st.sampled_from(["causal", "block"]),
)
@settings(deadline=None, max_examples=60)
def test_mask_is_the_table(lengths, block_size, layout, clean):
    mask = masks.doubled_blocks(
        positions_of(lengths).repeat(1, 2), block_size=block_size, layout=layout, clean=clean
    )
    dense = attention.build_mask(mask, "dense")[0, 0]
    assert torch.equal(dense, oracle(lengths, block_size=block_size, layout=layout, clean=clean))


def test_documents_of_one_token_and_rows_that_start_inside_one():
    ones = masks.doubled_blocks(torch.zeros(1, 6, dtype=torch.long), block_size=4)
    dense = attention.build_mask(ones, "dense")[0, 0]
    assert torch.equal(dense, torch.eye(6, dtype=torch.bool))
    inside = torch.tensor([[5, 6, 7, 8]]).repeat(1, 2)
    dense = attention.build_mask(masks.doubled_blocks(inside, block_size=4), "dense")[0, 0]
    assert dense[4].tolist() == [False] * 4 + [True, True, True, False]  # block 1 of its document
    assert dense[7].tolist() == [True, True, True, False, False, False, False, True]


@pytest.mark.parametrize("kind", ["block", "last_block"])
def test_flex_forward_equals_dense(kind):
    from torch.nn.attention.flex_attention import flex_attention

    mask = masks.doubled_blocks(positions_of([37, 60]).repeat(1, 2), block_size=8, layout=kind)
    block_mask = attention.build_mask(mask, "flex")
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 194, 16, generator=generator)
    pad = [torch.nn.functional.pad(x, (0, 0, 0, block_mask.seq_lengths[0] - 194)) for x in (q, k, v)]
    flex = flex_attention(*pad, block_mask=block_mask)[:, :, :194]
    dense = attention.attend_dense(q, k, v, mask_B1LT=attention.build_mask(mask, "dense"))
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-4)


# --- model -----------------------------------------------------------------------------


def tiny(block_size: int = 4, **fields) -> doubled.DoubledBackbone:
    size = backbones.lookup("smollm2-debug")
    config = doubled.DoubledBackbone.Config(
        **backbones.config_fields(size, attention="dense"),
        mask_token_id=MASK,
        block_size=block_size,
        **fields,
    )
    model = config.build()
    initialization.key_initialisers(model, seed=1)
    model.init_weights()
    return model


def run(model, tokens_BS: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
    """Logits of both halves, every copy masked, [B, 2S, V]."""
    both = torch.cat([tokens_BS, torch.full_like(tokens_BS, MASK)], 1)
    positions = positions_BS.repeat(1, 2)
    with torch.no_grad():
        return model(both, positions, model.get_attention_masks(positions))


def random_tokens(shape, *, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lengths", [[13], [5, 8, 3]])
@pytest.mark.parametrize("fields", [{}, {"mask_layout": "last_block"}, {"clean_attention": "block"}])
def test_a_token_changes_exactly_the_outputs_that_may_see_it(lengths, fields):
    """Perturbation; a masked output sees the clean tokens of earlier blocks alone."""
    model, positions = tiny(**fields), positions_of(lengths)
    total = positions.shape[1]
    tokens = random_tokens((1, total))
    base = run(model, tokens, positions)
    table = oracle(
        lengths,
        block_size=4,
        layout=fields.get("mask_layout", "block"),
        clean=fields.get("clean_attention", "causal"),
    )
    reach = table.clone()
    for _ in range(4):  # what a stack of layers can see
        reach = (reach.float() @ table.float()) > 0
    for i in range(total):
        changed = tokens.clone()
        changed[0, i] = (changed[0, i] + 7) % 256
        moved = (run(model, changed, positions) - base).abs().amax(-1)[0] > 1e-6
        assert torch.equal(moved, reach[:, i]), i


@pytest.mark.parametrize("lengths", [[16], [5, 8, 3]])
def test_clean_half_is_the_plain_causal_model(lengths):
    model, positions = tiny(), positions_of(lengths)
    tokens = random_tokens((1, positions.shape[1]))
    plain = backbones.build_config(backbones.lookup("smollm2-debug"), attention="dense").build()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        causal = plain(tokens, positions, plain.get_attention_masks(positions))
    torch.testing.assert_close(
        run(model, tokens, positions)[:, : tokens.shape[1]], causal, atol=1e-5, rtol=1e-5
    )


def test_packed_documents_equal_separate_ones():
    model, lengths = tiny(), [5, 8, 3]
    tokens, positions = random_tokens((1, 16)), positions_of(lengths)
    packed = run(model, tokens, positions).chunk(2, 1)
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        alone = run(model, tokens[:, part], positions[:, part]).chunk(2, 1)
        for whole, separate in zip(packed, alone, strict=True):
            torch.testing.assert_close(whole[:, part], separate, atol=1e-5, rtol=1e-5)
        start += n


def test_readout_is_the_same_logits():
    model, positions = tiny(), positions_of([9]).repeat(2, 2)
    tokens = random_tokens((2, 18))
    masks_ = model.get_attention_masks(positions)
    index = torch.tensor([3, 20, 35, 0])
    with torch.no_grad():
        whole = model(tokens, positions, masks_)
        some = model(tokens, positions, masks_, readout_M=index)
    assert some.shape == (1, 4, whole.shape[-1])
    torch.testing.assert_close(some[0], whole.flatten(0, 1)[index])


# --- batches ---------------------------------------------------------------------------


@st.composite
def batches(draw):
    """Tokens, labels and positions of rows of documents, some tokens of which are not supervised."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(documents)
        rows.append(positions_of(lengths))
    width = max(row.shape[1] for row in rows)
    positions = torch.cat(
        [torch.cat([row, torch.zeros(1, width - row.shape[1], dtype=torch.long)], 1) for row in rows]
    )
    tokens = random_tokens(positions.shape, seed=draw(st.integers(0, 99)))
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = torch.where(positions[:, 1:] != 0, tokens[:, 1:], -100)
    drop = torch.rand(labels.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return tokens, labels.masked_fill(drop < draw(st.sampled_from([0.0, 0.4, 1.0])), -100), positions


@given(batch=batches(), multiple=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_tidar_batch(batch, multiple):
    tokens, labels, positions = batch
    objective = TiDARObjective(mask_id=MASK, block_size=4, alpha=1.0, corruption="full", multiple=multiple)
    prepared = objective.prepare(
        {"input": tokens, "positions": positions}, labels, generator=torch.Generator().manual_seed(0)
    )
    width = tokens.shape[1]
    assert torch.equal(prepared.inputs["input"][:, :width], tokens)
    assert (prepared.inputs["input"][:, width:] == MASK).all()
    assert torch.equal(prepared.inputs["positions"], positions.repeat(1, 2))
    # The same tokens are supervised twice: as the next one and as their own.
    assert prepared.counts["ar"] == prepared.counts["diffusion"] == float((labels != -100).sum())
    got: dict[tuple[int, int], int] = {}
    index, targets = prepared.inputs["readout_M"], prepared.labels[0]
    weights = prepared.inputs["weights_1MT"][0]
    for at, target, weight in zip(index.tolist(), targets.tolist(), weights.tolist(), strict=True):
        if target != -100:
            row, column = divmod(at, 2 * width)
            got[row, column] = target
            assert weight == ([1.0, 0.0] if column < width else [0.0, 1.0])
    expected = {}
    for row, column in (labels != -100).nonzero().tolist():
        expected[row, column] = labels[row, column].item()
        expected[row, width + column + 1] = labels[row, column].item()  # token i of the copy, unshifted
    assert got == expected
    assert len(index) % multiple == 0 and len(index) > 0


@given(batch=batches(), block_size=st.integers(1, 6), seed=st.integers(0, 50))
@settings(deadline=None, max_examples=60)
def test_random_corruption(batch, block_size, seed):
    tokens, _, positions = batch
    draw = lambda: doubled.hide_randomly(  # noqa: E731
        tokens,
        positions,
        mask_id=MASK,
        block_size=block_size,
        generator=torch.Generator().manual_seed(seed),
    )
    result = draw()
    assert torch.equal(result.tokens_BS, torch.where(result.hidden_BS, MASK, tokens))
    assert torch.equal(result.tokens_BS, draw().tokens_BS)
    assert (result.noise_BS >= 1e-3).all() and (result.noise_BS <= 1).all()
    ids, blocks = masks.document_ids(positions), positions // block_size
    for row in range(len(tokens)):
        levels: dict[tuple[int, int], set[float]] = {}
        for i in range(tokens.shape[1]):
            key = (ids[row, i].item(), blocks[row, i].item())
            levels.setdefault(key, set()).add(result.noise_BS[row, i].item())
        assert all(len(found) == 1 for found in levels.values())
        assert len({v for found in levels.values() for v in found}) == len(levels)


def test_random_corruption_hides_as_often_as_it_says():
    positions = torch.arange(4096)[None]
    result = doubled.hide_randomly(
        random_tokens((1, 4096)),
        positions,
        mask_id=MASK,
        block_size=64,
        generator=torch.Generator().manual_seed(0),
    )
    assert result.hidden_BS.float().mean().item() == pytest.approx(result.noise_BS.mean().item(), abs=0.02)
    # 1/t makes every token count once in expectation.
    assert (result.hidden_BS / result.noise_BS).mean().item() == pytest.approx(1.0, abs=0.15)


# --- loss ------------------------------------------------------------------------------


def loss_of(objective, model, tokens, labels, positions, *, chunks: int = 1):
    prepared = objective.prepare(
        {"input": tokens, "positions": positions}, labels, generator=torch.Generator().manual_seed(3)
    )
    counts = {name: torch.tensor(value) for name, value in prepared.counts.items()}
    inputs = dict(prepared.inputs)
    both, places = inputs.pop("input"), inputs.pop("positions")
    loss_fn = LossSection(num_chunks=chunks).build()
    if chunks > 1:
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    try:
        return objective.loss(
            model,
            both,
            prepared.labels,
            model_inputs={"positions": places, "attention_masks": model.get_attention_masks(places)},
            loss_inputs=inputs,
            counts=counts,
            loss_fn=loss_fn,
        )
    finally:
        model._skip_lm_head = False


def next_labels(tokens, positions):
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = torch.where(positions[:, 1:] != 0, tokens[:, 1:], -100)
    return labels


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_loss_is_the_weighted_mean_of_two_means(alpha):
    model, positions = tiny(), positions_of([7, 5])
    tokens = random_tokens((1, 12))
    labels = next_labels(tokens, positions)
    objective = TiDARObjective(mask_id=MASK, block_size=4, alpha=alpha, corruption="full")
    loss, metrics = loss_of(objective, model, tokens, labels, positions)
    clean, masked = run(model, tokens, positions).chunk(2, 1)
    cross_entropy = torch.nn.functional.cross_entropy
    ar = cross_entropy(clean[0], labels[0], ignore_index=-100)
    own = torch.where(positions[0] != 0, tokens[0], -100)
    diffusion = cross_entropy(masked[0], own, ignore_index=-100)
    torch.testing.assert_close(loss, (alpha * ar + diffusion) / (1 + alpha))
    torch.testing.assert_close(metrics["tidar/diffusion_loss"], diffusion)
    assert ("tidar/ar_loss" in metrics) == (alpha > 0)


def test_factors_sum_to_one():
    assert factors(1.0) == (0.5, 0.5)
    assert factors(0.0) == (0.0, 1.0)
    assert sum(factors(2.5)) == pytest.approx(1.0)


@pytest.mark.parametrize("objective", ["tidar", "block_diffusion"])
def test_chunked_loss_and_gradient_equal_whole(objective):
    positions = positions_of([7, 5])
    tokens = random_tokens((1, 12))
    results = []
    for chunks in (1, 4):
        model = tiny()
        made = (
            TiDARObjective(mask_id=MASK, block_size=4, alpha=1.0, corruption="random", multiple=chunks)
            if objective == "tidar"
            else BlockDiffusionObjective(
                mask_id=MASK, block_size=4, alpha=0.0, weighting="elbo", multiple=chunks
            )
        )
        loss, _ = loss_of(made, model, tokens, next_labels(tokens, positions), positions, chunks=chunks)
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=1e-6, rtol=1e-4, msg=name)


def test_nothing_supervised_is_a_zero_connected_to_the_graph():
    model, positions = tiny(), positions_of([6])
    tokens = random_tokens((1, 6))
    objective = TiDARObjective(mask_id=MASK, block_size=4, alpha=1.0, corruption="full")
    loss, _ = loss_of(objective, model, tokens, torch.full_like(tokens, -100), positions)
    loss.backward()
    assert loss.item() == 0.0
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and torch.isfinite(g).all() and not g.any() for g in gradients)


def test_elbo_weighting_is_the_bound_by_enumeration():
    """Over all ways to hide a block of two tokens, the estimator's expectation is the bound."""
    model, positions = tiny(block_size=2), torch.arange(3)[None]
    tokens = random_tokens((1, 3))
    labels = next_labels(tokens, positions)
    objective = BlockDiffusionObjective(mask_id=MASK, block_size=2, alpha=0.0, weighting="elbo")
    t = 0.3

    def value(hidden: list[bool]) -> float:
        hidden_BS = torch.tensor([hidden])
        objective.corrupt = lambda tokens_BS, positions_BS, *, generator: doubled.Corrupted(
            tokens_BS.masked_fill(hidden_BS, MASK), hidden_BS, torch.full(tokens_BS.shape, t)
        )
        return loss_of(objective, model, tokens, labels, positions)[0].item()

    def chance(hidden: list[bool]) -> float:
        return torch.tensor([t if h else 1 - t for h in hidden]).prod().item()

    import itertools

    patterns = [list(p) for p in itertools.product([False, True], repeat=3)]
    expectation = sum(chance(p) * value(p) for p in patterns)
    # Token 1 sees token 0 or its mask; token 2 begins a block of its own. Token 0 is not supervised.
    logits = {}
    for first in (tokens[0, 0].item(), MASK):
        both = torch.cat([tokens, torch.tensor([[first, MASK, MASK]])], 1)
        places = positions.repeat(1, 2)
        with torch.no_grad():
            logits[first] = model(both, places, model.get_attention_masks(places))[0, 3:].log_softmax(-1)
    seen = logits[tokens[0, 0].item()][1, tokens[0, 1]]
    unseen = logits[MASK][1, tokens[0, 1]]
    second = -(t * unseen + (1 - t) * seen)
    third = -logits[MASK][2, tokens[0, 2]]
    assert expectation == pytest.approx(((second + third) / 2).item(), rel=1e-4)


def test_readout_pads_to_a_multiple():
    labels = torch.tensor([[-100, 5, -100], [7, -100, 9]])
    readout = labelled(labels, multiple=4)
    assert readout.index_M.tolist() == [1, 3, 5, 0]
    assert readout.labels_1M.tolist() == [[5, 7, 9, -100]]
    assert labelled(torch.full((1, 3), -100), multiple=2).labels_1M.tolist() == [[-100, -100]]


@pytest.mark.parametrize("chunks", [1, 3, 6])
def test_token_losses_by_chunks_equal_cross_entropy(chunks):
    """And a head's gradient from before is added to."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 11, bias=False)
    hidden = torch.randn(2, 6, 8, requires_grad=True)
    labels = torch.tensor([[1, -100, 3, 4, 10, 7], [0, 2, -100, 5, 6, -100]])
    weights = torch.rand(2, 6)
    before = torch.randn(11, 8)
    head.weight.grad = before.clone()
    total, got = weighted_token_losses(head, hidden, labels, weights, num_chunks=chunks)
    expected = torch.nn.functional.cross_entropy(
        head(hidden).transpose(1, 2), labels, reduction="none", ignore_index=-100
    )
    torch.testing.assert_close(got, expected)
    assert not got.requires_grad
    theirs = torch.autograd.grad((expected * weights).sum(), [hidden, head.weight])
    torch.testing.assert_close(total, (expected * weights).sum())
    total.backward()
    ours = hidden.grad, head.weight.grad - before
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_chunk_of_token_losses_holds_two_tensors_of_its_logits_size():
    """The logits and their gradient, in forward and backward."""
    chunks, tokens, vocabulary = 4, 32, 20_000
    head = torch.nn.Linear(4, vocabulary, bias=False)
    hidden = torch.randn(1, chunks * tokens, 4, requires_grad=True)
    labels = torch.randint(0, vocabulary, hidden.shape[:2])
    with PeakBytes() as counted:
        total, _ = weighted_token_losses(
            head, hidden, labels, torch.ones(hidden.shape[:2]), num_chunks=chunks
        )
        total.backward()
    assert counted.peak / (tokens * vocabulary * 4) == pytest.approx(2, abs=0.5)


def test_terms_of_the_token_loss():
    torch.manual_seed(0)
    logits, labels = torch.randn(1, 3, 7), torch.tensor([[1, 2, -100]])
    weights = torch.rand(1, 3, 2)
    loss, metrics = TokenCrossEntropy(TokenCrossEntropy.Config())(
        logits, labels, loss_weights_BLT=weights, term_factors=[2.0, 0.5]
    )
    nll = -logits.log_softmax(-1)[0, [0, 1], [1, 2]]
    terms = [(nll * weights[0, :2, t]).sum() for t in range(2)]
    torch.testing.assert_close(loss, 2 * terms[0] + 0.5 * terms[1])
    torch.testing.assert_close(metrics["term_1_mean"], terms[1])
