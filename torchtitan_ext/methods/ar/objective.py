"""Next-token cross-entropy: the mean over all supervised tokens of the global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from torchtitan_ext.errors import UserError
from torchtitan_ext.objective import IGNORE_INDEX, Objective, Prepared


class NextToken(Objective):
    """Position i predicts token i + 1 of its own document; no randomness."""

    perplexity = True

    def prepare(self, inputs, labels, *, generator: torch.Generator) -> Prepared:
        return Prepared(inputs, labels, {"loss": float((labels != IGNORE_INDEX).sum())})

    def loss(
        self,
        model: nn.Module,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        *,
        model_inputs: dict[str, Any],
        loss_inputs: dict[str, torch.Tensor],
        counts: dict[str, torch.Tensor],
        loss_fn: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return loss_fn(model(tokens, **model_inputs), labels, counts["loss"])


def build_objective(config: Any) -> NextToken:
    """The objective for a resolved config; this method has no knobs.

    Raises:
        UserError: a bidirectional backbone, where each token would see the one it predicts.
    """
    size = getattr(config.model_spec.model, "size", None) if config.model_spec else None
    if size is not None and size.attention != "causal":
        raise UserError(
            f"[model] name = 'ar' needs a causal backbone, got flavor = {config.model.flavor!r}, "
            f"whose attention is {size.attention}"
        )
    return NextToken()
