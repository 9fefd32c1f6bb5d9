"""TDLM's self-distillation: the frozen model's own trajectories, a few states of each in one forward.

Shape suffixes: B = trajectories, K = states of each, S = K + 1, N = B * K rows, L = sequence
length, M = positions that are read out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan_ext.data import trajectories
from torchtitan_ext.data.mask_token import check_mask_id
from torchtitan_ext.decoding.masked_diffusion import Prediction
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.mdlm.objective import readout_labels
from torchtitan_ext.methods.tdlm import temporal
from torchtitan_ext.methods.tdlm.config import MASK_KEY
from torchtitan_ext.objective import IGNORE_INDEX, Generators, Objective, Prepared
from torchtitan_ext.readout import labelled


class TrajectoryDistillation(Objective):
    """Each sampled state predicts what the frozen model reveals before the next one (TDLM Eq. 5)."""

    loss_inputs = ("readout_M", "masked_NL", "revealed_N")

    def __init__(
        self, *, mask_id: int, states: int, prediction: Prediction = "own", multiple: int = 1
    ) -> None:
        self.mask_id = mask_id
        self.states = states
        """K."""
        self.prediction: Prediction = prediction
        self.multiple = multiple
        """The number of positions read out is a multiple of this (chunks of the loss)."""

    def draw(self, reveal_step_BL: torch.Tensor, *, generator: Generators) -> torch.Tensor:
        """s_0 to s_K of each trajectory, [B, S]."""
        return temporal.sample_steps(reveal_step_BL.amax(dim=1), states=self.states, generator=generator)

    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Generators
    ) -> Prepared:
        """The first K states of each trajectory as rows, and their targets.

        ``inputs``, ``labels``: as the data set "trajectories" gives them. The last state is complete
        and never run. Errors: UserError for a trajectory of fewer than K steps.
        """
        inputs, labels = trajectories.unpack(inputs, labels)
        reveal_step_BL = inputs[trajectories.STEPS]
        steps_BS = self.draw(reveal_step_BL, generator=generator)
        masked_BSL = temporal.masked_states(reveal_step_BL, steps_BS)
        masked_BKL = masked_BSL[:, :-1]
        labels_BKL = torch.where(temporal.targets(masked_BSL), labels[:, None], IGNORE_INDEX)
        tokens_BKL = torch.where(masked_BKL, self.mask_id, inputs["input"][:, None])
        readout = labelled(
            readout_labels(labels_BKL.flatten(0, 1), prediction=self.prediction), multiple=self.multiple
        )
        prepared = {
            "input": tokens_BKL.flatten(0, 1),
            "positions": inputs["positions"].repeat_interleave(self.states, dim=0),
            "readout_M": readout.index_M,
            "masked_NL": masked_BKL.flatten(0, 1),
            "revealed_N": temporal.revealed_counts(reveal_step_BL, masked_BKL).flatten(),
        }
        counts = {"loss": float((readout.labels_1M != IGNORE_INDEX).sum())}
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
        """Mean cross-entropy over all supervised tokens of the global batch."""
        states = temporal.States(loss_inputs["masked_NL"], loss_inputs["revealed_N"], self.states)
        pred = model(tokens, **model_inputs, readout_M=loss_inputs["readout_M"], temporal=states)
        return loss_fn(pred, labels, counts["loss"])


def build_objective(config: Any) -> TrajectoryDistillation:
    """The objective for a resolved config.

    Errors: UserError for a mask id that stands for an ordinary token, for data that are no
    trajectories, and for trajectories of another backbone, tokenizer or mask token or of fewer than
    K steps; ValueError for a config that ``models.build_spec`` has not seen.
    """
    section = config.tdlm
    if section.prediction == "auto":
        raise ValueError("tdlm.prediction is not settled; models.build_spec does so")
    check_mask_id(config, mask_id=section.mask_token_id, where=MASK_KEY)
    for folder in trajectories.folders(config):
        if folder.parts and folder.is_dir():  # else the loader refuses it
            _check_trajectories(config, folder)
    return TrajectoryDistillation(
        mask_id=section.mask_token_id,
        states=section.states,
        prediction=section.prediction,
        multiple=config.loss.num_chunks,
    )


def _check_trajectories(config: Any, folder: Path) -> None:
    section = config.tdlm
    trajectories.check(config, folder, mask_id=section.mask_token_id)
    steps = trajectories.complete_manifest(folder, where="dataloader")["result"]["steps"]
    if section.states > steps:
        raise UserError(
            f"[tdlm] states = {section.states} (K) is more than the {steps} steps of the trajectories in "
            f"{folder} (allowed: 2 to {steps})"
        )
