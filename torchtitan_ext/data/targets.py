"""Targets derived from the next-token labels. B rows of L tokens."""

from __future__ import annotations

import torch
from torchtitan.components.loss import IGNORE_INDEX


def own_token_targets(
    tokens_BL: torch.Tensor, labels_BL: torch.Tensor, positions_BL: torch.Tensor
) -> torch.Tensor:
    """Each position's own token where that token is supervised, else -100.

    Token i is supervised when ``labels[i - 1]`` asks for it and both lie in
    the same document; so the first token of a document never is.
    All int64 [B, L].
    """
    supervised_BL = torch.zeros_like(labels_BL, dtype=torch.bool)
    supervised_BL[:, 1:] = (labels_BL[:, :-1] != IGNORE_INDEX) & (positions_BL[:, 1:] != 0)
    return torch.where(supervised_BL, tokens_BL, IGNORE_INDEX)
