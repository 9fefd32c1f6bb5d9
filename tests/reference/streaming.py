"""Streaming decoding of WeDLM and ALoDLM: one token and one pass at a time, nothing kept between steps."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_ext.attention import CachedAttention
from torchtitan_ext.decoding.streaming import Rules
from torchtitan_ext.looped import LoopedBackbone


class Entries:
    """Keys and values by token, layer and depth, without any buffer: the look-up as it is defined."""

    def __init__(self, core: range) -> None:
        self.core = core
        self.held: list[dict[int, dict[int, tuple]]] = []
        self.token = self.depth = 0

    def update(self, layer_id, k_BLNH, v_BLNH):
        assert k_BLNH.shape[:2] == (1, 1)
        own = self.held[self.token].setdefault(layer_id, {})
        own[self.depth if layer_id in self.core else 1] = (k_BLNH[0, 0], v_BLNH[0, 0])
        seen = [self.read(token, layer_id, self.depth) for token in range(self.token + 1)]
        keys, values = (torch.stack(parts, dim=1)[None] for parts in zip(*seen, strict=True))
        return keys, values

    def read(self, token: int, layer_id: int, depth: int) -> tuple:
        """A token's entry at the depth if it has one, else its deepest."""
        by_depth = self.held[token][layer_id]
        return by_depth.get(depth) or by_depth[max(by_depth)]


class Twin:
    """One token and one pass at a time; every step computes everything from the text alone."""

    def __init__(self, model: Any, *, mask_id: int) -> None:
        self.model, self.config, self.mask_id = model, model.config, mask_id
        self.looped = isinstance(model, LoopedBackbone)
        self.count = self.config.passes if self.looped else 1
        self.core = range(self.config.start, self.config.end) if self.looped else range(0)

    def one(self, entries: Entries, token: int, depth: int, h: torch.Tensor, position: int):
        """A pass of one token, [1, 1, D] -> core output and readout."""
        entries.token, entries.depth = token, depth
        masks, positions = CachedAttention(entries, None), torch.tensor([[position]])
        if not self.looped:
            readout = self.model.hidden(h, positions, masks)
            return readout, readout
        if depth == 1:
            h = self.model.prelude(h, positions, masks)
        core = self.model.core.run(h, masks, positions)
        return core, self.model.coda(core, positions, masks)

    def text(self, tokens: list[int], depths: list[int]) -> Entries:
        """Entries of a causal text whose token i takes part in ``depths[i]`` passes."""
        entries = Entries(self.core)
        for i, (token, last) in enumerate(zip(tokens, depths, strict=True)):
            entries.held.append({})
            h = torch.tensor([[token]])
            for depth in range(1, last + 1):
                core, _ = self.one(entries, i, depth, h, i)
                h = self.model.carry(core) if depth < last else h
        return entries

    @torch.no_grad()
    def step(self, text, depths, window, rules: Rules, stop) -> tuple[int, list[int]]:
        """Fill slots of the window in place; passes made, and slots filled in order of passes."""
        entries, begin = self.text(text, depths), len(text)
        order = [i for i, t in enumerate(window) if t is not None]
        order += [i for i, t in enumerate(window) if t is None]
        entries.held += [{} for _ in order]
        inputs = {i: torch.tensor([[self.mask_id if window[i] is None else window[i]]]) for i in order}
        halted = dict.fromkeys(range(len(window)), 0.0)
        filled: dict[int, int] = {}
        for depth in range(1, self.count + 1):
            cores, readouts = {}, {}
            for at, i in enumerate(order):
                cores[i], readouts[i] = self.one(entries, begin + at, depth, inputs[i], begin + i)
            masked = [i for i, t in enumerate(window) if t is None]
            best, entropy = {}, {}
            for i in masked:
                logits = self.model.lm_head(readouts[i])[0, 0].double()
                logits[self.mask_id] = -math.inf
                best[i] = int(logits.argmax())
                p = logits.softmax(-1)
                entropy[i] = float(-(p * p.clamp_min(1e-300).log()).sum())
                entropy[i] += rules.position_penalty * (i - masked[0])
            if depth < self.count:
                for i in masked:
                    hazard = float(self.model.hazard(readouts[i], depth))
                    halted[i] += (1 - halted[i]) * hazard
            # Behind the first stop token, filled or likeliest, nothing is filled.
            ends_at = [i for i, t in enumerate(window) if (best[i] if t is None else t) in stop]
            masked = [i for i in masked if not ends_at or i <= ends_at[0]]
            now = [masked[0]] if rules.left1 else [i for i in masked if entropy[i] < rules.tau]
            for i in now:
                window[i] = filled[i] = best[i]
            rest = [i for i in masked if i not in now]
            known = window[: rest[0]] if rest else window
            ends = not rest or depth == self.count or any(t in stop for t in known)
            if depth < self.count:
                ends = ends or sum(halted[i] for i in rest) / len(rest) >= rules.q
            if ends:
                if not filled:
                    least = min(masked, key=lambda i: entropy[i])
                    window[least] = filled[least] = best[least]
                return depth, list(filled)
            for i in order:
                inputs[i] = self.model.carry(cores[i])
                if i in (filled if rules.feedback == "cumulative" else now):
                    inputs[i] = self.model.tok_embeddings(torch.tensor([[filled[i]]]))
        raise AssertionError

    def run(self, prompt: list[int], *, new: int, rules: Rules, stop=()) -> Trace:
        """Greedy decoding of one row."""
        trace = Trace(text=list(prompt), depths=[self.count] * len(prompt))
        window: list[int | None] = [None] * min(rules.window, new)
        made = len(window)
        while True:
            leading = next((i for i, t in enumerate(window) if t is None), len(window))
            fresh = min(leading, new - made)
            window, made = window + [None] * fresh, made + fresh
            passes, filled = self.step(trace.text, trace.depths, window, rules, set(stop))
            trace.steps.append(len(filled))
            trace.passes.append(passes)
            trace.widths.append(len(window))
            trace.text += window[:leading]
            trace.depths += [passes] * leading
            window = window[leading:]
            known = next((i for i, t in enumerate(window) if t is None), len(window))
            tokens = [*trace.text[len(prompt) :], *window[:known]]
            ends = [i for i, token in enumerate(tokens) if token in stop]
            trace.given.append(tokens[: ends[0] + 1] if ends else tokens)
            if ends or len(tokens) == new:
                return trace


@dataclass
class Trace:
    """What the twin did."""

    text: list[int]
    """Prompt and committed tokens."""

    depths: list[int]
    """Passes that each of them took part in."""

    steps: list[int] = dataclasses.field(default_factory=list)
    passes: list[int] = dataclasses.field(default_factory=list)
    widths: list[int] = dataclasses.field(default_factory=list)
    given: list[list[int]] = dataclasses.field(default_factory=list)
    """New tokens known after each step."""
