"""TDLM's mathematics: temporal attention, and the states of a sampled trajectory.

Shape suffixes: B = trajectories, K = states of one trajectory, L = positions of a row, X = any
dimensions before (positions), Q = states that ask, T = states that are remembered, M = heads,
H = width of a head, U = H / 2 rotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from torchtitan_ext.errors import UserError
from torchtitan_ext.objective import Generators

Window = int | Literal["full", "current"]
"""Which evaluations a position remembers: all before this one, the last n before it, or this one alone."""

Shift = Literal["literal", "moved"]
"""Which hidden states are corrected: those of masked tokens, or those that predict masked tokens."""

BASE = 10_000.0
"""Base of the temporal rotation, TDLM Eq. 7."""


# --- attention over time ---------------------------------------------------------------


def rotation(revealed_X: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [X, U] of the angles r * 10000^(-2u / d_h), fp32.

    ``revealed_X``: r, the number of revealed response tokens. Source: TDLM Eq. 7.
    """
    u_U = torch.arange(head_dim // 2, device=revealed_X.device, dtype=torch.float32)
    angles_XU = revealed_X.float()[..., None] * BASE ** (-2 * u_U / head_dim)
    return angles_XU.cos(), angles_XU.sin()


def rotate(x_XMH: torch.Tensor, cos_XU: torch.Tensor, sin_XU: torch.Tensor) -> torch.Tensor:
    """R(r) x in every head, in x's dtype; dimension u turns with u + H / 2."""
    first, second = x_XMH.float().chunk(2, dim=-1)
    cos_X1U, sin_X1U = cos_XU[..., None, :], sin_XU[..., None, :]
    turned = (first * cos_X1U - second * sin_X1U, second * cos_X1U + first * sin_X1U)
    return torch.cat(turned, dim=-1).to(x_XMH.dtype)


def attend(
    q_XQMH: torch.Tensor,
    k_XTMH: torch.Tensor,
    v_XTMH: torch.Tensor,
    *,
    sink_1: torch.Tensor,
    allowed_XQT: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each state retrieves from the remembered ones, [X, Q, M, H]; 0 where there is none.

    The sink is one more logit, shared by the heads, whose value is zero. ``allowed_XQT``: which
    state may see which; None: each sees all. Scores and weights are fp32. Source: TDLM Eq. 8, 9.
    """
    scores_XMQT = torch.einsum("...qmh,...tmh->...mqt", q_XQMH, k_XTMH).float() * q_XQMH.shape[-1] ** -0.5
    if allowed_XQT is not None:
        scores_XMQT = scores_XMQT.masked_fill(~allowed_XQT[..., None, :, :], -torch.inf)
    sink_XMQ1 = sink_1.float().expand(*scores_XMQT.shape[:-1], 1)
    # As a column of the softmax the sink keeps it finite where nothing is remembered.
    weights_XMQT = torch.cat([sink_XMQ1, scores_XMQT], dim=-1).softmax(dim=-1)[..., 1:]
    return torch.einsum("...mqt,...tmh->...qmh", weights_XMQT.to(v_XTMH.dtype), v_XTMH)


def seen_states(states: int, *, window: Window, device: torch.device | None = None) -> torch.Tensor:
    """True where state i may retrieve from state j, [K, K]: j < i within the window, or j = i alone."""
    index_K = torch.arange(states, device=device)
    age_KK = index_K[:, None] - index_K
    if window == "current":
        return age_KK == 0
    return (age_KK > 0) & (age_KK <= (states if window == "full" else window))


def corrected(masked_BL: torch.Tensor, *, shift: Shift) -> torch.Tensor:
    """The positions whose hidden states are corrected and remembered, for masked tokens [B, L].

    ``moved``: the one before each, from which a shifted model predicts the token.
    """
    if shift == "literal":
        return masked_BL
    moved_BL = torch.zeros_like(masked_BL)
    moved_BL[:, :-1] = masked_BL[:, 1:]
    return moved_BL


# --- states of a trajectory ------------------------------------------------------------


class States(NamedTuple):
    """K states of each of B trajectories, as rows of one batch (all states of the first, then the next)."""

    masked_NL: torch.Tensor
    """True where state i of trajectory b masks the token, at row b * K + i."""

    revealed_N: torch.Tensor
    """r of each state."""

    count: int
    """K."""


def sample_steps(
    steps_B: Sequence[int] | torch.Tensor, *, states: int, generator: Generators
) -> torch.Tensor:
    """s_0 = 0, K - 1 distinct steps uniform in 1 .. T - 1, sorted, and s_K = T; int64 [B, K + 1].

    ``steps_B``: T of each trajectory; one of 0 steps (a row of padding) gets zeros.
    Source: TDLM section 2.3. Errors: UserError for a trajectory of fewer than K steps.
    """
    rows = []
    totals = [int(t) for t in steps_B]
    own = [generator] * len(totals) if isinstance(generator, torch.Generator) else generator
    for total, drawn in zip(totals, own, strict=True):
        if total == 0:
            rows.append(torch.zeros(states + 1, dtype=torch.long))
            continue
        if states > total:
            raise UserError(
                f"[tdlm] states = {states} (K) is more than the {total} steps of a trajectory "
                f"(allowed: 2 to {total}, or leave out trajectories this short)"
            )
        between = torch.randperm(total - 1, generator=drawn)[: states - 1].sort().values + 1
        rows.append(torch.cat([between.new_zeros(1), between, between.new_tensor([total])]))
    return torch.stack(rows)


def masked_states(reveal_step_BL: torch.Tensor, steps_BS: torch.Tensor) -> torch.Tensor:
    """Whether each state masks each token, [B, S, L]: a_p > s_i. Source: TDLM Eq. 3.

    ``reveal_step_BL``: a_p; 0 for a token that is visible from the start (prompt, padding).
    """
    return reveal_step_BL[:, None] > steps_BS[..., None]


def targets(masked_BSL: torch.Tensor) -> torch.Tensor:
    """What each state but the last predicts, [B, S - 1, L]: masked in it, revealed in the next.

    The first state seeds the memory and predicts nothing. Source: TDLM Eq. 4.
    """
    targets_BKL = masked_BSL[:, :-1] & ~masked_BSL[:, 1:]
    targets_BKL[:, 0] = False
    return targets_BKL


def revealed_counts(reveal_step_BL: torch.Tensor, masked_BKL: torch.Tensor) -> torch.Tensor:
    """r of each state, int64 [B, K]: the response tokens that it shows."""
    response_B1L = (reveal_step_BL > 0)[:, None]
    return (response_B1L & ~masked_BKL).sum(dim=-1)
