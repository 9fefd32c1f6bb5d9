"""TDLM without a memory: every step computes all earlier states again."""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_ext.methods.tdlm.temporal import States


@torch.no_grad()
def decode(model, prompt, *, new, size, mask_id, tau, window):
    """Threshold decoding without a memory: every forward computes all earlier states again, in parallel."""
    start, row = len(prompt), [*prompt, *[mask_id] * new]
    past, steps = [], [0] * new
    back = 1 if model.config.prediction == "shifted" else 0
    shown = model.config.window
    while mask_id in row:
        past.append(list(row))
        tokens = torch.tensor(past)
        masked = tokens == mask_id
        states = States(masked, (~masked[:, start:]).sum(1), len(past))
        positions = torch.arange(len(row)).expand(len(past), -1)
        model.config.window = window
        logits = model(tokens, positions, model.get_attention_masks(positions), temporal=states)[-1]
        model.config.window = shown
        logits[:, mask_id] = -torch.inf
        best, token = logits.softmax(-1).max(-1)
        places = [p for p in range(start, len(row)) if row[p] == mask_id]
        places = [p for p in places if (p - start) // size == (places[0] - start) // size]
        sure = [p for p in places if best[p - back] > tau]
        for p in sure or [max(places, key=lambda p: float(best[p - back]))]:
            row[p], steps[p - start] = int(token[p - back]), len(past)
    return row[start:], steps


def loss(
    model: Any, tokens_NL: torch.Tensor, states: States, readout_M: torch.Tensor, labels_M: torch.Tensor
) -> torch.Tensor:
    """The loss of all states of one trajectory; each state's forward computes those before it again."""
    positions_NL = torch.arange(tokens_NL.shape[1]).expand(len(tokens_NL), -1)
    found = []
    for last in range(1, len(tokens_NL) + 1):
        seen = States(states.masked_NL[:last], states.revealed_N[:last], last)
        masks = model.get_attention_masks(positions_NL[:last])
        found.append(model(tokens_NL[:last], positions_NL[:last], masks, temporal=seen)[-1])
    logits_NLV = torch.stack(found)
    return torch.nn.functional.cross_entropy(logits_NLV.flatten(0, 1)[readout_M], labels_M)
