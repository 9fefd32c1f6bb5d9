"""Next-token cross-entropy: the mean over all supervised tokens of the global batch."""

from __future__ import annotations

from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.objective import NextToken


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
