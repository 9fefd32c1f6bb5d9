"""What every decoder keeps of a row: its tokens, and where it ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torchtitan_ext.decoding.interface import FinishReason, GenerationResult, OnToken


@dataclass(kw_only=True, slots=True)
class Row:
    """A row while it is being generated."""

    index: int
    prompt: list[int]
    new: list[int] = field(default_factory=list)
    """New tokens that were given out."""

    finish: FinishReason | None = None

    def give(
        self, tokens: Iterable[int], *, on_token: OnToken | None, stop_ids: Collection[int], limit: int
    ) -> None:
        """Give out tokens in order, up to the one that ends the row.

        ``limit``: most new tokens. A stop token, or an ``on_token`` that says so, goes before it.
        """
        for token in tokens:
            self.new.append(token)
            ended = on_token is not None and bool(on_token(self.index, token))
            if ended or token in stop_ids:
                self.finish = "stop"
            elif len(self.new) == limit:
                self.finish = "length"
            if self.finish is not None:
                return

    def result(self, *, forwards: int) -> GenerationResult:
        """The finished row, which took part in ``forwards`` forwards."""
        assert self.finish is not None
        return GenerationResult(
            tokens=[*self.prompt, *self.new],
            new_tokens=self.new,
            finish_reason=self.finish,
            forwards=forwards,
        )
