"""Next-token loss; with pause tokens, on the expanded sequence.

Shape suffixes: B = batch, L = sequence length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchtitan_ext import backbones
from torchtitan_ext.errors import UserError
from torchtitan_ext.methods.looped import pause
from torchtitan_ext.objective import Generators, NextToken, Prepared


class PauseObjective(NextToken):
    """Each token's label is predicted at the last of the pause tokens that follow it."""

    def __init__(self, *, pauses: int, pause_id: int) -> None:
        self.pauses, self.pause_id = pauses, pause_id

    def prepare(
        self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Generators
    ) -> Prepared:
        """Expand the batch; the count of supervised tokens stays that of the data.

        Raises:
            UserError: the data itself holds the pause token.
        """
        tokens_BL = inputs["input"]
        if (tokens_BL == self.pause_id).any():
            raise UserError(
                f"[looped] pause_token_id = {self.pause_id} occurs in the data; choose an id that does not"
            )
        expanded = {
            **inputs,
            "input": pause.expand_tokens(tokens_BL, pauses=self.pauses, pause_id=self.pause_id),
            "positions": pause.expand_positions(inputs["positions"], pauses=self.pauses),
        }
        labels_BE = pause.expand_labels(labels, pauses=self.pauses)
        return super().prepare(expanded, labels_BE, generator=generator)


def build_objective(config: Any) -> NextToken:
    """The objective for a resolved config.

    Raises:
        UserError: a pause token that the tokenizer uses otherwise.
    """
    section = config.looped
    if section.kind != "pause":
        return NextToken()
    assets = config.model.hf_assets_path or ""
    size = backbones.size_for(config.model.flavor, hf_assets_path=assets or None)
    pause_id = pause.resolve_pause_id(section.pause_token_id, vocab_size=size.vocab_size)
    # Of assets that are not there yet nothing is known; the data is checked batch by batch anyway.
    if not assets or Path(assets).exists():
        pause.check_pause_id(pause_id, config.tokenizer.build(tokenizer_path=assets))
    return PauseObjective(pauses=section.pause_tokens, pause_id=pause_id)
