"""Warnings about sudden jumps of the loss and of the gradient norm."""

from __future__ import annotations

import math
import statistics
from collections import deque

from torchtitan.tools.logging import logger

WINDOW = 64
"""Steps whose median is the reference; a lasting change of level becomes the reference in half of it."""
FIRST = 16
"""Steps before the first comparison: a run starts with large losses that fall fast."""
QUIET = 100
"""Steps without another warning of the same series; how many events fell silent is said with the next."""


class SpikeWatch:
    """Warns once for each event, at its first step, when a series exceeds a multiple of its median."""

    def __init__(self, name: str, *, factor: float) -> None:
        self._name, self._factor = name, factor
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._inside = False
        self._silent = 0
        self._warned: int | None = None

    def see(self, step: int, value: float) -> str | None:
        """Take a step's value; the warning that was logged, if any."""
        if not self._factor or not math.isfinite(value):
            return None
        median = statistics.median(self._window) if len(self._window) >= FIRST else math.inf
        # A median of 0 or below (some objectives' losses) has no meaningful multiple.
        spike = 0 < median < math.inf and value > self._factor * median
        self._window.append(value)
        begins, self._inside = spike and not self._inside, spike
        if not begins:
            return None
        if self._warned is not None and step - self._warned < QUIET:
            self._silent += 1
            return None
        return self._warn(step, value, median)

    def _warn(self, step: int, value: float, median: float) -> str:
        also = f"; {self._silent} more since step {self._warned} were not reported" if self._silent else ""
        message = (
            f"step {step}: {self._name} spike: {value:.5g} is {value / median:.1f} times the median "
            f"{median:.5g} of the {len(self._window) - 1} steps before{also}"
        )
        logger.warning(message)
        self._warned, self._silent = step, 0
        return message
