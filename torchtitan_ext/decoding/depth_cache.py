"""Models whose middle layers run several times over the same tokens: passes, cache, arithmetic.

A layer of the recurrent core has one buffer for each depth (the number of the pass, from 1), every
other layer has one, which holds what the last pass has written. A token that took part in S
passes has entries of its own at depths 1 to S; read deeper than that, it gives its entry at S.
For that, a pass writes its entry at its own depth and at all deeper ones, and the next pass
overwrites those: reading is then one buffer, without looking up who has got how far.

Token i of a row sits in slot i and a query at slot p attends to slots k <= p, as in
:class:`~torchtitan_ext.decoding.kv_cache.KVCache`; what lies behind a row's length is scratch.

Shape suffixes: S = depths, B = batch rows, R = rows of a forward, Q = its tokens, K = slots it
reads, T = all slots, N = key/value heads, H = head dimension, M = masked slots that are read,
F = slots whose tokens are fed back, D = model dimension. New keys and values are called BLNH, as
in the attention modules, and are [R, Q, N, H].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchtitan_ext.attention import CachedAttention
from torchtitan_ext.backbones.sizes import BackboneSize


class LayerCounts(NamedTuple):
    """Layers by how often a step evaluates them: the prelude once, core and coda in every pass."""

    prelude: int
    core: int
    coda: int

    def evaluations(self, passes: int) -> int:
        """Layers that a slot goes through in a step of so many passes: prelude + S (core + coda)."""
        return self.prelude + passes * (self.core + self.coda)

    def prefill_evaluations(self, passes: int) -> int:
        """The same for a token of the prompt: its readout is not needed, so the coda runs once."""
        return self.prelude + passes * self.core + self.coda


class Passes:
    """How a step goes through the model. This base is a plain backbone: one pass, no feedback.

    ``count``: passes at most, K. ``core``: layers whose cache has a buffer for each pass.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.count = 1
        self.core = range(0)
        self.layers = LayerCounts(0, len(model.layers), 0)

    def begin(self, tokens_RQ: torch.Tensor, positions_RQ: torch.Tensor, masks: Any) -> torch.Tensor:
        """What the first pass takes in."""
        return tokens_RQ

    def run(self, state: torch.Tensor, positions_RQ: torch.Tensor, masks: Any) -> torch.Tensor:
        """One pass through what recurs, [R, Q, D]."""
        return self.model.hidden(state, positions_RQ, masks)

    def readout(self, core_RQD: torch.Tensor, positions_RQ: torch.Tensor, masks: Any) -> torch.Tensor:
        """What the LM head takes in, [R, Q, D]."""
        return core_RQD

    def hazard(self, readout_MD: torch.Tensor, depth: int) -> torch.Tensor:
        """Probability of halting at this pass, [M]; asked for before the last pass alone."""
        raise NotImplementedError

    def feed(self, core_RQD: torch.Tensor, index_2F: torch.Tensor, tokens_F: torch.Tensor) -> torch.Tensor:
        """What the next pass takes in, [R, Q, D], tokens being put at (row, slot) ``index_2F``."""
        raise NotImplementedError

    def complete(
        self, cache: DepthCache, tokens_RQ: torch.Tensor, positions_RQ: torch.Tensor, masks: Any
    ) -> torch.Tensor:
        """Readouts of the last of all passes, nothing being filled between them, [R, Q, D].

        The coda, whose entries the last pass alone would leave, runs there alone.
        """
        nothing_2F = torch.empty(2, 0, dtype=torch.long, device=cache.device)
        state = self.begin(tokens_RQ, positions_RQ, masks)
        for cache.depth in range(1, self.count):
            core_RQD = self.run(state, positions_RQ, masks)
            state = self.feed(core_RQD, nothing_2F, nothing_2F[0])
        cache.depth = self.count
        return self.readout(self.run(state, positions_RQ, masks), positions_RQ, masks)


def estimated_flops(
    size: BackboneSize, *, layer_evaluations: int, head_evaluations: int, length: float
) -> float:
    """FLOPs of decoding, estimated as in the paper's appendix D.2, "Arithmetic cost".

    ``layer_evaluations``: tokens x layers; ``head_evaluations``: vocabulary readouts; ``length``: mean
    length attended to, the prompt and half of what was generated. A multiply and an add are two.
    Attention counts 4 x heads x head_dim x length a layer evaluation (queries with keys, weights
    with values); the formula itself is missing from our copy of the paper.
    """
    q_dim, kv_dim = size.n_heads * size.head_dim, size.n_kv_heads * size.head_dim
    layer_parameters = size.dim * (2 * q_dim + 2 * kv_dim + 3 * size.ffn_dim)
    layer = 2 * layer_parameters + 4 * q_dim * length
    return layer_evaluations * layer + head_evaluations * 2 * size.dim * size.vocab_size


class RowCost(NamedTuple):
    """What one row took."""

    prompt: int
    """Its tokens."""

    new: int
    """New tokens."""

    layer_evaluations: int
    """Tokens x layers behind the prompt."""

    head_evaluations: int
    """Vocabulary readouts."""


def cost_report(size: BackboneSize, rows: Sequence[RowCost], *, prompt_layers: int) -> dict[str, Any]:
    """What decoding cost, by the names of ``Generation.extra``.

    Lists of one entry a row: ``layer_evaluations`` and ``head_evaluations``. Numbers:
    ``layer_evaluations_per_token`` (behind the prompts), ``gflop_per_token`` (the prompts included)
    and ``prefill_gflop_per_token`` (what the prompts add to it).
    ``prompt_layers``: evaluations of layers that a token of a prompt takes.
    """
    flops = prompt_flops = 0.0
    for row in rows:
        cost = partial(estimated_flops, size, length=row.prompt + row.new / 2)
        flops += cost(layer_evaluations=row.layer_evaluations, head_evaluations=row.head_evaluations)
        prompt_flops += cost(layer_evaluations=row.prompt * prompt_layers, head_evaluations=0)
    new = max(sum(row.new for row in rows), 1)
    return {
        "layer_evaluations": [row.layer_evaluations for row in rows],
        "head_evaluations": [row.head_evaluations for row in rows],
        "layer_evaluations_per_token": sum(row.layer_evaluations for row in rows) / new,
        "gflop_per_token": (flops + prompt_flops) / new / 1e9,
        "prefill_gflop_per_token": prompt_flops / new / 1e9,
    }


class _Plan(NamedTuple):
    """Where the next forward writes, and how many slots it reads."""

    rows_R: torch.Tensor | None
    """Rows that take part; None is all of them, which are then read without a copy."""

    rows_R1: torch.Tensor
    slots_RQ: torch.Tensor
    end: int
    start: int | None
    """First slot, when all rows take part and are equally long; a write is then one slice."""


class DepthCache:
    """Per-layer keys and values [S, B, N, T, H]; every row has its own length.

    ``core``: layers that keep ``depths`` buffers. ``capacity``: slots of a row, never exceeded.
    One forward is: ``attend``, then for every pass ``depth`` and the layers, then ``advance``.
    """

    def __init__(
        self, batch: int, *, capacity: int, depths: int, core: range, device: torch.device | str = "cpu"
    ) -> None:
        if min(batch, capacity, depths) < 1:
            raise ValueError(f"a cache needs rows, slots and depths, got {batch}, {capacity} and {depths}")
        self.device = torch.device(device)
        self.lengths: list[int] = [0] * batch
        self.depth = 1
        """The pass that the core's layers read and write, from 1."""
        self.depths, self.core = depths, core
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._slots_T = torch.arange(capacity, device=self.device)
        self._plan: _Plan | None = None

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def layer(self, layer_id: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer reads at a depth, up to the longest row, both [B, N, K, H]."""
        at, longest = self._index(layer_id, depth), max(self.lengths)
        return self._keys[layer_id][at, :, :, :longest], self._values[layer_id][at, :, :, :longest]

    def attend(self, queries: int, rows: Sequence[int] | None = None) -> CachedAttention:
        """Plan a causal forward over ``queries`` tokens behind what each row holds.

        ``rows``: those that take part, in this order; None is all.
        """
        index = range(self.batch) if rows is None else rows
        lengths_R = torch.tensor([self.lengths[row] for row in index], device=self.device)
        end = max(self.lengths[row] for row in index) + queries
        if end > len(self._slots_T):
            raise ValueError(f"{end} slots are needed, but the cache has {len(self._slots_T)}")
        slots_RQ = lengths_R[:, None] + self._slots_T[:queries]
        rows_R = torch.tensor(index, device=self.device)
        start = end - queries if rows is None and len(set(self.lengths)) == 1 else None
        self._plan = _Plan(None if rows is None else rows_R, rows_R[:, None], slots_RQ, end, start)
        return CachedAttention(self, self._slots_T[:end] <= slots_RQ[..., None])

    def update(
        self, layer_id: int, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this depth's entries and those deeper; what is read at this depth, both [R, N, K, H]."""
        if self._plan is None:
            raise RuntimeError("call attend() before the model")
        if layer_id not in self._keys:
            self._allocate(layer_id, k_BLNH)
        at = self._index(layer_id, self.depth)
        rows_R, rows_R1, slots_RQ, end, start = self._plan
        read = []
        for store, new_BLNH in ((self._keys, k_BLNH), (self._values, v_BLNH)):
            if start is None:
                store[layer_id][at:, rows_R1, :, slots_RQ] = new_BLNH[:, :, None]
            else:
                store[layer_id][at:, :, :, start:end] = new_BLNH.transpose(1, 2)
            held_BNKH = store[layer_id][at, :, :, :end]
            read.append(held_BNKH if rows_R is None else held_BNKH.index_select(0, rows_R))
        return read[0], read[1]

    def advance(self, counts: Sequence[int]) -> None:
        """Keep the first ``counts`` of each row's tokens just written; the others are dropped."""
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if min(counts) < 0 or max(lengths) > len(self._slots_T):
            raise ValueError(f"cannot advance rows of length {self.lengths} by {list(counts)}")
        self.lengths = lengths
        self._plan = None

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        if list(rows) == list(range(self.batch)):
            return
        index = torch.tensor(rows, device=self.device)
        for store in (self._keys, self._values):
            for layer_id, tensor in store.items():
                store[layer_id] = tensor.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]
        self._plan = None

    def _index(self, layer_id: int, depth: int) -> int:
        if not 1 <= depth <= self.depths:
            raise ValueError(f"depth {depth} is outside 1 to {self.depths}")
        return depth - 1 if layer_id in self.core else 0

    def _allocate(self, layer_id: int, like_BLNH: torch.Tensor) -> None:
        # Zeros: a slot that is masked out still takes part in a product with weight 0, and 0 * NaN is NaN.
        _, _, heads, width = like_BLNH.shape
        depths = self.depths if layer_id in self.core else 1
        shape = (depths, self.batch, heads, len(self._slots_T), width)
        self._keys[layer_id] = like_BLNH.new_zeros(shape)
        self._values[layer_id] = like_BLNH.new_zeros(shape)
