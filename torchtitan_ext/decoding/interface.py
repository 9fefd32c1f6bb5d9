"""What every decoder takes and gives, so that tools and evaluation need not know the method."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import nn

from torchtitan_ext import registry
from torchtitan_ext.decoding.sampling import SamplingParams
from torchtitan_ext.errors import UserError

FinishReason = Literal["stop", "length"]

OnToken = Callable[[int, int], bool | None]
"""Called with (row, token) for every new token in order; a true result ends the row there."""

OnStep = Callable[[int, int], None]
"""Called with (row, count) for every forward of a row that may settle several tokens: how many it did,
before their ``OnToken`` calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """One row."""

    tokens: list[int]
    """Prompt and new tokens."""

    new_tokens: list[int]
    """New tokens; a stop token that ended the row is the last of them."""

    finish_reason: FinishReason
    """``stop``: a stop token, or ``on_token`` ended the row; ``length``: max_new_tokens reached."""

    forwards: int
    """Forwards of the model that this row took part in; the prompt counts as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation(Sequence[GenerationResult]):
    """The rows in the order of the prompts, and what they cost together."""

    results: list[GenerationResult]
    """One result for each prompt."""

    forwards: int
    """Forwards of the whole batch."""

    seconds: float
    """Wall-clock time, the prompts included."""

    extra: dict[str, Any] = field(default_factory=dict)
    """What one decoder alone reports, such as a histogram of accepted lengths."""

    def __getitem__(self, index):  # type: ignore[override]
        return self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[GenerationResult]:
        return iter(self.results)

    @property
    def new_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(result.new_tokens) for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows in a second."""
        return self.new_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """New tokens for each row's forwards: 1 for plain autoregressive decoding."""
        forwards = sum(result.forwards for result in self.results)
        return self.new_tokens / forwards if forwards else 0.0


class Decoder(Protocol):
    """``decode`` of a method's ``decode.py``; a method may add keyword options with defaults."""

    def __call__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: SamplingParams = ...,
        stop_ids: Collection[int] = ...,
        bos_id: int | None = ...,
        on_token: OnToken | None = ...,
        max_len: int | None = ...,
        seeds: Sequence[int] | None = ...,
    ) -> Generation:
        """Continue every prompt by at most ``max_new_tokens`` tokens.

        ``stop_ids``: tokens that end a row. ``bos_id``: what an empty prompt starts from.
        ``max_len``: a limit on prompt and new tokens below the model's context.
        ``seeds``: one for each row, instead of ``sampling.seed`` + row.
        Errors: :class:`UserError` before the first forward for prompts that do not fit.
        """
        ...


def row_seeds(seeds: Sequence[int] | None, *, rows: int, sampling: SamplingParams) -> Sequence[int]:
    """The seed of each row: as given, else ``sampling.seed`` + row.

    Errors: another number of seeds than of rows.
    """
    if seeds is None:
        return [sampling.seed + row for row in range(rows)]
    if len(seeds) != rows:
        raise UserError(f"got {len(seeds)} seeds for {rows} prompts")
    return seeds


def check_mask_id(mask_id: int, *, vocab_size: int) -> None:
    """Errors: a mask token that the model's vocabulary does not have."""
    if not 0 <= mask_id < vocab_size:
        raise UserError(f"mask_id {mask_id} is outside the model's vocabulary of {vocab_size} tokens")


def decoder_for(method: str) -> Decoder:
    """The decoder of a method by name; torchtitan's own models decode as ``ar`` does.

    Errors: an unknown method, or one that has no decoder.
    """
    name = "ar" if registry.is_torchtitan_model(method) else method
    package = registry.method(name).__name__
    if importlib.util.find_spec(f"{package}.decode") is None:
        raise UserError(f"method {method!r} has no decoder (it lacks {package}.decode)")
    return importlib.import_module(f"{package}.decode").decode
