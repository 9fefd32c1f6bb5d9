"""The cache against lists of what each row should hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_ext.attention import attend_dense
from torchtitan_ext.decoding import KVCache

HEADS, WIDTH, LAYERS = 2, 3, 2


def fresh(rows: int, length: int) -> torch.Tensor:
    """New keys [B, L, N, H], every number different."""
    fresh.count = getattr(fresh, "count", 0) + 1
    return (
        torch.arange(rows * length * HEADS * WIDTH).reshape(rows, length, HEADS, WIDTH) + 1000.0 * fresh.count
    )


def write(cache: KVCache, k_BLNH: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cache.attend(k_BLNH.shape[1])
    return [cache.update(layer, k_BLNH + layer, -k_BLNH - layer) for layer in range(LAYERS)]


def rows_of(cache: KVCache, layer: int = 0) -> list[torch.Tensor]:
    """What each row holds, [T_b, N, H]."""
    keys, values = cache.layer(layer)
    assert torch.equal(keys, -values)
    return [keys[b, :, :length].transpose(0, 1) for b, length in enumerate(cache.lengths)]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5), st.randoms(use_true_random=False)),
        st.tuples(st.just("truncate"), st.just(0), st.randoms(use_true_random=False)),
        st.tuples(st.just("select"), st.just(0), st.randoms(use_true_random=False)),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=60)
@given(batch=st.integers(1, 4), capacity=st.integers(1, 6), script=operations)
def test_any_sequence_of_operations_keeps_each_rows_own_tokens(batch, capacity, script):
    cache = KVCache(batch, capacity=capacity)
    held = [torch.zeros(0, HEADS, WIDTH) for _ in range(batch)]
    for name, length, random in script:
        if name == "append":
            new = fresh(cache.batch, length)
            write(cache, new)
            counts = [random.randint(0, length) for _ in held]
            cache.advance(counts)
            held = [torch.cat((old, new[b, : counts[b]])) for b, old in enumerate(held)]
        elif name == "truncate":
            lengths = [random.randint(0, len(old)) for old in held]
            cache.truncate(lengths)
            held = [old[:n] for old, n in zip(held, lengths, strict=True)]
        else:
            rows = [random.randrange(cache.batch) for _ in range(random.randint(1, 3))]
            cache.select(rows)
            held = [held[row] for row in rows]
    assert cache.lengths == [len(old) for old in held]
    if any(name == "append" for name, _, _ in script):
        for layer in range(LAYERS):
            for got, want in zip(rows_of(cache, layer), held, strict=True):
                assert torch.equal(got, want + layer * bool(len(want)))


def test_equal_rows_take_the_path_without_mask_and_read_no_more_than_needed():
    cache = KVCache(3, capacity=16)
    assert cache.attend(4).mask_BQK.shape == (1, 4, 4)
    write(cache, fresh(3, 4))
    cache.advance(4)
    attention = cache.attend(1)
    assert attention.mask_BQK is None
    keys, values = cache.update(0, fresh(3, 1), fresh(3, 1))
    assert keys.shape == values.shape == (3, HEADS, 5, WIDTH)
    assert cache.positions(1).tolist() == [[4]]


def test_unequal_rows_are_masked_to_their_own_past():
    cache = KVCache(2, capacity=8)
    write(cache, fresh(2, 3))
    cache.advance([1, 3])
    attention = cache.attend(2)
    assert cache.positions(2).tolist() == [[1, 2], [3, 4]]
    assert attention.mask_BQK.int().tolist() == [
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    ]


def test_unequal_writes_equal_equal_writes():
    """The general path (index) and the fast path (slice) store the same."""
    new, single = fresh(2, 3), fresh(2, 1)
    fast, general = KVCache(2, capacity=8), KVCache(2, capacity=8)
    write(fast, new)
    fast.advance(3)
    slots_BL = torch.tensor([[0, 1, 2], [0, 1, 2]])
    causal = torch.ones(3, 3, dtype=torch.bool).tril()[None]
    general.attend_at(slots_BL, causal)
    for layer in range(LAYERS):
        general.update(layer, new + layer, -new - layer)
    general.advance(3)
    for layer in range(LAYERS):
        assert torch.equal(fast.layer(layer)[0], general.layer(layer)[0])
    got = write(fast, single)[0][0]
    general.attend_at(torch.tensor([[3], [3]]), None)
    assert torch.equal(got, general.update(0, single, -single)[0])


def test_explicit_slots_leave_the_others_untouched():
    cache = KVCache(2, capacity=8)
    old = fresh(2, 6)
    write(cache, old)
    cache.advance(6)
    new = fresh(2, 2)
    cache.attend_at(torch.tensor([[4, 1], [0, 5]]), torch.ones(1, 2, 6, dtype=torch.bool))
    keys, _ = cache.update(0, new, -new)
    assert keys.shape[2] == 6 and cache.lengths == [6, 6]
    want = old.clone()
    want[0, 4], want[0, 1], want[1, 0], want[1, 5] = new[0, 0], new[0, 1], new[1, 0], new[1, 1]
    assert torch.equal(keys.transpose(1, 2), want)


def test_without_a_mask_every_slot_in_use_is_read():
    cache = KVCache(2, capacity=8)
    write(cache, fresh(2, 6))
    cache.advance([6, 2])
    for slots, end in (([[1], [2]], 6), ([[7], [7]], 8)):
        cache.attend_at(torch.tensor(slots), None)
        assert cache.update(0, fresh(2, 1), fresh(2, 1))[0].shape[2] == end


def test_slots_that_were_never_written_do_not_spoil_the_attention():
    cache = KVCache(2, capacity=32)
    write(cache, torch.randn(2, 3, HEADS, WIDTH))
    cache.advance([1, 3])
    cache.select([0, 0])
    cache.lengths = [1, 3]
    attention = cache.attend(4)
    k_BNTH, v_BNTH = cache.update(7, *(torch.randn(2, 4, HEADS, WIDTH) for _ in range(2)))
    out = attend_dense(torch.randn(2, HEADS, 4, WIDTH), k_BNTH, v_BNTH, mask_B1LT=attention.mask_BQK[:, None])
    assert out.isfinite().all()


def test_growing_keeps_what_is_stored():
    cache = KVCache(1, capacity=2)
    parts = [fresh(1, n) for n in (2, 1, 7)]
    for part in parts:
        write(cache, part)
        cache.advance(part.shape[1])
    assert cache.capacity >= 10
    assert torch.equal(rows_of(cache)[0], torch.cat(parts, dim=1)[0])


def test_wrong_use_is_refused():
    cache = KVCache(2, capacity=4)
    with pytest.raises(RuntimeError, match="attend"):
        cache.update(0, fresh(2, 1), fresh(2, 1))
    write(cache, fresh(2, 3))
    cache.advance(3)
    for action in (
        lambda: cache.truncate([4, 1]),
        lambda: cache.truncate([1]),
        lambda: cache.advance([-1, 0]),
        lambda: cache.advance(5),
        lambda: cache.select([2]),
        lambda: cache.select([]),
        lambda: cache.attend_at(torch.tensor([[5]]), torch.ones(1, 1, 3, dtype=torch.bool)),
        lambda: KVCache(0),
    ):
        with pytest.raises(ValueError):
            action()
    assert cache.lengths == [3, 3]
