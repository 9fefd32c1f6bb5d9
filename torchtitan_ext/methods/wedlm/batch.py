"""The dual-stream batch of WeDLM: a clean sequence and a copy with masks, reordered in each block.

Shape suffixes: B = batch, S = data length, L = 2S.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchtitan_ext.data.targets import own_token_targets
from torchtitan_ext.doubled import block_starts
from torchtitan_ext.objective import IGNORE_INDEX, Generators, rand

LEAST_LEVEL = 1e-8
"""Smallest mask probability of a block, so that its inverse is finite."""


class Noise(NamedTuple):
    """Uniform numbers of one batch; everything else follows from them."""

    level_BS: torch.Tensor
    """The mask probability of a block is read at its first token."""

    order_BS: torch.Tensor
    """The supervised tokens of a block with the least numbers are masked."""


class Streams(NamedTuple):
    """A dual-stream batch; the clean half comes first."""

    tokens_BL: torch.Tensor
    positions_BL: torch.Tensor
    """Logical positions: in the copy not ascending, each block's observed tokens stand before its masks."""

    labels_BL: torch.Tensor
    """Clean half: the data's labels (next tokens). Copy: own tokens at the masks, -100 elsewhere."""

    weights_BL: torch.Tensor
    """1 / (g + 1e-8) at the masks, 0 elsewhere."""

    slots_BS: torch.Tensor
    """Which token of the clean half each slot of the copy holds."""

    @property
    def masked_BS(self) -> torch.Tensor:
        """Whether a slot of the copy is masked."""
        return self.labels_BL[:, self.slots_BS.shape[1] :] != IGNORE_INDEX


def draw_noise(shape: torch.Size, *, generator: Generators) -> Noise:
    """The random numbers of a batch [B, S]."""
    return Noise(rand(shape, generator=generator), rand(shape, generator=generator))


def dual_stream(
    tokens_BS: torch.Tensor,
    labels_BS: torch.Tensor,
    positions_BS: torch.Tensor,
    *,
    noise: Noise,
    mask_id: int,
    block_size: int,
) -> Streams:
    """Mask a random part of each block's supervised tokens and put them behind the observed ones.

    Each block draws g = max(U(0, 1), 1e-8) and masks exactly round(g |C|) of its supervised
    tokens C. ``labels_BS``: next tokens, -100 where the data asks for nothing; a prompt is never
    masked, nor is the first token of a document.
    Source: WeDLM (Liu et al., 2025), section on dual-stream masking.
    """
    starts_BS = block_starts(positions_BS, block_size=block_size)
    own_BS = own_token_targets(tokens_BS, labels_BS, positions_BS)
    supervised_BS = own_BS != IGNORE_INDEX
    level_BS = noise.level_BS.clamp(min=LEAST_LEVEL).gather(1, starts_BS)
    masked_BS = _least(noise.order_BS, supervised_BS, starts_BS, level_BS)
    # Within a block: observed before masked, each in the order of the text.
    slots_BS = torch.argsort(2 * starts_BS + masked_BS, dim=1, stable=True)
    hidden_BS = masked_BS.gather(1, slots_BS)
    copy_BS = tokens_BS.gather(1, slots_BS).masked_fill(hidden_BS, mask_id)
    copy_labels_BS = own_BS.gather(1, slots_BS).masked_fill(~hidden_BS, IGNORE_INDEX)
    # Slots stay in their block, so the level of a slot is that of its token.
    weights_BS = (1 / (level_BS + LEAST_LEVEL)).masked_fill(~hidden_BS, 0.0)
    return Streams(
        torch.cat([tokens_BS, copy_BS], dim=1),
        torch.cat([positions_BS, positions_BS.gather(1, slots_BS)], dim=1),
        torch.cat([labels_BS, copy_labels_BS], dim=1),
        torch.cat([torch.zeros_like(weights_BS), weights_BS], dim=1),
        slots_BS,
    )


def _least(
    order_BS: torch.Tensor, supervised_BS: torch.Tensor, starts_BS: torch.Tensor, level_BS: torch.Tensor
) -> torch.Tensor:
    """The round(level |C|) supervised tokens of each block with the least order numbers, bool [B, S]."""
    size_BS = torch.zeros_like(starts_BS).scatter_add(1, starts_BS, supervised_BS.long())
    wanted_BS = torch.round(size_BS.gather(1, starts_BS) * level_BS)
    # Sorted by block, and in it by the order numbers with the supervised tokens first.
    by_order_BS = torch.argsort(order_BS.masked_fill(~supervised_BS, 2.0), dim=1, stable=True)
    by_block_BS = torch.argsort(starts_BS.gather(1, by_order_BS), dim=1, stable=True)
    sorted_BS = by_order_BS.gather(1, by_block_BS)
    index_S = torch.arange(order_BS.shape[1], device=order_BS.device)
    # A block's tokens are contiguous: the rank in the block is the index minus the block's start.
    rank_BS = torch.empty_like(sorted_BS).scatter(1, sorted_BS, index_S.expand_as(sorted_BS)) - starts_BS
    return supervised_BS & (rank_BS < wanted_BS)


def weight_count(streams: Streams, *, weighting: str) -> float:
    """What a microbatch adds to the divisor of the diffusion term.

    ``weighting``: "global", its weights' sum; "local", 1 if it has any, since they already sum to 1.
    """
    total = float(streams.weights_BL.sum(dtype=torch.float64))
    return total if weighting == "global" else float(total > 0)


def normalised_weights(streams: Streams, *, weighting: str) -> torch.Tensor:
    """Weights that, divided by the global sum of :func:`weight_count`, sum to 1, [B, L]."""
    if weighting == "global":
        return streams.weights_BL
    # A weight is at least 1, so the clamp only avoids 0 / 0.
    return streams.weights_BL / streams.weights_BL.sum().clamp(min=0.5)
