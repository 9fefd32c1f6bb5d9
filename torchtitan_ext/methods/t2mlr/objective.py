"""Next-token loss of a T2MLR model, with what its core reports."""

from __future__ import annotations

from typing import Any

from torchtitan_ext.objective import NextToken


class T2MLRObjective(NextToken):
    """The baseline's loss; metrics: gates, last relative change of the iterates, iterates used."""

    def loss(self, model, tokens, labels, *, model_inputs, loss_inputs, counts, loss_fn):
        loss, metrics = super().loss(
            model,
            tokens,
            labels,
            model_inputs=model_inputs,
            loss_inputs=loss_inputs,
            counts=counts,
            loss_fn=loss_fn,
        )
        return loss, {**metrics, **model.core.statistics}


def build_objective(config: Any) -> T2MLRObjective:
    """The objective for a resolved config."""
    return T2MLRObjective()
