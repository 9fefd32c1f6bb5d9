"""What masked positions remember of earlier forwards while a response is being denoised.

A position that is masked now has been masked in every forward so far, and revealed ones are
dropped, so all that are left have histories of the same length: one dense buffer a layer, longer in
time than it is filled, to which a forward adds its keys and values in place. What stands behind the
last position left fills the gaps of those that are dropped: nothing else moves, and the order of
the positions in the buffers is no order of the text.

Shape suffixes: B = batch rows, L = tokens of a row, P = positions that are corrected (of all
rows), T = remembered forwards, M = heads, H = width of a head, D = model dimension, U = H / 2,
G = gaps among the positions. Buffers are [2, P, M, T, H], keys and then values, where P and T are
what there is room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_ext.methods.tdlm.temporal import Shift, Window, corrected, rotate, rotation


@dataclass(slots=True)
class _Layer:
    """Keys and values of one layer: those of the forwards ``begin`` to ``end`` - 1 of the buffer."""

    buffer_2PMTH: torch.Tensor
    begin: int = 0
    end: int = 0

    @property
    def count(self) -> int:
        """Remembered forwards."""
        return self.end - self.begin

    def past(self, positions: int) -> torch.Tensor:
        """What is remembered, a view [2, P, M, T, H]."""
        return self.buffer_2PMTH[:, :positions, :, self.begin : self.end]

    def make_room(self, positions: int) -> None:
        """Let one more forward fit: half as much again is copied to, so that few forwards copy."""
        if self.end < self.buffer_2PMTH.shape[3]:
            return
        past_2PMTH = self.past(positions)
        two, _, heads, count, width = past_2PMTH.shape
        self.buffer_2PMTH = past_2PMTH.new_empty(two, positions, heads, count + count // 2 + 8, width)
        self.buffer_2PMTH[:, :, :, :count] = past_2PMTH
        self.begin, self.end = 0, count


class HistoryMemory:
    """Keys and values of earlier forwards, for every layer and every masked position of a batch.

    The decoding loop tells what is masked (``masked_diffusion.TemporalMemory``); the temporal
    modules read and extend it (``model.History``). Changing blocks changes nothing here.
    Without gradients: what a forward has read is written to by later ones.
    """

    def __init__(self, *, head_dim: int, window: Window = "full", shift: Shift = "literal") -> None:
        self.head_dim = head_dim
        self.window: Window = window
        self.shift: Shift = shift
        self.begin(torch.zeros(0, 0, dtype=torch.bool))

    # --- told by the decoding loop -----------------------------------------------------

    def begin(self, masked_BL: torch.Tensor) -> None:
        """A new batch, nothing remembered; True at the masks of the responses."""
        self._length = masked_BL.shape[1]
        self._revealed_B = torch.zeros(len(masked_BL), dtype=torch.long, device=masked_BL.device)
        self._layers: dict[int, _Layer] = {}
        self.places_P = corrected(masked_BL, shift=self.shift).flatten().nonzero()[:, 0]
        """Which of the batch's tokens [B * L] are corrected, in the order of the buffers."""
        self._settle()

    def revealed(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """These positions are no longer masked: their history is dropped."""
        back = 1 if self.shift == "moved" else 0
        rows_E, positions_E = torch.tensor([list(rows), list(positions)], device=self.places_P.device)
        self._revealed_B = self._revealed_B.index_add(0, rows_E, torch.ones_like(rows_E))
        self._keep(~torch.isin(self.places_P, rows_E * self._length + positions_E - back))
        self._settle()

    def select(self, rows: Sequence[int], length: int) -> None:
        """Keep these rows, in this order, and their first ``length`` positions."""
        device = self.places_P.device
        chosen = torch.tensor(list(rows), device=device)
        new_row_B = torch.full_like(self._revealed_B, -1)
        new_row_B[chosen] = torch.arange(len(chosen), device=device)
        old_row_P, position_P = self.places_P // self._length, self.places_P % self._length
        row_P = new_row_B[old_row_P]
        self.places_P = row_P * length + position_P
        self._keep((row_P >= 0) & (position_P < length))
        self._revealed_B, self._length = self._revealed_B[chosen], length
        self._settle()

    def _keep(self, left_P: torch.Tensor) -> None:
        """Drop all but these positions; the last of them move to where the dropped ones were."""
        count = int(left_P.sum())
        gaps_G = (~left_P[:count]).nonzero()[:, 0]
        moved_G = count + left_P[count:].nonzero()[:, 0]
        if len(gaps_G):
            self.places_P = self.places_P.index_copy(0, gaps_G, self.places_P[moved_G])
            for layer in self._layers.values():
                past_2PMTH = layer.past(len(left_P))
                past_2PMTH[:, gaps_G] = past_2PMTH[:, moved_G]
        self.places_P = self.places_P[:count]

    def _settle(self) -> None:
        """What the next forward needs in every layer."""
        r_P = self._revealed_B[self.places_P // max(self._length, 1)]
        self._cos_P1U, self._sin_P1U = (part[:, None] for part in rotation(r_P, self.head_dim))

    # --- read by the temporal modules --------------------------------------------------

    def take(self, h_BLD: torch.Tensor) -> torch.Tensor:
        """Hidden states of the corrected positions, [P, 1, D]."""
        return h_BLD.flatten(0, 1)[self.places_P][:, None]

    def turn(self, x_P1MH: torch.Tensor) -> torch.Tensor:
        """Rotated by the number of revealed tokens of each position's row."""
        return rotate(x_P1MH, self._cos_P1U, self._sin_P1U)

    def gather(self, x_P1MH: torch.Tensor) -> torch.Tensor:
        """As it is: each position has one state."""
        return x_P1MH

    def scatter(self, z_P1MH: torch.Tensor) -> torch.Tensor:
        """As it is: all positions taken are corrected."""
        return z_P1MH

    def recall(
        self, layer_id: int, k_P1MH: torch.Tensor, v_P1MH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Keys and values [P, T, M, H] of the earlier forwards, then those of this one are added."""
        if self.window == "current":
            return k_P1MH, v_P1MH, None
        positions, _, heads, width = k_P1MH.shape
        if layer_id not in self._layers:
            self._layers[layer_id] = _Layer(k_P1MH.new_empty(2, positions, heads, 0, width))
        layer = self._layers[layer_id]
        layer.make_room(positions)
        keys_PMTH, values_PMTH = layer.past(positions)
        for stored_PMTH, new_P1MH in zip(layer.buffer_2PMTH, (k_P1MH, v_P1MH), strict=True):
            stored_PMTH[:positions, :, layer.end] = new_P1MH[:, 0].detach()
        layer.end += 1
        if self.window != "full":
            layer.begin = max(layer.begin, layer.end - self.window)
        return keys_PMTH.transpose(1, 2), values_PMTH.transpose(1, 2), None

    def put(self, correction_P1D: torch.Tensor, h_BLD: torch.Tensor) -> torch.Tensor:
        """The hidden states with the corrections added, [B, L, D]."""
        flat_ND = h_BLD.flatten(0, 1)
        return flat_ND.index_add(0, self.places_P, correction_P1D[:, 0]).view_as(h_BLD)

    # --- what it holds -----------------------------------------------------------------

    @property
    def remembered(self) -> int:
        """How many forwards are remembered, T."""
        return max((layer.count for layer in self._layers.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values: layers x positions x forwards x 2 M d_h x element size."""
        return sum(layer.past(len(self.places_P)).nbytes for layer in self._layers.values())

    @property
    def allocated(self) -> int:
        """Bytes of the buffers: :attr:`nbytes`, the room behind it and what dropped positions leave."""
        return sum(layer.buffer_2PMTH.nbytes for layer in self._layers.values())
