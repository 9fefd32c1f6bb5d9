"""What a method adds to a training step.

The trainer calls :meth:`Objective.prepare` on the CPU before tokens are
counted, sums the counts of every loss term over the step's microbatches and
data-parallel ranks, and passes those global counts to :meth:`Objective.loss`.

Shape suffixes: B = batch, L = sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from torchtitan_ext.initialization import seed_from

IGNORE_INDEX = -100
"""Label of a token that is not supervised."""


@dataclass
class Prepared:
    """One microbatch as the model will see it, still on the CPU.

    ``inputs`` has "input" [B, L] and whatever else the model or the loss takes;
    ``counts`` maps each loss term to the number of tokens (or the weight) it
    supervises in this microbatch.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    counts: dict[str, float]


class Objective(ABC):
    """A method's loss. Stateless: randomness comes from the generator it is given."""

    terms: tuple[str, ...] = ("loss",)
    """Names of the loss terms that :meth:`prepare` counts."""

    loss_inputs: tuple[str, ...] = ()
    """Keys of ``Prepared.inputs`` that go to the loss and not to the model."""

    perplexity: bool = False
    """Whether the loss is a mean negative log-likelihood, whose exponential is a perplexity."""

    @abstractmethod
    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: torch.Generator
    ) -> Prepared:
        """Corrupt, double, relabel; count the supervised tokens of each term."""

    @abstractmethod
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
        """The loss of one microbatch and its metrics.

        Metrics are scalars that are summed over microbatches and ranks (so
        divide a mean over tokens by its global count); names that end in
        "/max", "/min" or "/mean" (over microbatches and ranks) are reduced so.
        """


class NextToken(Objective):
    """Position i predicts the label the data gives it, the next token of its document; no randomness."""

    perplexity = True

    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: torch.Generator
    ) -> Prepared:
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


def microbatch_generator(*, seed: int, step: int, dp_rank: int, microbatch: int) -> torch.Generator:
    """The generator of one microbatch; a resumed run draws the same numbers without saved state."""
    return torch.Generator().manual_seed(seed_from(seed, step, dp_rank, microbatch))


def merge_metrics(into: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
    """Add a microbatch's metrics to a step's, by the rule of :meth:`Objective.loss`."""
    for name, value in new.items():
        value = value.detach()
        if name not in into:
            into[name] = value.clone()
        elif name.endswith("/max"):
            into[name] = torch.maximum(into[name], value)
        elif name.endswith("/min"):
            into[name] = torch.minimum(into[name], value)
        else:
            into[name] = into[name] + value
