"""ALoDLM's passes one after the other, with the logits of every position in each."""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_ext.objective import IGNORE_INDEX, Prepared


def by_hand(
    model: Any, prepared: Prepared, exit_of: Any, *, feedback: str = "cumulative", carry_norm: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Losses [M, K], hazards [M, K] and clean losses [A, K], one pass and token at a time.

    ``exit_of(i, s, hazard)``: whether the i-th masked token leaves at pass s if it has not yet.
    """
    x = prepared.inputs
    tokens, positions = x["input"], x["positions"]
    masks = model.get_attention_masks(positions)
    where = [(int(i), int(y)) for i, y in zip(x["index_M"], x["labels_M"], strict=True) if y != IGNORE_INDEX]
    clean = [(int(i), int(y)) for i, y in zip(x["index_A"], x["labels_A"], strict=True) if y != IGNORE_INDEX]
    length = tokens.shape[1]
    passes, exits = model.config.passes, [model.config.passes] * len(where)
    h = model.prelude(tokens, positions, masks)
    table, hazards, clean_table = [], [], []
    for s in range(1, passes + 1):
        core = model.core.run(h, masks, positions)
        readout = model.coda(core, positions, masks)
        logprobs = model.lm_head(readout).float().log_softmax(-1)
        flat = [(i // length, i % length, y) for i, y in where]
        table.append(torch.stack([-logprobs[b, place, y] for b, place, y in flat]))
        clean_table.append(-logprobs.flatten(0, 1)[[i for i, _ in clean], [y for _, y in clean]])
        hazards.append(torch.stack([model.hazard(readout[b, p].detach(), s) for b, p, _ in flat]))
        for i in range(len(where)):
            if exits[i] == passes and s < passes and exit_of(i, s, hazards[-1][i].item()):
                exits[i] = s
        h = model.norm(core) if carry_norm else core
        rows_ = [list(row.unbind()) for row in h.unbind()]
        for (b, place, y), z in zip(flat, exits, strict=True):
            gone = z < s + 1 if feedback == "cumulative" else z == s
            if gone and z < passes:
                rows_[b][place] = model.tok_embeddings(torch.tensor(y))
        h = torch.stack([torch.stack(row) for row in rows_])
    return torch.stack(table, 1), torch.stack(hazards, 1), torch.stack(clean_table, 1), exits
