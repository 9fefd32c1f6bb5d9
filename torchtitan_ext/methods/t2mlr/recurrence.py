"""The equations of T2MLR as functions.

Shape suffixes: B = batch, L = sequence length, D = model dimension.
"""

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6
"""Epsilon of the cache's RMSNorm."""

CLAMP = (1 / 5, 5.0)
"""Bounds of the rescaling in the clamped cache norm."""


def fuse(
    h_BLD: torch.Tensor,
    *,
    gate_current: torch.Tensor,
    gate_recurrent: torch.Tensor,
    current_logits_BLD: torch.Tensor,
    recurrent_logits_BLD: torch.Tensor,
    projected_BLD: torch.Tensor,
) -> torch.Tensor:
    """Phi(h, R) = h + tanh(g_cur) sigmoid(f_cur) h + tanh(g_rec) sigmoid(f_rec) W_rec R (T2MLR Eq. 2.3).

    ``*_logits_BLD`` are f_cur and f_rec of the features, ``projected_BLD`` is
    W_rec R. With both gates at 0 this is h, bit for bit.
    """
    current_1, recurrent_1 = (torch.tanh(g).to(h_BLD.dtype) for g in (gate_current, gate_recurrent))
    current_BLD = current_1 * torch.sigmoid(current_logits_BLD) * h_BLD
    recurrent_BLD = recurrent_1 * torch.sigmoid(recurrent_logits_BLD) * projected_BLD
    return h_BLD + current_BLD + recurrent_BLD


def cache(
    h_end_BLD: torch.Tensor,
    previous_BLD: torch.Tensor,
    *,
    norm: str,
    temporal_residual: bool,
) -> torch.Tensor:
    """R_t = Norm(h_t^(end) + R_{t-1}) (T2MLR Eq. 2.4), token by token; Norm(0) = 0.

    ``norm``: "rmsnorm" (no weight) or "clamped" (y clamp(1 / rms(stopgrad(y)), 1/5, 5)).
    Without the temporal residual it is h_t^(end) itself (paper, B.1).
    """
    if not temporal_residual:
        return h_end_BLD
    sum_BLD = h_end_BLD + previous_BLD
    if norm == "rmsnorm":
        return F.rms_norm(sum_BLD, sum_BLD.shape[-1:], eps=NORM_EPS)
    rms_BL1 = sum_BLD.detach().float().square().mean(-1, keepdim=True).sqrt()
    # rms = 0 gives the upper bound times 0.
    scale_BL1 = rms_BL1.reciprocal().clamp(*CLAMP)
    return sum_BLD * scale_BL1.to(sum_BLD.dtype)


def shift_right(x_BLD: torch.Tensor, starts_BL: torch.Tensor, *, before_B1D: torch.Tensor) -> torch.Tensor:
    """Token t gets token t - 1's vector; 0 at every document's first token.

    ``before_B1D`` is what stands before the row's first token: zeros, or, when
    the sequence is sharded, the last token of the shard before.
    """
    shifted_BLD = torch.cat([before_B1D, x_BLD[:, :-1]], dim=1)
    return shifted_BLD.masked_fill(starts_BL[..., None], 0.0)


def carries_gradient(k: int, *, forward_depth: int, backward_depth: int) -> bool:
    """Whether iterate R_k carries gradient: exactly the last D_b of the D_f do.

    The algorithm's line "if k > D_f - D_b: StopGrad" reverses the paper's text;
    the early iterates are the ones that are cut (Algorithm 1, corrected).
    """
    return k >= forward_depth + 1 - backward_depth


def relative_change(new_BLD: torch.Tensor, old_BLD: torch.Tensor) -> torch.Tensor:
    """max_t ||R_k - R_{k-1}|| / ||R_k||, a scalar; tokens whose cache is 0 do not count."""
    change_BL = (new_BLD - old_BLD).float().norm(dim=-1)
    size_BL = new_BLD.float().norm(dim=-1)
    return torch.where(size_BL > 0, change_BL / size_BL.clamp(min=1e-12), 0.0).max()
