"""Exit depths: the stick-breaking distribution, its prior, and the credit of a sampled exit.

A token leaves at pass s with probability lambda_s if it has not left before; lambda_K = 1. All
functions take the gate's logits and compute in fp32.

Shape suffixes: M = masked tokens, K = passes. Depths count from 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

LEAST = 1e-12
"""Smallest average probability of a depth, so that its logarithm is finite."""


def first_logits(passes: int) -> torch.Tensor:
    """Logits of the hazards 1/K, 1/(K-1), ..., 1/2, with which every depth has mass 1/K; 0 for pass K."""
    return torch.tensor([-math.log(passes - s) if s < passes else 0.0 for s in range(1, passes + 1)])


def hazard(logits: torch.Tensor, *, depth: int, passes: int) -> torch.Tensor:
    """lambda_s = sigmoid(logit), and 1 at the last pass (ALoDLM Eq. 2)."""
    logits = logits.float()
    return torch.ones_like(logits) if depth == passes else torch.sigmoid(logits)


def _log_survival(logits_MK: torch.Tensor) -> torch.Tensor:
    """log prod_{r < s} (1 - lambda_r) for s = 1..K, [M, K]."""
    stays_MK = F.logsigmoid(-logits_MK.float()[:, :-1]).cumsum(dim=1)
    return F.pad(stays_MK, (1, 0))


def full_stick(logits_MK: torch.Tensor) -> torch.Tensor:
    """Probability of each exit depth, [M, K]; rows sum to 1."""
    last = logits_MK.shape[1] - 1
    leaves_MK = F.pad(F.logsigmoid(logits_MK.float()[:, :last]), (0, 1))
    return (_log_survival(logits_MK) + leaves_MK).exp()


def stick_weights(logits_MK: torch.Tensor, exit_M: torch.Tensor) -> torch.Tensor:
    """omega: the exit distribution with all mass beyond the sampled exit moved to it (ALoDLM C.4).

    [M, K]; rows sum to 1 and are 0 beyond the exit.
    """
    depth_K = _depths(logits_MK)
    survival_MK = _log_survival(logits_MK).exp()
    before = depth_K < exit_M[:, None]
    at = depth_K == exit_M[:, None]
    return torch.where(before, full_stick(logits_MK), torch.where(at, survival_MK, 0.0))


def exit_log_probability(logits_MK: torch.Tensor, exit_M: torch.Tensor) -> torch.Tensor:
    """u = sum_{r < z} log(1 - lambda_r) + [z < K] log lambda_z, the decisions of each token, [M]."""
    # The last pass has no decision; its logit stays in the graph with gradient 0.
    decided_MK = torch.where(_depths(logits_MK) < logits_MK.shape[1], logits_MK.float(), 0.0)
    before = _depths(logits_MK) < exit_M[:, None]
    at = (_depths(logits_MK) == exit_M[:, None]) & (exit_M[:, None] < logits_MK.shape[1])
    stays = torch.where(before, F.logsigmoid(-decided_MK), 0.0)
    leaves = torch.where(at, F.logsigmoid(decided_MK), 0.0)
    return (stays + leaves).sum(dim=1)


def prior(passes: int, *, decay: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """pi_s proportional to exp(-decay s) on 1..K, [K] (ALoDLM C.3)."""
    return torch.softmax(-decay * torch.arange(1, passes + 1, device=device).float(), dim=0)


def credit(
    *,
    exit_loss_M: torch.Tensor,
    first_loss_M: torch.Tensor | None,
    log_probability_M: torch.Tensor,
    exit_M: torch.Tensor,
    average_K: torch.Tensor,
    prior_K: torch.Tensor,
    a: float,
    b: float,
) -> torch.Tensor:
    """c = l^z - l^1 + a (u - log qbar(z)) + b (log qbar(z) - log pi(z)), detached, [M] (ALoDLM C.3, C.4).

    ``first_loss_M``: the first pass's loss, the control variate, or None.
    ``average_K``: qbar, the average exit distribution of the batch.
    """
    log_average_M = average_K.clamp(min=LEAST).log()[exit_M - 1]
    log_prior_M = prior_K.log()[exit_M - 1]
    cost_M = exit_loss_M + a * (log_probability_M - log_average_M) + b * (log_average_M - log_prior_M)
    if first_loss_M is not None:
        cost_M = cost_M - first_loss_M
    return cost_M.detach()


def actor(credit_M: torch.Tensor, log_probability_M: torch.Tensor, segment_M: torch.Tensor) -> torch.Tensor:
    """Sum over segments of (sum of credits) (sum of log-probabilities), a scalar (ALoDLM C.4).

    ``segment_M``: the independently attended piece of a row that a token lies in, 0 to M - 1. A
    token's exit changes what the others of its segment see, so each decision answers for all.
    """
    cost_M = torch.zeros_like(credit_M).index_add(0, segment_M, credit_M)
    return (cost_M[segment_M] * log_probability_M).sum()


def divergence(average_K: torch.Tensor, prior_K: torch.Tensor) -> torch.Tensor:
    """KL(qbar || pi), a scalar."""
    return (average_K * (average_K.clamp(min=LEAST) / prior_K).log()).sum()


def _depths(logits_MK: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, logits_MK.shape[1] + 1, device=logits_MK.device)
