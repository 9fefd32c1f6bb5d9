"""The dual-stream batch: what is kept, what is masked, in which order; counts and weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.dual_streams import MASK, next_labels, positions_of
from torchtitan_ext.methods.wedlm import batch
from torchtitan_ext.objective import IGNORE_INDEX

documents = st.lists(st.integers(1, 13), min_size=1, max_size=5)


def streams_of(lengths, *, block_size, prompt, seed, start=0):
    """One row; ``start``: the row begins inside a document."""
    positions = positions_of(*lengths)
    positions[:, : lengths[0]] += start
    generator = torch.Generator().manual_seed(seed)
    # Distinct tokens, so that each can be told apart.
    tokens = torch.randperm(200, generator=generator)[: positions.shape[1]][None]
    labels = next_labels(tokens, positions).masked_fill(positions < prompt - 1, IGNORE_INDEX)
    noise = batch.draw_noise(tokens.shape, generator=generator)
    made = batch.dual_stream(tokens, labels, positions, noise=noise, mask_id=MASK, block_size=block_size)
    return tokens[0], labels[0], positions[0], noise, made


def blocks_of(positions, block_size):
    """Lists of indices, one for each block of each document, found token by token."""
    blocks, previous = [], None
    for i, position in enumerate(positions.tolist()):
        if position == 0 or previous is None or position // block_size != previous:
            blocks.append([])
        blocks[-1].append(i)
        previous = position // block_size
    return blocks


@given(
    lengths=documents,
    block_size=st.integers(1, 9),
    prompt=st.integers(0, 6),
    seed=st.integers(0, 999),
    start=st.integers(0, 20),
)
@settings(deadline=None, max_examples=150)
def test_each_block_keeps_its_tokens_and_masks_an_exact_number(lengths, block_size, prompt, seed, start):
    tokens, labels, positions, noise, made = streams_of(
        lengths, block_size=block_size, prompt=prompt, seed=seed, start=start
    )
    length = len(tokens)
    copy, place = made.tokens_BL[0, length:], made.positions_BL[0, length:]
    own, weights = made.labels_BL[0, length:], made.weights_BL[0, length:]
    assert torch.equal(made.tokens_BL[0, :length], tokens) and torch.equal(made.labels_BL[0, :length], labels)
    for block in blocks_of(positions, block_size):
        hidden = [i for i in block if copy[i] == MASK]
        seen = [i for i in block if copy[i] != MASK]
        # Observed first, then masked, both in the order of the text.
        assert seen + hidden == block
        for part in (seen, hidden):
            assert place[part].tolist() == sorted(place[part].tolist())
        # The multiset of (token, logical position) is kept: a mask stands for its own token.
        original = {(tokens[i].item(), positions[i].item()) for i in block}
        now = {(copy[i].item(), place[i].item()) for i in seen} | {
            (own[i].item(), place[i].item()) for i in hidden
        }
        assert now == original
        assert all(own[i] == IGNORE_INDEX and weights[i] == 0 for i in seen)
        # The first token of a document and of a prompt is never supervised.
        supervised = [i for i in block if i > 0 and labels[i - 1] != IGNORE_INDEX and positions[i] != 0]
        allowed = {(tokens[i].item(), positions[i].item()) for i in supervised}
        assert {(own[i].item(), place[i].item()) for i in hidden} <= allowed
        level = max(noise.level_BS[0, block[0]].item(), 1e-8)
        assert len(hidden) == round(len(supervised) * level)
        assert all(weights[i] == pytest.approx(1 / (level + 1e-8), rel=1e-5) for i in hidden)


def test_blocks_without_masks_occur_and_subsets_are_uniform():
    positions = positions_of(8).repeat(4000, 1)
    tokens = torch.arange(8).repeat(4000, 1)
    labels = next_labels(tokens, positions)
    noise = batch.draw_noise(tokens.shape, generator=torch.Generator().manual_seed(0))
    made = batch.dual_stream(tokens, labels, positions, noise=noise, mask_id=MASK, block_size=4)
    masked_B24 = made.masked_BS.view(-1, 2, 4)
    counts = masked_B24.sum(2)
    # Three supervised tokens in the first block (m = round(3 g)), four in the second.
    shares = [(counts[:, 0] == m).float().mean().item() for m in range(4)]
    assert shares == pytest.approx([1 / 6, 1 / 3, 1 / 3, 1 / 6], abs=0.03)
    assert (counts[:, 1] == 0).float().mean().item() == pytest.approx(1 / 8, abs=0.02)
    own = made.labels_BL[:, 8:]
    each = [(own == token).float().sum().item() / 4000 for token in range(8)]
    assert each[0] == 0 and each[1:] == pytest.approx([0.5] * 7, abs=0.03)


def test_the_same_noise_gives_the_same_batch_and_rows_are_independent():
    first = streams_of([7, 5], block_size=4, prompt=0, seed=3)[-1]
    again = streams_of([7, 5], block_size=4, prompt=0, seed=3)[-1]
    other = streams_of([7, 5], block_size=4, prompt=0, seed=4)[-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.tokens_BL, other.tokens_BL)


@pytest.mark.parametrize("weighting", ["global", "local"])
def test_weights_sum_to_one_over_the_batch_or_in_each_microbatch(weighting):
    parts = [streams_of([9, 6], block_size=4, prompt=0, seed=seed)[-1] for seed in range(5)]
    count = sum(batch.weight_count(part, weighting=weighting) for part in parts)
    shares = [batch.normalised_weights(part, weighting=weighting).sum().item() / count for part in parts]
    assert sum(shares) == pytest.approx(1, abs=1e-6)
    if weighting == "local":
        assert shares == pytest.approx([1 / 5] * 5)


def test_nothing_supervised_is_nothing_masked():
    made = streams_of([9, 6], block_size=4, prompt=50, seed=0)[-1]
    assert not made.masked_BS.any()
    for weighting in ("global", "local"):
        assert batch.weight_count(made, weighting=weighting) == 0
        assert not batch.normalised_weights(made, weighting=weighting).isnan().any()
