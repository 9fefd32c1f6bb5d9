"""Decoding of masked diffusion: every forward reads out the whole sequence."""

from __future__ import annotations

import math

import torch


@torch.no_grad()
def decode(
    model,
    prompt,
    *,
    new,
    size,
    mask_id,
    policy,
    tau,
    prediction="own",
    comparison="strict",
    stop=(),
    bonus=None,
):
    """Greedy: response, the forward that revealed each token, its confidence, and the new tokens."""
    start, length = len(prompt), len(prompt) + new
    row = [*prompt, *[mask_id] * new]
    steps, confidence = [None] * new, [None] * new
    everything = torch.ones(1, 1, length, length, dtype=torch.bool)
    for forward in range(1, new + 1):
        logits = model(torch.tensor([row]), torch.arange(length)[None], everything)[0]
        if prediction == "shifted":
            logits = torch.cat([logits[:1], logits[:-1]])
        if bonus is not None:
            logits = logits + (forward - 1) * bonus
        logits[:, mask_id] = -math.inf
        probs = logits.softmax(-1)
        entropy = torch.distributions.Categorical(probs=probs).entropy()
        masked = [p for p in range(start, length) if row[p] == mask_id]
        block = (masked[0] - start) // size
        masked = [p for p in masked if (p - start) // size == block]
        value = -entropy if policy == "entropy" else probs.max(-1).values
        bar = -tau if policy == "entropy" else tau
        chosen = [p for p in masked if value[p] > bar or (comparison == "inclusive" and value[p] == bar)]
        if policy == "one_token" or not chosen:
            chosen = [max(masked, key=lambda p: (float(value[p]), -p))]
        for p in chosen:
            row[p] = int(probs[p].argmax())
            steps[p - start], confidence[p - start] = forward, float(probs[p].max())
        text = row[start : row.index(mask_id)] if mask_id in row else row[start:]
        ends = [i for i, token in enumerate(text) if token in stop]
        if ends or mask_id not in row:
            response = [None if t == mask_id else t for t in row[start:]]
            return response, steps, confidence, text[: ends[0] + 1] if ends else text
    raise AssertionError("every forward reveals a token")
