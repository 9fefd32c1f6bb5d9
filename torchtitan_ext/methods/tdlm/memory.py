"""What masked positions remember of earlier forwards while a response is being denoised.

A position that is masked now has been masked in every forward so far, and revealed ones are
dropped, so all that are left have histories of the same length: one dense tensor a layer, in which
a forward drops what was revealed and adds what is new by one copy.

Shape suffixes: B = batch rows, L = tokens of a row, P = positions that are corrected (of all
rows), T = remembered forwards, M = heads, H = width of a head, D = model dimension, U = H / 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchtitan_ext.methods.tdlm.temporal import Shift, Window, corrected, rotate, rotation


class HistoryMemory:
    """Keys and values of earlier forwards, for every layer and every masked position of a batch.

    The decoding loop tells what is masked (``masked_diffusion.TemporalMemory``); the temporal
    modules read and extend it (``model.History``). Changing blocks changes nothing here.
    """

    def __init__(self, *, head_dim: int, window: Window = "full", shift: Shift = "literal") -> None:
        self.head_dim = head_dim
        self.window: Window = window
        self.shift: Shift = shift
        self.begin(torch.zeros(0, 0, dtype=torch.bool))

    # --- told by the decoding loop -----------------------------------------------------

    def begin(self, masked_BL: torch.Tensor) -> None:
        """A new batch, nothing remembered; True at the masks of the responses."""
        self._masked_BL = corrected(masked_BL, shift=self.shift)
        self._revealed_B = torch.zeros(len(masked_BL), dtype=torch.long, device=masked_BL.device)
        self._history: dict[int, torch.Tensor] = {}
        """Keys and values of each layer, [T, 2, P, M, H], where P are the positions of its last forward."""
        self._kept_P: torch.Tensor | None = None
        """Which of those positions are left; None: all."""
        self._stale: set[int] = set()
        """Layers whose last forward was before that."""
        self._settle()

    def revealed(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """These positions are no longer masked: their history is dropped."""
        device = self._masked_BL.device
        back = 1 if self.shift == "moved" else 0
        rows_E, positions_E = torch.tensor([list(rows), list(positions)], dtype=torch.long, device=device)
        numbers_BL = self._numbers()
        self._masked_BL = self._masked_BL.clone()
        self._masked_BL[rows_E, positions_E - back] = False
        self._revealed_B = self._revealed_B.index_add(0, rows_E, torch.ones_like(rows_E))
        self._keep(numbers_BL)

    def select(self, rows: Sequence[int], length: int) -> None:
        """Keep these rows, in this order, and their first ``length`` positions."""
        chosen = list(rows)
        numbers_BL = self._numbers()[chosen, :length]
        self._masked_BL = self._masked_BL[chosen, :length]
        self._revealed_B = self._revealed_B[chosen]
        self._keep(numbers_BL)

    def _numbers(self) -> torch.Tensor:
        """Number of each corrected position in the remembered tensors, [B, L]."""
        return self._masked_BL.flatten().cumsum(0).view_as(self._masked_BL) - 1

    def _keep(self, numbers_BL: torch.Tensor) -> None:
        """Drop all but the positions that are still masked, which had these numbers before."""
        kept_P = numbers_BL[self._masked_BL]
        # No forward since the last time: its numbers are not yet those of the remembered tensors.
        again = self._kept_P is not None and bool(self._stale)
        self._kept_P = self._kept_P[kept_P] if again and self._kept_P is not None else kept_P
        self._stale = set(self._history)
        self._settle()

    def _settle(self) -> None:
        """What the next forward needs in every layer."""
        self.places_P = self._masked_BL.flatten().nonzero()[:, 0]
        if self._masked_BL.numel():
            r_P = self._revealed_B[self.places_P // self._masked_BL.shape[1]]
            self._cos_P1U, self._sin_P1U = (part[:, None] for part in rotation(r_P, self.head_dim))

    # --- read by the temporal modules --------------------------------------------------

    def take(self, h_BLD: torch.Tensor) -> torch.Tensor:
        """Hidden states of the corrected positions, [P, 1, D]."""
        return h_BLD.flatten(0, 1)[self.places_P][:, None]

    def turn(self, x_P1MH: torch.Tensor) -> torch.Tensor:
        """Rotated by the number of revealed tokens of each position's row."""
        return rotate(x_P1MH, self._cos_P1U, self._sin_P1U)

    def recall(
        self, layer_id: int, k_P1MH: torch.Tensor, v_P1MH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Keys and values [P, T, M, H] of the earlier forwards, then those of this one are added."""
        if self.window == "current":
            return k_P1MH, v_P1MH, None
        new_12PMH = torch.stack([k_P1MH[:, 0], v_P1MH[:, 0]]).detach()[None]
        past_T2PMH = self._history.get(layer_id, new_12PMH[:0])
        all_T2PMH = new_12PMH.new_empty(len(past_T2PMH) + 1, *new_12PMH.shape[1:])
        if layer_id in self._stale and self._kept_P is not None:
            torch.index_select(past_T2PMH, 2, self._kept_P, out=all_T2PMH[:-1])
            self._stale.remove(layer_id)
        else:
            all_T2PMH[:-1] = past_T2PMH
        all_T2PMH[-1:] = new_12PMH
        self._history[layer_id] = all_T2PMH if self.window == "full" else all_T2PMH[-self.window :]
        keys_TPMH, values_TPMH = all_T2PMH[:-1].unbind(dim=1)
        return keys_TPMH.transpose(0, 1), values_TPMH.transpose(0, 1), None

    def put(self, correction_P1D: torch.Tensor, h_BLD: torch.Tensor) -> torch.Tensor:
        """The hidden states with the corrections added, [B, L, D]."""
        flat_ND = h_BLD.flatten(0, 1)
        return flat_ND.index_add(0, self.places_P, correction_P1D[:, 0]).view_as(h_BLD)

    # --- what it holds -----------------------------------------------------------------

    @property
    def remembered(self) -> int:
        """How many forwards are remembered, T."""
        return max((len(past) for past in self._history.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values: layers x positions x forwards x 2 M d_h x element size."""
        return sum(past.numel() * past.element_size() for past in self._history.values())
