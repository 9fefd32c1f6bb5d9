"""torchtitan's metrics processor with a method's own metrics beside the loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger


class ExtMetricsProcessor(MetricsProcessor):
    """Adds the objective's metrics to the log and to TensorBoard, and perplexity to validation."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    collect: Callable[[], dict[str, float]] | None = None
    """Returns the step's metrics reduced over ranks; set by the trainer, called on every rank."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """torchtitan's line and scalars of a step, and the objective's metrics."""
        own = self.collect() if self.collect is not None else {}
        if math.isnan(global_max_loss) and math.isfinite(global_avg_loss):
            # A rank without supervised tokens has no mean loss (0 / 0 in torchtitan's maximum).
            global_max_loss = global_avg_loss
        super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **own})
        if own:
            logger.info("step: %2d  %s", step, "  ".join(f"{k}: {v:.5g}" for k, v in own.items()))

    def log_skipped(self, step: int, skipped: int) -> None:
        """Log how many steps this start of the run has skipped; torchtitan logs nothing for such a step."""
        self.logger.log({"faults/skipped_steps": float(skipped)}, step)

    def log_validation_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Log the objective's metrics over the held-out split, such as the terms of its loss."""
        if not metrics:
            return
        self.logger.log({f"validation_metrics/{name}": value for name, value in metrics.items()}, step)
        logger.info("validate step: %2d  %s", step, "  ".join(f"{k}: {v:.5g}" for k, v in metrics.items()))

    def log_perplexity(self, loss: float, step: int) -> None:
        """Log the perplexity of a validation loss that is a mean negative log-likelihood."""
        perplexity = math.exp(loss) if loss < 700 else math.inf
        self.logger.log({"validation_metrics/perplexity": perplexity}, step)
        logger.info(f"validate step: {step:2}  loss: {loss:8.5f}  perplexity: {perplexity:.3f}")
