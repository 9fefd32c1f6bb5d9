"""T2MLR's recurrence token by token, from Eq. 2.3 and 2.4.

Shape suffixes: B = batch, L = sequence length, N = heads, H = head dimension, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_ext.attention import CachedAttention


class Growing:
    """Keys and values of the tokens so far, kept as they come, so that gradients go through them."""

    def __init__(self) -> None:
        self.held: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(self, layer_id: int, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor) -> tuple[Any, ...]:
        own = self.held.setdefault(layer_id, [])
        own.append((k_BLNH, v_BLNH))
        return tuple(torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*own, strict=True))


def sequential(model: Any, tokens_BL: torch.Tensor) -> torch.Tensor:
    """Exact recurrence, logits [B, L, V]."""
    masks: Any = CachedAttention(Growing(), None)  # one query a time sees all that is held
    previous = torch.zeros(len(tokens_BL), 1, model.config.dim, device=tokens_BL.device)
    outputs = []
    for t in range(tokens_BL.shape[1]):
        positions = torch.full((len(tokens_BL), 1), t, device=tokens_BL.device)
        h = model.prelude(tokens_BL[:, t : t + 1], positions, masks)
        h_end = model.core.run(model.core.fusion(h, previous), masks, positions)
        outputs.append(model.lm_head(model.coda(h_end, positions, masks)))
        previous = model.core.cache(h_end, previous)
    return torch.cat(outputs, dim=1)


def loss(model: Any, tokens_BL: torch.Tensor) -> torch.Tensor:
    """Next-token loss with the gradient through every token."""
    logits_BLV = sequential(model, tokens_BL)
    return torch.nn.functional.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten())


@torch.no_grad()
def decode(model: Any, prompt: list[int], *, new: int) -> list[int]:
    """Greedy, without a cache between tokens: the recurrence over everything for every new token."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(sequential(model, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]
