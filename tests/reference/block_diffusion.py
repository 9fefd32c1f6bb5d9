"""Decoding of block diffusion: every forward computes text and block anew."""

from __future__ import annotations

import math

import torch


def dense_logits(model, known: dict[int, int], start: int, end: int, *, size: int, clean: str, mask_id: int):
    """Logits [end, V] of the definition: clean tokens, then one active block; nothing is cached."""
    allowed = torch.zeros(end, end, dtype=torch.bool)
    for query in range(end):
        for key in range(end):
            if query >= start:
                allowed[query, key] = True
            elif clean == "causal":
                allowed[query, key] = key <= query
            else:
                allowed[query, key] = key // size <= query // size and key < start
    tokens = torch.tensor([[known.get(i, mask_id) for i in range(end)]])
    positions = torch.arange(end).clamp(max=model.config.max_seq_len - 1)[None]
    return model(tokens, positions, allowed[None, None])[0]


@torch.no_grad()
def decode(model, prompt, *, new, size, mask_id, policy, count=1, threshold=0.9, clean="causal", stop=()):
    """Greedy tokens, and the slots that each forward reveals."""
    known, length = dict(enumerate(prompt)), len(prompt) + new
    steps: list[list[int]] = []
    while True:
        first = len([i for i in range(length) if all(j in known for j in range(i + 1))])
        text = [known[i] for i in range(len(prompt), first)]
        ends = [i for i, token in enumerate(text) if token in stop]
        if ends or first == length:
            return (text[: ends[0] + 1] if ends else text), steps
        block = first // size
        start, end = block * size, min((block + 1) * size, length)
        if clean == "causal":
            start = max(start, len(prompt))
        if clean == "causal" and policy == "left_to_right":
            start, end = first, first + size
        logits = dense_logits(model, known, start, end, size=size, clean=clean, mask_id=mask_id)
        logits[:, mask_id] = -math.inf
        best = logits.softmax(-1).max(-1)
        masked = [i for i in range(start, end) if i not in known]
        by_confidence = sorted(masked, key=lambda i: float(best.values[i]), reverse=True)
        picked = {
            "confidence": by_confidence[:count],
            "threshold": [i for i in masked if best.values[i] > threshold] or by_confidence[:1],
            "left_to_right": [i for i in masked if i < length][:count],
        }[policy]
        for i in picked:
            known[i] = int(best.indices[i])
        steps.append(sorted(picked))
