"""Keys and values of what a model has already seen.

Token i of a row sits in slot i, and a query at slot p attends to slots k <= p. So
prompts of unequal length are padded on the right: the padding lies behind every real
query, is never attended, and the tokens generated later overwrite it.

One forward is: ``attend`` (or ``attend_at``), the model, ``advance``.

Shape suffixes: B = batch rows, L = new tokens, T = slots, N = key/value heads, H = head
dimension, Q = queries of a mask, K = slots of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchtitan_ext.attention import CachedAttention


class _Plan(NamedTuple):
    """Where the next forward writes, and how many slots it reads."""

    end: int
    start: int | None
    """First slot, when it is the same for all rows; the write is then one slice."""

    slots_BL: torch.Tensor | None
    """Slot of every new token, when the rows differ."""


class KVCache:
    """Per-layer keys and values [B, N, T, H]; every row has its own length.

    Memory of a layer is allocated at its first ``update``, for ``capacity`` slots, and
    doubles when more are needed; a decoder that knows its longest row asks for it at once.
    """

    def __init__(self, batch: int, *, capacity: int = 256, device: torch.device | str = "cpu") -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"a cache needs at least one row and one slot, got {batch} and {capacity}")
        self.device = torch.device(device)
        self.lengths: list[int] = [0] * batch
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._slots_T = torch.arange(capacity, device=self.device)
        self._rows_B1 = torch.arange(batch, device=self.device)[:, None]
        self._plan: _Plan | None = None

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Slots that are allocated for every row."""
        return self._slots_T.shape[0]

    @property
    def common_length(self) -> int | None:
        """Length of all rows, or None when they differ."""
        first = self.lengths[0]
        return first if self.lengths.count(first) == len(self.lengths) else None

    def layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored keys and values of a layer up to the longest row, [B, N, T, H]."""
        longest = max(self.lengths)
        return self._keys[layer_id][:, :, :longest], self._values[layer_id][:, :, :longest]

    def positions(self, length: int) -> torch.Tensor:
        """Positions of the next ``length`` tokens: [1, L] when all rows are equally long, else [B, L]."""
        self._reserve(max(self.lengths) + length)
        start = self.common_length
        if start is not None:
            return self._slots_T[None, start : start + length]
        return self._starts_B()[:, None] + self._slots_T[:length]

    def attend(self, length: int) -> CachedAttention:
        """Plan a causal forward over ``length`` new tokens, which follow what each row holds."""
        slots_BL = self.positions(length)
        end = max(self.lengths) + length
        start = self.common_length
        self._plan = _Plan(end, start, None if start is not None else slots_BL)
        if start is not None and length == 1:
            return CachedAttention(self, None)
        return CachedAttention(self, self._slots_T[:end] <= slots_BL[..., None])

    def attend_at(self, slots_BL: torch.Tensor, mask_BQK: torch.Tensor | None) -> CachedAttention:
        """Plan a forward that writes token l of row b into slot ``slots_BL[b, l]``.

        ``mask_BQK``: True where a query may attend to a slot; it fixes how many slots are
        read. None reads everything up to the last slot in use.
        """
        end = 0 if mask_BQK is None else mask_BQK.shape[-1]
        if mask_BQK is None or slots_BL.device.type == "cpu":  # elsewhere this waits for the device
            last = int(slots_BL.max())
            if mask_BQK is not None and last >= end:
                raise ValueError(f"the mask covers {end} slots, but slot {last} is written")
            end = end or max(last + 1, *self.lengths)
        self._reserve(end)
        self._plan = _Plan(end, None, slots_BL.expand(self.batch, -1))
        return CachedAttention(self, mask_BQK)

    def update(
        self, layer_id: int, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write where the plan says; return the slots that the plan reads, [B, N, T, H]."""
        if self._plan is None:
            raise RuntimeError("call attend() or attend_at() before the model")
        if layer_id not in self._keys:
            self._allocate(layer_id, k_BLNH)
        end, start, slots_BL = self._plan
        keys, values = self._keys[layer_id], self._values[layer_id]
        if start is not None:
            keys[:, :, start:end] = k_BLNH.transpose(1, 2)
            values[:, :, start:end] = v_BLNH.transpose(1, 2)
        else:
            keys[self._rows_B1, :, slots_BL] = k_BLNH
            values[self._rows_B1, :, slots_BL] = v_BLNH
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, counts: int | Sequence[int]) -> None:
        """Keep ``counts`` of the tokens just written: one number, or one for each row."""
        counts = [counts] * self.batch if isinstance(counts, int) else list(counts)
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if min(counts) < 0 or max(lengths) > self.capacity:
            raise ValueError(f"cannot advance rows of length {self.lengths} by {counts}")
        self.lengths = lengths

    def truncate(self, lengths: Sequence[int]) -> None:
        """Drop everything after each row's new length."""
        for length, new in zip(self.lengths, lengths, strict=True):
            if not 0 <= new <= length:
                raise ValueError(f"cannot truncate rows of length {self.lengths} to {list(lengths)}")
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be named more than once."""
        if not rows or not all(0 <= row < self.batch for row in rows):
            raise ValueError(f"cannot select rows {list(rows)} of {self.batch}")
        if list(rows) == list(range(self.batch)):
            return
        index = torch.tensor(rows, device=self.device)
        for store in (self._keys, self._values):
            for layer_id, tensor in store.items():
                store[layer_id] = tensor.index_select(0, index)
        self.lengths = [self.lengths[row] for row in rows]
        self._rows_B1 = torch.arange(self.batch, device=self.device)[:, None]
        self._plan = None

    def _starts_B(self) -> torch.Tensor:
        return torch.tensor(self.lengths, device=self.device)

    def _reserve(self, slots: int) -> None:
        """Make room for ``slots`` slots a row."""
        if slots <= self.capacity:
            return
        used, capacity = max(self.lengths), max(slots, 2 * self.capacity)
        self._slots_T = torch.arange(capacity, device=self.device)
        for store in (self._keys, self._values):
            for layer_id, old in store.items():
                store[layer_id] = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                store[layer_id][:, :, :used] = old[:, :, :used]

    def _allocate(self, layer_id: int, like_BLNH: torch.Tensor) -> None:
        # Zeros: a slot that is masked out still takes part in a product with weight 0, and 0 * NaN is NaN.
        _, _, heads, width = like_BLNH.shape
        shape = (self.batch, heads, self.capacity, width)
        self._keys[layer_id] = like_BLNH.new_zeros(shape)
        self._values[layer_id] = like_BLNH.new_zeros(shape)
