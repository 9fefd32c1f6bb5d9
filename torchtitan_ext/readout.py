"""Which positions need logits.

Only a position with a label has a loss, so only its hidden state passes the LM head: on a
vocabulary of 150k a position costs as much there as in several blocks.

Shape suffixes: B = batch, L = sequence length, M = positions that are read out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchtitan_ext.objective import IGNORE_INDEX


class Readout(NamedTuple):
    """The labelled positions of a batch as one row."""

    index_M: torch.Tensor
    """Indices into the flattened [B * L] positions, what a model takes as ``readout_M``."""

    labels_1M: torch.Tensor
    """Their labels; -100 where the row was filled up."""


def labelled(labels_BL: torch.Tensor, *, multiple: int = 1) -> Readout:
    """All positions that have a label, filled up with position 0 and label -100.

    ``multiple``: what M is rounded up to (at least once), so that it divides into the chunks
    of a loss. Call it on the CPU: on an accelerator it would wait for the device.
    """
    flat_N = labels_BL.flatten()
    index_M = (flat_N != IGNORE_INDEX).nonzero()[:, 0]
    missing = -len(index_M) % multiple if len(index_M) else multiple
    labels_M = torch.cat([flat_N[index_M], flat_N.new_full((missing,), IGNORE_INDEX)])
    index_M = torch.cat([index_M, index_M.new_zeros(missing)])
    return Readout(index_M, labels_M[None])
