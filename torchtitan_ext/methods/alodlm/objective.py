"""ALoDLM's loss: denoiser, gate and next tokens from one rollout.

Shape suffixes: B = batch, S = data length, L = 2S, K = passes, M = masked tokens, A = clean
positions with a label, N = M + A.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

from torchtitan_ext.data.mask_token import check_mask_id
from torchtitan_ext.losses import weighted_token_losses
from torchtitan_ext.masks import document_ids
from torchtitan_ext.methods.alodlm import stick
from torchtitan_ext.methods.alodlm.config import MASK_KEY, Section
from torchtitan_ext.methods.alodlm.model import Exits, Rollout
from torchtitan_ext.methods.wedlm import batch
from torchtitan_ext.objective import IGNORE_INDEX, Generators, Objective, Prepared, rand
from torchtitan_ext.readout import Readout, labelled


class ALoDLMObjective(Objective):
    """(denoise + actor + w_ar AR) / (1 + w_ar) on dual streams (ALoDLM Eq. 34)."""

    terms = ("ar", "diffusion", "masked")
    chunked_head = True
    loss_inputs = (
        "gold_BL",
        "index_M",
        "labels_M",
        "weights_M",
        "segment_M",
        "exit_noise_MK",
        "index_A",
        "labels_A",
    )

    def __init__(self, section: Section, *, mask_id: int, num_chunks: int = 1) -> None:
        self.section = section
        self.mask_id = mask_id
        self.num_chunks = num_chunks
        """Parts in which the readouts of one pass go through the LM head."""

    def noise(self, tokens_BS: torch.Tensor, *, generator: Generators) -> tuple[batch.Noise, torch.Tensor]:
        """The random numbers of a batch: its corruption, as WeDLM's, and its exits, [B, S, K]."""
        corruption = batch.draw_noise(tokens_BS.shape, generator=generator)
        return corruption, rand((*tokens_BS.shape, self.section.passes), generator=generator)

    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Generators
    ) -> Prepared:
        """The dual stream, where it is read out, and the numbers that decide the exits."""
        tokens_BS, positions_BS = inputs["input"], inputs["positions"]
        section, length = self.section, tokens_BS.shape[1]
        corruption, exit_noise_BSK = self.noise(tokens_BS, generator=generator)
        streams = batch.dual_stream(
            tokens_BS,
            labels,
            positions_BS,
            noise=corruption,
            mask_id=self.mask_id,
            block_size=section.block_size,
        )
        masked, clean = self._readouts(streams, length=length)
        weights_BL = batch.normalised_weights(streams, weighting=section.loss_weighting)
        slot_M = _slot(masked.index_M, length=length)
        dual = {
            "input": streams.tokens_BL,
            "positions": streams.positions_BL,
            "gold_BL": torch.cat([tokens_BS, tokens_BS.gather(1, streams.slots_BS)], dim=1),
            "index_M": masked.index_M,
            "labels_M": masked.labels_1M[0],
            # A place that fills up has weight 0: the clean half has none.
            "weights_M": weights_BL.flatten()[masked.index_M],
            "segment_M": _segments(positions_BS).flatten()[slot_M].unique(return_inverse=True)[1],
            "exit_noise_MK": exit_noise_BSK.flatten(0, 1)[slot_M],
            "index_A": clean.index_M,
            "labels_A": clean.labels_1M[0],
        }
        counts = {
            "ar": float((labels != IGNORE_INDEX).sum()),
            "diffusion": batch.weight_count(streams, weighting=section.loss_weighting),
            "masked": float(streams.masked_BS.sum()),
        }
        return Prepared(dual, streams.labels_BL, counts)

    def _readouts(self, streams: batch.Streams, *, length: int) -> tuple[Readout, Readout]:
        """Masked slots and labelled clean positions, each a multiple of the chunks."""
        halves = []
        for wanted, half in ((True, slice(length, None)), (self.section.w_ar > 0, slice(0, length))):
            labels_BL = torch.full_like(streams.labels_BL, IGNORE_INDEX)
            if wanted:
                labels_BL[:, half] = streams.labels_BL[:, half]
            halves.append(labelled(labels_BL, multiple=self.num_chunks))
        return halves[0], halves[1]

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
        """Every term a sum divided by its own global count."""
        valid_M = loss_inputs["labels_M"] != IGNORE_INDEX
        exits = Exits(
            loss_inputs["gold_BL"],
            loss_inputs["index_M"],
            valid_M,
            loss_inputs["exit_noise_MK"],
            loss_inputs["index_A"],
        )
        rollout: Rollout = model(tokens, **model_inputs, exits=exits)
        weights_MK, weights_AK = self._weights(rollout, loss_inputs, counts)
        w_ar, count = self.section.w_ar, len(valid_M)
        weights_NK = torch.cat([weights_MK, w_ar * weights_AK]) / (1 + w_ar)
        supervised, losses_NK = self._token_losses(model, rollout, loss_inputs, weights_NK)
        losses_MK, losses_AK = losses_NK[:count], losses_NK[count:]
        denoise, ar = (weights_MK * losses_MK).sum(), (weights_AK * losses_AK).sum()
        actor, average_K = self._actor(losses_MK, rollout, valid_M, loss_inputs["segment_M"])
        actor = actor / counts["masked"].clamp(min=1)
        loss = supervised + actor / (1 + w_ar)
        metrics = {
            "alodlm/denoise_loss": denoise,
            "alodlm/actor_loss": actor.detach(),
            "alodlm/ar_loss": ar,
            **self._depths(rollout, valid_M, average_K, counts["masked"].clamp(min=1)),
        }
        if actor.requires_grad:
            metrics["alodlm/gate_grad_norm/mean"] = self._gate_gradient(actor / (1 + w_ar), rollout)
        return loss, metrics

    def _weights(
        self, rollout: Rollout, loss_inputs: dict[str, torch.Tensor], counts: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each token's loss in each pass counts in its term, [M, K] and [A, K].

        w_i omega_i^s, or w_i at the exit alone (ALoDLM C.4), and 1 / K, over the terms' counts.
        """
        logits_MK, exit_M = rollout.gate_logits_MK.detach(), rollout.exit_M
        if self.section.intermediate_supervision:
            shares_MK = stick.stick_weights(logits_MK, exit_M)
        else:
            shares_MK = F.one_hot(exit_M - 1, self.section.passes)
        weights_M = 1 / counts["diffusion"].clamp(min=1) * loss_inputs["weights_M"]
        each = 1 / counts["ar"].clamp(min=1) / self.section.passes
        return weights_M[:, None] * shares_MK, each.expand(len(loss_inputs["labels_A"]), self.section.passes)

    def _token_losses(
        self,
        model: Any,
        rollout: Rollout,
        loss_inputs: dict[str, torch.Tensor],
        weights_NK: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted cross-entropy of all readouts, and of every readout in every pass, [N, K]."""
        passes = self.section.passes
        labels_N = torch.cat([loss_inputs["labels_M"], loss_inputs["labels_A"]])
        total, losses_1X = weighted_token_losses(
            model.lm_head,
            rollout.hidden_KND.flatten(0, 1)[None],
            labels_N.repeat(passes)[None],
            weights_NK.T.flatten()[None],
            num_chunks=passes * self.num_chunks,
        )
        return total, losses_1X.view(passes, -1).T

    def _actor(
        self, losses_MK: torch.Tensor, rollout: Rollout, valid_M: torch.Tensor, segment_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gate's surrogate before its division, and qbar, [K]."""
        section = self.section
        logits_MK, exit_M = rollout.gate_logits_MK, rollout.exit_M
        log_probability_M = torch.where(valid_M, stick.exit_log_probability(logits_MK, exit_M), 0.0)
        average_K = self._average(stick.full_stick(logits_MK.detach()), valid_M)
        credit_M = stick.credit(
            exit_loss_M=_at_exit(losses_MK, exit_M),
            first_loss_M=losses_MK[:, 0] if section.control_variate else None,
            log_probability_M=log_probability_M.detach(),
            exit_M=exit_M,
            average_K=average_K,
            prior_K=self._prior(logits_MK.device),
            a=section.a,
            b=section.b,
        )
        credit_M = torch.where(valid_M, credit_M, 0.0)
        return stick.actor(credit_M, log_probability_M, segment_M), average_K

    def _prior(self, device: torch.device) -> torch.Tensor:
        return stick.prior(self.section.passes, decay=self.section.prior_decay, device=device)

    def _average(self, stick_MK: torch.Tensor, valid_M: torch.Tensor) -> torch.Tensor:
        """qbar: the mean exit distribution of the masked tokens, [K]."""
        sums_K = torch.where(valid_M[:, None], stick_MK, 0.0).sum(dim=0)
        total_K = torch.cat([sums_K, valid_M.sum().float()[None]])
        if self.section.loss_weighting == "global":
            total_K = _over_ranks(total_K)
        return total_K[:-1] / total_K[-1].clamp(min=1)

    def _depths(
        self, rollout: Rollout, valid_M: torch.Tensor, average_K: torch.Tensor, masked: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Mean depth, the share of tokens that exit at each, and KL(qbar || prior)."""
        exit_M = rollout.exit_M
        shares = {
            f"alodlm/exit_{s}": ((exit_M == s) & valid_M).sum() / masked
            for s in range(1, self.section.passes + 1)
        }
        return {
            "alodlm/depth": torch.where(valid_M, exit_M, 0).sum() / masked,
            "alodlm/prior_kl/mean": stick.divergence(average_K, self._prior(exit_M.device)),
            **shares,
        }

    def _gate_gradient(self, actor: torch.Tensor, rollout: Rollout) -> torch.Tensor:
        """Norm of the loss's gradient for the gate in this microbatch, on all ranks together.

        By hand, since the parameters' own is not there before the backward: the gate is linear.
        """
        (gradient_MK,) = torch.autograd.grad(actor, rollout.gate_logits_MK, retain_graph=True)
        readout_KMD = rollout.hidden_KND.detach()[:, : len(gradient_MK)].float()
        weight_D = torch.einsum("mk,kmd->d", gradient_MK, readout_KMD)
        return _over_ranks(torch.cat([weight_D, gradient_MK.sum(dim=0)])).norm()


def _slot(index_M: torch.Tensor, *, length: int) -> torch.Tensor:
    """Indices into the flattened [B * L] positions -> into the flattened [B * S] slots of the copy."""
    row_M, place_M = index_M // (2 * length), index_M % (2 * length)
    return row_M * length + place_M % length


def _segments(positions_BS: torch.Tensor) -> torch.Tensor:
    """Number of each token's document, different in every row, [B, S]."""
    ids_BS = document_ids(positions_BS).long()
    rows_B = torch.arange(len(ids_BS), device=ids_BS.device)
    return ids_BS + rows_B[:, None] * (positions_BS.shape[1] + 1)


def _at_exit(losses_MK: torch.Tensor, exit_M: torch.Tensor) -> torch.Tensor:
    return losses_MK.gather(1, exit_M[:, None] - 1)[:, 0]


def _over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The sum over data-parallel ranks."""
    if spmd_mesh_size("dp") == 1:
        return value
    mesh = current_spmd_mesh()
    assert mesh is not None
    value = value.clone()
    dist.all_reduce(value, group=mesh.get_group("dp"))
    return value


def build_objective(config: Any) -> ALoDLMObjective:
    """The objective for a resolved config.

    Errors: UserError for a mask id that stands for an ordinary token.
    """
    section = config.alodlm
    check_mask_id(config, mask_id=section.mask_token_id, where=MASK_KEY)
    return ALoDLMObjective(section, mask_id=section.mask_token_id, num_chunks=config.loss.num_chunks)
