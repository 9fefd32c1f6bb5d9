"""Colours that show which text came out of one forward of the model."""

from __future__ import annotations

import os
from typing import IO, Literal

Colour = Literal["auto", "always", "never"]

ALTERNATING = ("\x1b[36m", "\x1b[35m")
"""Cyan and magenta can be read on dark and on light terminals."""

RESET = "\x1b[0m"


def wanted(choice: Colour, stream: IO[str]) -> bool:
    """Whether to colour what goes to ``stream``.

    ``auto``: on a terminal that can, unless the environment sets NO_COLOR; the other two overrule that.
    """
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class StepPainter:
    """Colours the text of one row: all of a step alike, and unlike that of the step shown before.

    Steps that show nothing do not count, so neighbours always differ.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._step = 0
        self._shown: int | None = None
        self._colour = 0

    def step(self) -> None:
        """The text that follows comes from another forward."""
        self._step += 1

    def paint(self, text: str) -> str:
        """The text as it is to be printed; it leaves no colour behind."""
        if not (self._enabled and text):
            return text
        if self._shown is not None and self._shown != self._step:
            self._colour = 1 - self._colour
        self._shown = self._step
        return f"{ALTERNATING[self._colour]}{text}{RESET}"
