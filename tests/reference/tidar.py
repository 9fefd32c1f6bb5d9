"""TiDAR's decoding in two forwards a step, one that verifies and one that drafts, without a cache."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def decode(model: Any, prompt: list[int], *, new: int, mask_id: int, draft_length: int) -> list[int]:
    """Greedy."""
    row, drafts = list(prompt), []
    while len(row) < len(prompt) + new:
        tokens = [*row, *drafts]
        best = causal(model, tokens).argmax(-1).tolist()[len(row) - 1 :]
        # Draft i holds if the model itself, after the tokens before it, says the same.
        held = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
        row += [*drafts[:held], best[held]]
        drafts = drafted(model, row, mask_id=mask_id, draft_length=draft_length)
    return row[len(prompt) : len(prompt) + new]


def causal(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of plain next-token prediction, [L, V]."""
    length = len(tokens)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return model(torch.tensor([tokens]), torch.arange(length)[None], mask[None, None])[0]


def drafted(model: Any, row: list[int], *, mask_id: int, draft_length: int) -> list[int]:
    """What a block of masks proposes for the tokens behind the last one.

    The last token is certain but stands for the block's first place, so it is masked as well.
    """
    begin, end = len(row) - 1, len(row) - 1 + draft_length
    mask = torch.ones(end, end, dtype=torch.bool).tril()
    mask[begin:, begin:] = True
    tokens = torch.tensor([[*row[:-1], *[mask_id] * draft_length]])
    positions = torch.arange(end).clamp(max=model.config.max_seq_len - 1)[None]
    return model(tokens, positions, mask[None, None])[0, begin + 1 :].argmax(-1).tolist()
