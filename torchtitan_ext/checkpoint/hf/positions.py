"""From transformers' attention_mask and position_ids to positions of documents, and the masks on them.

Padding is a document of its own, so no row sees it, on whichever side it stands.

Shape suffixes: B = batch, L = sequence length, E = expanded length, L (1 + pauses).
"""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_ext import masks
from torchtitan_ext.attention import build_mask
from torchtitan_ext.errors import UserError


def padding_mask(attention_mask: torch.Tensor | None, tokens_BL: torch.Tensor) -> torch.Tensor:
    """True at the tokens that are not padding, [B, L].

    Errors: UserError for another shape, or a row with a hole in it.
    """
    if attention_mask is None:
        return torch.ones_like(tokens_BL, dtype=torch.bool)
    if attention_mask.shape != tokens_BL.shape:
        raise UserError(
            f"attention_mask is {list(attention_mask.shape)}, input_ids {list(tokens_BL.shape)}: only masks "
            "of padding are supported"
        )
    real_BL = attention_mask.to(tokens_BL.device).bool()
    begins_BL = real_BL.clone()
    begins_BL[:, 1:] &= ~real_BL[:, :-1]
    rows = (begins_BL.sum(dim=1) > 1).nonzero()[:, 0].tolist()
    if rows:
        raise UserError(f"attention_mask of row {rows[0]} has padding between tokens (allowed: on one side)")
    return real_BL


def positions_of(real_BL: torch.Tensor) -> torch.Tensor:
    """Positions that restart where a row's text or its padding begins, [B, L]."""
    index_L = torch.arange(real_BL.shape[1], device=real_BL.device)
    begins_BL = torch.ones_like(real_BL)
    begins_BL[:, 1:] = real_BL[:, 1:] != real_BL[:, :-1]
    return index_L - (index_L * begins_BL).cummax(dim=1).values


def check_position_ids(position_ids: torch.Tensor, tokens_BL: torch.Tensor) -> torch.Tensor:
    """Positions of packed documents, [B, L].

    Errors: UserError for positions that neither count on nor restart at 0.
    """
    positions_BL = position_ids.to(tokens_BL.device).expand(tokens_BL.shape[0], -1)
    steps_BL = positions_BL[:, 1:] - positions_BL[:, :-1]
    wrong = ((steps_BL != 1) & (positions_BL[:, 1:] != 0)).any() or (positions_BL[:, 0] < 0).any()
    if positions_BL.shape != tokens_BL.shape or bool(wrong):
        raise UserError("position_ids must count on from token to token or restart at 0 (a new document)")
    return positions_BL.contiguous()


def attention_of(config: Any, positions_BL: torch.Tensor) -> Any:
    """The mask under which a model's config lets clean tokens attend."""
    kind = config.size.attention
    if getattr(config, "clean_attention", "causal") == "block":
        return build_mask(_blocks(positions_BL, block_size=config.block_size), config.attention)
    return build_mask(masks.DOCUMENT_MASKS[kind](positions_BL), config.attention)


def _blocks(positions_BL: torch.Tensor, *, block_size: int) -> masks.Mask:
    """Own and earlier blocks of the document, as the clean half of :func:`masks.doubled_blocks`."""
    ids_BL, blocks_BL = masks.document_ids(positions_BL), positions_BL // block_size

    def mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (ids_BL[b, q] == ids_BL[b, k]) & (blocks_BL[b, q] >= blocks_BL[b, k])

    length = positions_BL.shape[1]
    return masks.Mask("blocks", mod, positions_BL, length, length)


def with_pauses(
    tokens_BL: torch.Tensor, positions_BL: torch.Tensor, *, pauses: int, pause_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions of the sequence in which pause tokens follow each token, both [B, E]."""
    width = 1 + pauses
    columns = [torch.full_like(tokens_BL, pause_id)] * pauses
    within = torch.arange(width, device=tokens_BL.device)
    return (
        torch.stack([tokens_BL, *columns], dim=-1).flatten(1),
        (positions_BL[..., None] * width + within).flatten(1),
    )
