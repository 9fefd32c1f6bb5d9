"""WeDLM's loss on dual streams.

Shape suffixes: B = batch, S = data length, L = 2S, M = positions that are read out, T = terms.
"""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_ext.data.mask_token import check_mask_id
from torchtitan_ext.doubled import DoubledObjective
from torchtitan_ext.methods.wedlm import batch
from torchtitan_ext.methods.wedlm.config import MASK_KEY
from torchtitan_ext.objective import IGNORE_INDEX, Generators, Prepared
from torchtitan_ext.readout import labelled


def factors(w_ar: float) -> tuple[float, float]:
    """Factors of the next-token and the diffusion term: (diffusion + w_ar AR) / (1 + w_ar)."""
    return w_ar / (1 + w_ar), 1 / (1 + w_ar)


class WeDLMObjective(DoubledObjective):
    """Next tokens on the clean half, own tokens at the masks, these weighted by 1/g."""

    name = "wedlm"

    def __init__(self, *, mask_id: int, block_size: int, w_ar: float, weighting: str, multiple: int = 1):
        super().__init__(mask_id=mask_id, block_size=block_size, factors=factors(w_ar), multiple=multiple)
        self.weighting = weighting

    def noise(self, tokens_BS: torch.Tensor, *, generator: Generators) -> batch.Noise:
        """The random numbers of a batch."""
        return batch.draw_noise(tokens_BS.shape, generator=generator)

    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Generators
    ) -> Prepared:
        """The dual stream, with labels where there is a loss; a term with factor 0 has none."""
        tokens_BS, positions_BS = inputs["input"], inputs["positions"]
        streams = batch.dual_stream(
            tokens_BS,
            labels,
            positions_BS,
            noise=self.noise(tokens_BS, generator=generator),
            mask_id=self.mask_id,
            block_size=self.block_size,
        )
        labels_BL = streams.labels_BL.clone()
        if self.factors[0] == 0:
            labels_BL[:, : tokens_BS.shape[1]] = IGNORE_INDEX
        readout = labelled(labels_BL, multiple=self.multiple)
        weights_BL = batch.normalised_weights(streams, weighting=self.weighting)
        clean_BL = torch.zeros_like(weights_BL)
        clean_BL[:, : tokens_BS.shape[1]] = 1
        weights_BLT = torch.stack([clean_BL, weights_BL], dim=-1)
        dual = {
            "input": streams.tokens_BL,
            "positions": streams.positions_BL,
            "readout_M": readout.index_M,
            "weights_1MT": weights_BLT.flatten(0, 1)[readout.index_M][None],
        }
        counts = {
            "ar": float((labels != IGNORE_INDEX).sum()),
            "diffusion": batch.weight_count(streams, weighting=self.weighting),
        }
        return Prepared(dual, readout.labels_1M, counts)


def build_objective(config: Any) -> WeDLMObjective:
    """The objective for a resolved config.

    Errors: UserError for a mask id that stands for an ordinary token.
    """
    section = config.wedlm
    check_mask_id(config, mask_id=section.mask_token_id, where=MASK_KEY)
    return WeDLMObjective(
        mask_id=section.mask_token_id,
        block_size=section.block_size,
        w_ar=section.w_ar,
        weighting=section.loss_weighting,
        multiple=config.loss.num_chunks,
    )
