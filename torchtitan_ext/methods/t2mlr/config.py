"""The TOML section [t2mlr]."""

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True, slots=True)
class Section:
    """Temporal middle-layer recurrence."""

    start: int = 0
    """First layer of the recurrent band, 1-based as in the paper; must be given."""

    end: int = 0
    """Last layer of the band, inclusive; must be given."""

    forward_depth: int = 16
    """Jacobi iterates, D_f: the core runs D_f + 1 times. D_f >= sequence length is exact recurrence."""

    backward_depth: int = 4
    """How many of the last iterates carry gradient, D_b."""

    gate_features: Literal["raw", "projected"] = "raw"
    """What the gates see: [h, R] (the paper) or [h, W_rec R] (the public code)."""

    cache_norm: Literal["rmsnorm", "clamped"] = "rmsnorm"
    """Norm of the cache, Eq. 2.4: without weight (the paper), or clamped rescaling (the public code)."""

    temporal_residual: bool = True
    """Add the previous token's cache before the norm; false drops the sum and the norm (paper, B.1)."""

    convergence_tol: float = 0.0
    """Leave the iterates without gradient once the largest relative change is below this; 0 is off."""

    core_sharding: Literal["unit", "layer"] = "unit"
    """One FSDP unit for the whole core, or one a layer for cores too large to be gathered at once."""

    def __post_init__(self) -> None:
        if self.forward_depth < 1:
            raise ValueError(f"t2mlr.forward_depth must be at least 1, got {self.forward_depth}")
        if not 0 <= self.backward_depth <= self.forward_depth:
            raise ValueError(
                f"t2mlr.backward_depth must be between 0 and forward_depth = {self.forward_depth}, "
                f"got {self.backward_depth}"
            )
        if self.convergence_tol < 0:
            raise ValueError(f"t2mlr.convergence_tol must not be negative, got {self.convergence_tol}")
        if self.convergence_tol > 0 and self.core_sharding == "layer":
            raise ValueError(
                "t2mlr.convergence_tol needs t2mlr.core_sharding = 'unit': with one FSDP unit a layer, "
                "ranks that leave the loop early would leave the others waiting"
            )
