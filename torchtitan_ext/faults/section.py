"""[faults]"""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True)
class FaultsSection:
    """[faults]"""

    non_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient norm that is NaN or infinite on any rank. Its batch never changes the weights.
    stop: the run ends with exit code 3. skip: weights and moments stay, data and LR schedule go on."""

    max_skipped: int = 10
    """With non_finite = "skip": batches in a row that may be skipped; one more ends the run (exit code 3).
    The count starts anew when a run is resumed."""

    spike_factor: float = 2.0
    """Warn when the loss of a step exceeds this many times the median of the steps before. 0: never."""

    grad_norm_spike_factor: float = 10.0
    """The same for the gradient norm, which varies more. 0: never."""

    def __post_init__(self) -> None:
        if self.non_finite not in ("stop", "skip"):
            raise ValueError(f"faults.non_finite must be 'stop' or 'skip', got {self.non_finite!r}")
        if self.max_skipped < 1:
            raise ValueError(f"faults.max_skipped must be at least 1, got {self.max_skipped}")
        for key in ("spike_factor", "grad_norm_spike_factor"):
            value = getattr(self, key)
            if not (value == 0 or value > 1):
                raise ValueError(f"faults.{key} must be 0 (off) or greater than 1, got {value}")
