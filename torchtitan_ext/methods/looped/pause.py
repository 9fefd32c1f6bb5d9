"""Pause tokens as functions: the expanded sequence, and which id stands for a pause.

Shape suffixes: B = batch, L = sequence length, E = expanded length, L (1 + pauses).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchtitan_ext.errors import UserError
from torchtitan_ext.objective import IGNORE_INDEX


def expand_tokens(tokens_BL: torch.Tensor, *, pauses: int, pause_id: int) -> torch.Tensor:
    """Each token followed by its pauses, [B, E]."""
    columns = [torch.full_like(tokens_BL, pause_id)] * pauses
    return torch.stack([tokens_BL, *columns], dim=-1).flatten(1)


def expand_positions(positions_BL: torch.Tensor, *, pauses: int) -> torch.Tensor:
    """Positions in the expanded documents, [B, E]: 0 stays at the documents' first tokens alone."""
    width = 1 + pauses
    within = torch.arange(width, device=positions_BL.device)
    return (positions_BL[..., None] * width + within).flatten(1)


def expand_labels(labels_BL: torch.Tensor, *, pauses: int) -> torch.Tensor:
    """Each token's label at the last of its pauses and nowhere else, [B, E]."""
    columns = [torch.full_like(labels_BL, IGNORE_INDEX)] * pauses
    return torch.stack([*columns, labels_BL], dim=-1).flatten(1)


def expand_prompt(prompt: Sequence[int], *, pauses: int, pause_id: int) -> list[int]:
    """A prompt as the model sees it."""
    return [token for given in prompt for token in (given, *([pause_id] * pauses))]


def resolve_pause_id(pause_token_id: int, *, vocab_size: int) -> int:
    """The row of the embedding that stands for a pause.

    Raises:
        UserError: an id outside the model's vocabulary.
    """
    if pause_token_id >= vocab_size:
        raise UserError(
            f"[looped] pause_token_id = {pause_token_id} is outside the model's vocabulary "
            f"(allowed: 0 to {vocab_size - 1}, or -1 for {vocab_size - 1})"
        )
    return vocab_size - 1 if pause_token_id == -1 else pause_token_id


def check_pause_id(pause_id: int, tokenizer: Any) -> None:
    """Refuse an id that text is made of, or that starts, ends or pads a sequence.

    Special tokens with other uses (such as SmolLM2's ``<empty_output>``) are allowed: plain text
    never becomes one.
    """
    written = tokenizer.id_to_token(pause_id)
    roles = {getattr(tokenizer, f"{role}_id"): role for role in ("pad", "bos", "eos")}
    role = roles.get(pause_id)
    if role is None and (written is None or pause_id in tokenizer.special_ids):
        return
    used = f"is the tokenizer's {role.upper()}" if role else f"stands for {written!r} in the tokenizer"
    raise UserError(
        f"[looped] pause_token_id = {pause_id} {used} (allowed: a free id of the model's vocabulary, "
        "or a special token that the data does not use)"
    )
