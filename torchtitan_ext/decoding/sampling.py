"""From logits to tokens: pure functions with explicit generators.

Each row draws from a generator of its own, so a row's tokens do not depend on the other
rows of its batch. The generators live on the CPU and the draw inverts the cumulative
distribution, so the same seed means the same draws on every device.

Shape suffixes: B = batch rows, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most probable token."""

    top_k: int = 0
    """Draw from the k most probable tokens only; 0 is off."""

    top_p: float = 1.0
    """Draw from the smallest set of most probable tokens whose probability reaches p; 1 is off."""

    seed: int = 0
    """Row r of a batch draws with seed + r."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0 (0 is off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1 (1 is off), got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be at least 0 and below 2**63, got {self.seed}")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn: temperature 0."""
        return self.temperature == 0


GREEDY = SamplingParams()


def row_generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One generator on the CPU for each seed."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def greedy(logits_BV: torch.Tensor) -> torch.Tensor:
    """Most probable token of each row, [B]; among equals the lowest id."""
    return logits_BV.argmax(dim=-1)


def keep_top_k(logits_BV: torch.Tensor, top_k: int) -> torch.Tensor:
    """Logits with everything below the k-th largest at -inf; ties with the k-th all stay."""
    k = min(top_k, logits_BV.shape[-1])
    threshold_B1 = logits_BV.topk(k, dim=-1).values[..., -1:]
    return logits_BV.masked_fill(logits_BV < threshold_B1, -math.inf)


def keep_top_p(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Logits with everything outside the nucleus at -inf.

    The nucleus is the smallest set of most probable tokens whose probabilities sum to at
    least ``top_p``, the token that crosses it included; among equals lower ids come first.
    """
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probs_BV = ordered_BV.softmax(dim=-1)
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV
    drop_BV = before_BV >= top_p
    drop_BV[..., 0] = False
    return logits_BV.masked_fill(torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV), -math.inf)


def probabilities(logits_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What :func:`sample` draws from, fp32 [B, V]: temperature, then top-k, then top-p.

    With temperature 0 all probability is on the greedy token.
    """
    logits_BV = logits_BV.float()
    if params.is_greedy:
        return torch.zeros_like(logits_BV).scatter(-1, greedy(logits_BV)[..., None], 1.0)
    # Shifted first: a tiny temperature must not overflow to inf - inf.
    logits_BV = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / params.temperature
    if params.top_k:
        logits_BV = keep_top_k(logits_BV, params.top_k)
    if params.top_p < 1:
        logits_BV = keep_top_p(logits_BV, params.top_p)
    return logits_BV.softmax(dim=-1)


def uniforms(generators: Sequence[torch.Generator], *, device: torch.device | str = "cpu") -> torch.Tensor:
    """One number in [0, 1) from each generator, float64 [B]."""
    draws = [torch.rand((), generator=g, dtype=torch.float64) for g in generators]
    return torch.stack(draws).to(device)


def draw(probs_BV: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """One token of each row's distribution, [B]; rows need not sum to 1."""
    cdf_BV = probs_BV.double().cumsum(dim=-1)
    total_B = cdf_BV[:, -1]
    level_B = uniforms(generators, device=probs_BV.device) * total_B
    # Rounding must not reach the total: no token lies beyond it.
    level_B = torch.minimum(level_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    # right=True steps over tokens of probability 0, whose cumulative value equals the one before.
    return torch.searchsorted(cdf_BV, level_B[:, None], right=True)[:, 0]


def sample(
    logits_BV: torch.Tensor, params: SamplingParams, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """Next token of each row, [B]; greedy draws nothing."""
    if params.is_greedy:
        return greedy(logits_BV)
    return draw(probabilities(logits_BV, params), generators)
