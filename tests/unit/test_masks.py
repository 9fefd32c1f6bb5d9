"""Masks against an oracle written from their definition, and the kernels against the dense form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext import attention, masks
from torchtitan_ext.attention import dense
from torchtitan_ext.errors import UserError

documents = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def positions_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def oracle(lengths: list[int], *, causal: bool) -> torch.Tensor:
    """Whether i may attend to j, from the list of documents alone."""
    document = [d for d, n in enumerate(lengths) for _ in range(n)]
    total = len(document)
    rows = [
        [document[i] == document[j] and (not causal or j <= i) for j in range(total)] for i in range(total)
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@given(lengths=documents)
@settings(deadline=None, max_examples=30)
def test_dense_form_equals_the_definition(kind, lengths):
    mask = masks.DOCUMENT_MASKS[kind](positions_of(lengths))
    dense_B1LL = attention.build_mask(mask, "dense")
    assert dense_B1LL.shape[:2] == (1, 1)
    assert torch.equal(dense_B1LL[0, 0], oracle(lengths, causal=kind == "causal"))


def test_rows_of_a_batch_have_their_own_documents():
    positions_BL = torch.cat([positions_of([3, 5]), positions_of([8])])
    dense_B1LL = attention.build_mask(masks.causal_document(positions_BL), "dense")
    assert torch.equal(dense_B1LL[0, 0], oracle([3, 5], causal=True))
    assert torch.equal(dense_B1LL[1, 0], oracle([8], causal=True))


def test_row_that_starts_inside_a_document():
    positions_BL = torch.tensor([[4, 5, 0, 1]])
    dense_B1LL = attention.build_mask(masks.bidirectional_document(positions_BL), "dense")
    assert torch.equal(dense_B1LL[0, 0], oracle([2, 2], causal=False))


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize("lengths", [[5, 12, 1], [128], [100, 57], [40, 88, 130]])
def test_flex_forward_equals_dense_on_any_length(kind, lengths):
    """Padding inside the attention room; the uncompiled kernel is the same mathematics."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = masks.DOCUMENT_MASKS[kind](positions_of(lengths))
    block_mask = attention.build_mask(mask, "flex")
    length, padded = sum(lengths), block_mask.seq_lengths[0]
    assert padded % 128 == 0 and padded >= length
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 8, generator=generator).unbind()
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 0, padded - length))  # noqa: E731
    flex = flex_attention(pad(q), pad(k), pad(v), block_mask=block_mask)[:, :, :length]
    dense = attention.attend_dense(q, k, v, mask_B1LT=attention.build_mask(mask, "dense"))
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=1e-5)


@given(lengths=documents)
@settings(deadline=None, max_examples=20)
def test_varlen_boundaries_are_the_documents(lengths):
    mask = masks.causal_document(positions_of(lengths))
    varlen = attention.build_mask(mask, "varlen")
    expected = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert varlen.metadata.cu_seq_q.tolist() == expected
    assert varlen.metadata.max_q == max(lengths)
    assert varlen.window == (-1, 0)
    assert attention.build_mask(masks.bidirectional_document(positions_of(lengths)), "varlen").window == (
        -1,
        -1,
    )


def test_varlen_refuses_a_structured_mask():
    mask = masks.causal_document(positions_of([4]))
    other = masks.Mask("hybrid", mask.mod, mask.positions_BL, 4, 4)
    with pytest.raises(UserError, match="use 'flex'"):
        attention.build_mask(other, "varlen")


def test_backend_choice_is_explicit():
    assert attention.resolve_backend("auto", "cpu") == "dense"
    assert attention.resolve_backend("auto", "cuda") == "flex"
    assert attention.resolve_backend("varlen", "cuda") == "varlen"
    with pytest.raises(UserError, match="FlexAttention has no backward"):
        attention.resolve_backend("flex", "cpu")
    with pytest.raises(UserError, match="did you mean 'dense'"):
        attention.resolve_backend("dens", "cpu")


def test_dense_attention_refuses_a_missing_mask():
    module = attention.inner_attention_config("dense", 0).build()
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(TypeError, match="boolean mask"):
        module(x, x, x, attention_masks=None)


def test_grouped_heads_equal_repeated_heads():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 6, 5, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, 5, 8, generator=generator).unbind()
    mask = attention.build_mask(masks.causal_document(positions_of([5]).expand(2, -1)), "dense")
    grouped = attention.attend_dense(q, k, v, mask_B1LT=mask)
    repeated = attention.attend_dense(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), mask_B1LT=mask)
    torch.testing.assert_close(grouped, repeated, atol=1e-6, rtol=1e-6)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    tile=st.integers(1, 8).map(lambda half: 2 * half),
    grain=st.integers(1, 6),
    doubled=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_attention_in_tiles_equals_the_whole(lengths, tile, grain, doubled):
    positions = positions_of(lengths)
    mask = (
        masks.doubled_blocks(positions.repeat(1, 2), block_size=4)
        if doubled
        else masks.causal_document(positions)
    )
    allowed = attention.evaluate_mask(mask)
    parts = attention.tiled(allowed, tile=tile, grain=grain)
    if parts is None:
        return
    length = allowed.shape[-1]
    assert [i for part in parts.tiles for i in range(length)[part.queries]] == list(range(length))
    computed = sum(part.allowed_B1QK.shape[-2:].numel() for part in parts.tiles)
    assert computed <= 0.86 * (length + tile) * (length + grain)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 8, generator=generator) for heads in (4, 2, 2))
    whole, pieces = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    out = attention.attend_dense(*whole, mask_B1LT=allowed)
    cut = attention.attend_dense(*pieces, mask_B1LT=parts)
    torch.testing.assert_close(cut, out, atol=1e-5, rtol=1e-5)
    weights = torch.randn(out.shape, generator=generator)
    for tensors, result in ((whole, out), (pieces, cut)):
        (result * weights).sum().backward()
        assert tensors[0].grad is not None
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_gradients_of_pieces_are_those_of_slices_bit_for_bit():
    runs = [(slice(0, 3),), (slice(0, 6),), (slice(1, 4), slice(6, 9)), (slice(2, 9),)]
    generator = torch.Generator().manual_seed(0)
    # As the projections give it: [B, T, N, H] in memory.
    x_BNTH = torch.randn(2, 9, 3, 4, generator=generator).transpose(1, 2).requires_grad_()
    slices = [torch.cat([x_BNTH[:, :, run] for run in piece], dim=2) for piece in runs]
    pieces = dense._Pieces.apply(x_BNTH, runs)
    weights = [torch.randn(piece.shape, generator=generator) for piece in slices]
    for piece, expected in zip(pieces, slices, strict=True):
        assert torch.equal(piece, expected)
    (grad,) = torch.autograd.grad(pieces, x_BNTH, weights)
    assert torch.equal(grad, *torch.autograd.grad(slices, x_BNTH, weights))
    assert grad.stride() == x_BNTH.stride()


def test_keys_that_no_query_of_a_tile_sees_are_left_out_to_a_grain():
    # Blocks that straddle the tiles, as in a row that starts inside a document.
    mask = masks.doubled_blocks((torch.arange(512) + 3).repeat(2)[None], block_size=8)
    parts = attention.tiled(attention.evaluate_mask(mask), tile=128, grain=16)
    assert parts is not None
    for i, part in enumerate(parts.tiles[4:]):
        clean, own = part.keys
        assert clean == slice(0, (i + 1) * 128)
        before, behind = 16 * (i > 0), 16 * (i < 3)
        assert own == slice(512 + i * 128 - before, 512 + (i + 1) * 128 + behind)


def test_long_sparse_masks_come_in_tiles_and_others_do_not():
    long = attention.build_mask(masks.causal_document(torch.arange(512)[None]), "dense")
    assert isinstance(long, attention.TiledMask)
    assert [len(part.keys) for part in long.tiles] == [1, 1, 1, 1]
    assert isinstance(
        attention.build_mask(masks.bidirectional_document(torch.arange(512)[None]), "dense"), torch.Tensor
    )
    assert isinstance(
        attention.build_mask(masks.causal_document(torch.arange(64)[None]), "dense"), torch.Tensor
    )


def test_queries_are_cut_finer_where_that_leaves_much_less_to_compute():
    """A doubled row of 256 tokens goes from 8 to 6 tiles of 128 x 128, a causal one of 512 from 10 to 9."""
    positions = torch.arange(256)[None]
    doubled = attention.build_mask(masks.doubled_blocks(positions.repeat(1, 2), block_size=8), "dense")
    causal = attention.build_mask(masks.causal_document(torch.arange(512)[None]), "dense")
    sizes = [{part.allowed_B1QK.shape[2] for part in mask.tiles} for mask in (doubled, causal)]
    assert sizes == [{64}, {128}]
