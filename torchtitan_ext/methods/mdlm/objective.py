"""The masked-diffusion loss: cross-entropy of masked tokens, each weighted with 1 / p.

Shape suffixes: B = batch, L = sequence length, M = positions that are read out, T = 2 terms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchtitan_ext.data.mask_token import check_mask_id
from torchtitan_ext.data.targets import own_token_targets
from torchtitan_ext.decoding.masked_diffusion import Prediction
from torchtitan_ext.methods.mdlm.config import MASK_KEY
from torchtitan_ext.objective import IGNORE_INDEX, Generators, Objective, Prepared, rand
from torchtitan_ext.readout import labelled

# --- pure functions --------------------------------------------------------------------


def mask_probability(t_BL: torch.Tensor, *, eps: float) -> torch.Tensor:
    """p = (1 - eps) t + eps. Source: LLaDA's pretraining recipe."""
    return (1 - eps) * t_BL + eps


def document_starts(positions_BL: torch.Tensor) -> torch.Tensor:
    """Index in the row of the first token of each token's document, [B, L]; 0 if it began before the row."""
    index_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    return torch.where(positions_BL == 0, index_L, 0).cummax(dim=1).values


def readout_labels(targets_BL: torch.Tensor, *, prediction: Prediction) -> torch.Tensor:
    """Targets at the positions whose hidden states predict them, [B, L].

    ``shifted``: one to the left. The first token of a document is never a target, so that
    position lies in the same document.
    """
    if prediction == "own":
        return targets_BL
    labels_BL = torch.full_like(targets_BL, IGNORE_INDEX)
    labels_BL[:, :-1] = targets_BL[:, 1:]
    return labels_BL


def fill_with_eos(
    tokens_BL: torch.Tensor, labels_BL: torch.Tensor, positions_BL: torch.Tensor, *, eos_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions whose padding is EOS tokens of the last document, as LLaDA's SFT has it.

    Padding is the last document of a row if it has no labels, holds one token alone, and
    follows a document that ends with EOS and whose EOS is a target. All int64 [B, L].
    """
    length = tokens_BL.shape[1]
    index_L = torch.arange(length, device=tokens_BL.device)
    start_B1 = length - 1 - positions_BL[:, -1:]
    inside_BL = index_L >= start_B1
    bare_B1 = ((labels_BL == IGNORE_INDEX) | ~inside_BL).all(dim=1, keepdim=True)
    same_B1 = ((tokens_BL == tokens_BL[:, -1:]) | ~inside_BL).all(dim=1, keepdim=True)
    ends_B1 = (tokens_BL.gather(1, (start_B1 - 1).clamp(min=0)) == eos_id) & (
        labels_BL.gather(1, (start_B1 - 2).clamp(min=0)) == eos_id
    )
    grows_B1 = bare_B1 & same_B1 & ends_B1 & (start_B1 > 1)
    added_BL = inside_BL & grows_B1
    before_B1 = positions_BL.gather(1, (start_B1 - 1).clamp(min=0))
    asked_BL = grows_B1 & (index_L >= start_B1 - 1) & (index_L < length - 1)
    return (
        torch.where(added_BL, eos_id, tokens_BL),
        torch.where(asked_BL, eos_id, labels_BL),
        torch.where(added_BL, positions_BL + before_B1 + 1, positions_BL),
    )


# --- objective -------------------------------------------------------------------------


class MaskedDiffusion(Objective):
    """Sum over masked tokens of cross-entropy / p, divided by the supervised tokens of the global batch.

    Its mean over the masks bounds the negative log-likelihood of a supervised token from above.
    """

    terms = ("loss", "masked")
    loss_inputs = ("readout_M", "weights_1MT")

    def __init__(
        self,
        *,
        mask_id: int,
        prediction: Prediction = "own",
        noise: str = "document",
        eps: float = 1e-3,
        eos_id: int | None = None,
        multiple: int = 1,
    ) -> None:
        self.mask_id = mask_id
        self.prediction: Prediction = prediction
        self.noise = noise
        self.eps = eps
        self.eos_id = eos_id
        """What padding becomes; None: it stays padding."""
        self.multiple = multiple
        """The number of positions read out is a multiple of this (chunks of the loss)."""

    def draw(self, positions_BL: torch.Tensor, *, generator: Generators) -> tuple[torch.Tensor, torch.Tensor]:
        """t of each position, the same within a document (or a row), and a number that p is compared with."""
        t_BL = rand(positions_BL.shape, generator=generator)
        starts_BL = torch.zeros_like(positions_BL)
        if self.noise == "document":
            starts_BL = document_starts(positions_BL)
        return t_BL.gather(1, starts_BL), rand(positions_BL.shape, generator=generator)

    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Generators
    ) -> Prepared:
        """Mask some of the supervised tokens; nothing else is ever masked, such as a prompt."""
        tokens_BL, positions_BL = inputs["input"], inputs["positions"]
        if self.eos_id is not None:
            tokens_BL, labels, positions_BL = fill_with_eos(
                tokens_BL, labels, positions_BL, eos_id=self.eos_id
            )
        own_BL = own_token_targets(tokens_BL, labels, positions_BL)
        t_BL, level_BL = self.draw(positions_BL, generator=generator)
        p_BL = mask_probability(t_BL, eps=self.eps)
        hidden_BL = (level_BL < p_BL) & (own_BL != IGNORE_INDEX)
        targets_BL = own_BL.masked_fill(~hidden_BL, IGNORE_INDEX)
        # The weight of a token stands where its label does; a document has one p.
        readout = labelled(readout_labels(targets_BL, prediction=self.prediction), multiple=self.multiple)
        weights_BLT = torch.stack([1 / p_BL, torch.ones_like(p_BL)], dim=-1)
        prepared = {
            **inputs,
            "input": tokens_BL.masked_fill(hidden_BL, self.mask_id),
            "positions": positions_BL,
            "readout_M": readout.index_M,
            "weights_1MT": weights_BLT.flatten(0, 1)[readout.index_M][None],
        }
        counts = {"loss": float((own_BL != IGNORE_INDEX).sum()), "masked": float(hidden_BL.sum())}
        return Prepared(prepared, readout.labels_1M, counts)

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
        """The weighted loss; the plain mean over masked tokens is a metric."""
        pred = model(tokens, **model_inputs, readout_M=loss_inputs["readout_M"])
        counts_T = torch.stack([counts[term].clamp(min=1) for term in self.terms])
        loss, metrics = loss_fn(
            pred,
            labels,
            None,
            loss_weights_BLT=loss_inputs["weights_1MT"] / counts_T,
            term_factors=[1.0, 0.0],
        )
        masked_share = (labels != IGNORE_INDEX).sum() / counts_T[0]
        return loss, {"mdlm/masked_loss": metrics["term_1_mean"], "mdlm/masked_share": masked_share}


def build_objective(config: Any) -> MaskedDiffusion:
    """The objective for a resolved config.

    Errors: UserError for a mask id that stands for an ordinary token; ValueError for a config that
    ``models.build_spec`` has not seen.
    """
    section = config.mdlm
    if section.prediction == "auto":
        raise ValueError("mdlm.prediction is not settled; models.build_spec does so")
    check_mask_id(config, mask_id=section.mask_token_id, where=MASK_KEY)
    eos_id = None
    if section.padding == "eos":
        eos_id = config.tokenizer.build(tokenizer_path=config.model.hf_assets_path).eos_id
    return MaskedDiffusion(
        mask_id=section.mask_token_id,
        prediction=section.prediction,
        noise=section.noise,
        eps=section.eps,
        eos_id=eos_id,
        multiple=config.loss.num_chunks,
    )
