"""Every attention mask, once.

A :class:`Mask` holds the rule as a ``mask_mod`` (the signature FlexAttention
takes), so that the dense reference, FlexAttention's block mask and the varlen
kernels are all built from the same definition (``torchtitan_ext.attention``).
Documents are delimited by positions that restart at 0, never by token ids: an
EOS may stand inside a document.

Shape suffixes: B = batch, L = sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Mask:
    """One attention pattern for one batch.

    ``mod(b, h, q_idx, kv_idx)`` is True where query ``q_idx`` of row ``b`` may
    attend to key ``kv_idx``. ``kind`` names the pattern, so that kernels which
    implement it directly (varlen) need not evaluate ``mod``.
    """

    kind: str
    mod: MaskMod
    positions_BL: torch.Tensor
    q_len: int
    kv_len: int

    @property
    def batch(self) -> int:
        return self.positions_BL.shape[0]


def document_ids(positions_BL: torch.Tensor) -> torch.Tensor:
    """Number of the document each token belongs to, [B, L]; a row may start inside one."""
    return torch.cumsum((positions_BL == 0).int(), dim=1)


def causal_document(positions_BL: torch.Tensor) -> Mask:
    """Each token sees itself and the earlier tokens of its own document."""
    ids_BL = document_ids(positions_BL)

    def mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (ids_BL[b, q_idx] == ids_BL[b, kv_idx])

    length = positions_BL.shape[1]
    return Mask("causal_document", mod, positions_BL, length, length)


def bidirectional_document(positions_BL: torch.Tensor) -> Mask:
    """Each token sees every token of its own document."""
    ids_BL = document_ids(positions_BL)

    def mod(b, h, q_idx, kv_idx):
        return ids_BL[b, q_idx] == ids_BL[b, kv_idx]

    length = positions_BL.shape[1]
    return Mask("bidirectional_document", mod, positions_BL, length, length)


DOCUMENT_MASKS: dict[str, Callable[[torch.Tensor], Mask]] = {
    "causal": causal_document,
    "bidirectional": bidirectional_document,
}
