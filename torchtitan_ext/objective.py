"""What a method adds to a training step.

The trainer calls :meth:`Objective.prepare` on the CPU before tokens are
counted, sums the counts of every loss term over the step's microbatches and
data-parallel ranks, and passes those global counts to :meth:`Objective.loss`.

Shape suffixes: B = batch, L = sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from torchtitan_ext.initialization import seed_from

IGNORE_INDEX = -100
"""Label of a token that is not supervised."""

Generators = torch.Generator | Sequence[torch.Generator]
"""One generator for a batch, or one for each of its rows (:func:`row_generators`)."""


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
    """A method's loss. Stateless: randomness comes from the generators it is given."""

    terms: tuple[str, ...] = ("loss",)
    """Names of the loss terms that :meth:`prepare` counts."""

    loss_inputs: tuple[str, ...] = ()
    """Keys of ``Prepared.inputs`` that go to the loss and not to the model."""

    chunked_head: bool = False
    """Whether the loss passes the LM head by torchtitan's chunked loss itself, whatever [loss] num_chunks."""

    perplexity: bool = False
    """Whether the loss is a mean negative log-likelihood, whose exponential is a perplexity."""

    @abstractmethod
    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Generators
    ) -> Prepared:
        """Corrupt, double, relabel; count the supervised tokens of each term.

        In training ``generator`` has a generator for each row; draw with :func:`rand`.
        """

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
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Generators
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


def row_generators(*, seed: int, step: int, rows: Iterable[int]) -> list[torch.Generator]:
    """A generator for each of the ``rows`` of a step's global batch.

    So a row has the same noise in a resumed run, without saved state, and under any number of ranks
    and microbatches.
    """
    return [torch.Generator().manual_seed(seed_from(seed, step, row)) for row in rows]


def global_rows(*, microbatch: int, size: int, ranks: int, rank: int) -> range:
    """Places in the step's global batch of the ``size`` rows of a rank's microbatch, as the loader deals."""
    first = microbatch * size * ranks
    return range(first + rank, first + size * ranks, ranks)


def rand(shape: Sequence[int], *, generator: Generators) -> torch.Tensor:
    """Uniform numbers [B, ...], of which each row depends on its own generator alone if it has one."""
    if isinstance(generator, torch.Generator):
        return torch.rand(*shape, generator=generator)
    if shape[0] != len(generator):
        raise ValueError(f"{len(generator)} generators for a batch of {shape[0]} rows")
    return torch.stack([torch.rand(*shape[1:], generator=own) for own in generator])


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
