"""When each token of a response was revealed, and how sure the model was of it."""

from __future__ import annotations

from typing import TypedDict


class Trace(TypedDict):
    """When each token of one response was revealed; plain data, as JSON takes it."""

    policy: str
    tau: float
    block_size: int
    prompt_tokens: int
    forwards: int
    """Forwards of this row (NFE)."""

    tokens: list[int | None]
    """The response; None where it was never revealed, behind a stop token."""

    steps: list[int | None]
    """The forward that revealed each token, counted from 1."""

    confidence: list[float | None]
    """Its probability in that forward."""


class Recorder:
    """What becomes of each place of one response; a place may be revealed once."""

    def __init__(self, length: int) -> None:
        self.tokens: list[int | None] = [None] * length
        self.steps: list[int | None] = [None] * length
        self.confidence: list[float | None] = [None] * length

    def reveal(self, place: int, token: int, *, step: int, confidence: float) -> None:
        """``place``: counted from the first token behind the prompt; those behind the end are left out."""
        if place >= len(self.tokens):
            return
        self.tokens[place], self.steps[place], self.confidence[place] = token, step, confidence

    def trace(self, *, policy: str, tau: float, block_size: int, prompt_tokens: int, forwards: int) -> Trace:
        """All of it as plain data."""
        return Trace(
            policy=policy,
            tau=tau,
            block_size=block_size,
            prompt_tokens=prompt_tokens,
            forwards=forwards,
            tokens=self.tokens,
            steps=self.steps,
            confidence=self.confidence,
        )
