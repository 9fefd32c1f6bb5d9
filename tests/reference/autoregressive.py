"""Decoding of any causal model without a cache."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def decode(model: Any, prompt: list[int], *, new: int) -> list[int]:
    """Greedy: everything again for every new token."""
    row = list(prompt)
    for _ in range(new):
        positions = torch.arange(len(row))[None]
        masks = model.get_attention_masks(positions)
        row.append(int(model(torch.tensor([row]), positions, masks)[0, -1].argmax()))
    return row[len(prompt) :]
