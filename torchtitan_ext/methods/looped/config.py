"""The TOML section [looped]."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True)
class Section:
    """More computation for each token, without temporal recurrence."""

    kind: Literal["middle", "full", "pause", "lstm"] = "middle"
    """"middle": a band of layers runs several times; "full": all layers do; "pause": each token is
    followed by pause tokens; "lstm": an LSTM, which takes from the flavor its vocabulary alone."""

    start: int = 0
    """First layer of the looped band, 1-based as in the paper; must be given for "middle" alone."""

    end: int = 0
    """Last layer of the band, inclusive; must be given for "middle" alone."""

    loops: int = 2
    """How often the core runs; 1 is the backbone."""

    pause_tokens: int = 1
    """Pause tokens after each token; 1 doubles the sequence and the computation."""

    pause_token_id: int = -1
    """Row of the embedding that all pause tokens share; -1 takes the last one of the vocabulary. An id
    that the tokenizer uses for text, or as BOS, EOS or padding, is refused."""

    core_sharding: Literal["unit", "layer"] = "unit"
    """One FSDP unit for the whole core, or one a layer for cores too large to be gathered at once."""

    lstm_layers: int = 4
    """Layers of the LSTM."""

    lstm_hidden: int = 456
    """Width of the LSTM's states and of its embedding."""

    def __post_init__(self) -> None:
        for name in ("loops", "pause_tokens", "lstm_layers", "lstm_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"looped.{name} must be at least 1, got {getattr(self, name)}")
        if self.pause_token_id < -1:
            raise ValueError(
                f"looped.pause_token_id must be an id, or -1 for the last row, got {self.pause_token_id}"
            )
        if self.kind != "middle" and (self.start or self.end):
            raise ValueError(
                f"looped.start = {self.start}, end = {self.end} belong to looped.kind = 'middle', "
                f"got kind = {self.kind!r}"
            )
