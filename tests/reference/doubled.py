"""Training on a clean sequence and a masked copy without a doubled mask: a forward for each block.

Shape suffixes: B = batch, S = data length, 2S = both halves, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch


def logits(
    model: Any,
    tokens_B2S: torch.Tensor,
    positions_B2S: torch.Tensor,
    *,
    block_size: int,
    clean: str = "causal",
    block: str = "both_ways",
) -> torch.Tensor:
    """Logits [B, 2S, V] for rows of one document each.

    ``clean``: how the first half attends to itself, "causal" or "block" (both ways inside a block).
    ``block``: how a block of the second half attends to itself, "both_ways" or "causal".
    """
    length = tokens_B2S.shape[1] // 2
    index_S = torch.arange(length)
    clean_SS = index_S[None] <= index_S[:, None]
    if clean == "block":
        clean_SS = index_S[None] // block_size <= index_S[:, None] // block_size
    found = [model(tokens_B2S[:, :length], positions_B2S[:, :length], clean_SS[None, None])]
    for begin in range(0, length, block_size):
        end = min(begin + block_size, length)
        index = torch.cat([index_S[:begin], length + index_S[begin:end]])
        inside = torch.ones(end - begin, end - begin, dtype=torch.bool)
        mask = torch.zeros(end, end, dtype=torch.bool)
        mask[:begin, :begin] = clean_SS[:begin, :begin]
        mask[begin:, :begin] = True
        mask[begin:, begin:] = inside if block == "both_ways" else inside.tril()
        found.append(model(tokens_B2S[:, index], positions_B2S[:, index], mask[None, None])[:, begin:])
    return torch.cat(found, dim=1)


def loss(model: Any, tokens_B2S: torch.Tensor, positions_B2S: torch.Tensor, **layout: Any) -> torch.Tensor:
    """Cross-entropy of every position of both halves against the clean tokens, with all logits at once."""
    length = tokens_B2S.shape[1] // 2
    logits_B2SV = logits(model, tokens_B2S, positions_B2S, **layout)
    following_BS, own_BS = tokens_B2S[:, :length].roll(-1, dims=1), tokens_B2S[:, :length]
    targets_B2S = torch.cat([following_BS, own_BS], dim=1)
    return torch.nn.functional.cross_entropy(logits_B2SV.flatten(0, 1), targets_B2S.flatten())
