"""torchtitan's metrics processor with a method's own metrics beside the loss, and pictures.

The one place that knows TensorBoard's writer: of a run, and of an evaluation.
"""

import importlib.util
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor, TensorBoardLogger
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from torchtitan_ext import masks
from torchtitan_ext.attention import TiledMask
from torchtitan_ext.backbones import Backbone
from torchtitan_ext.errors import UserError
from torchtitan_ext.masks import Mask

MASK_TAG = "attention_mask"
"""Name of the picture of a run's attention mask."""

NOT_MEASURED = ("samples", "prompts", "shots")
"""Columns of tables that say how it was measured."""

EVALUATION = "evaluation"
"""Folder of the evaluations beside the runs' own in a TensorBoard folder."""


class ExtMetricsProcessor(MetricsProcessor):
    """Adds the objective's metrics to the log and to TensorBoard, and perplexity to validation."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        mask_picture_tokens: int = 64
        """With TensorBoard: data tokens, of the first batch, of which the attention mask is drawn once
        (64 is up to 128 in a doubled sequence); 0 draws none"""

        def __post_init__(self) -> None:
            if self.mask_picture_tokens < 0:
                raise UserError(
                    f"[metrics] mask_picture_tokens must be at least 0, got {self.mask_picture_tokens}"
                )

    config: Config
    _mask_is_drawn: bool = False

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

    # --- pictures ----------------------------------------------------------------------

    @property
    def writer(self) -> SummaryWriter | None:
        """TensorBoard's, on the ranks that have one."""
        if not isinstance(self.logger, LoggerContainer):
            return None
        own = (one for one in self.logger._loggers if isinstance(one, TensorBoardLogger))
        return next((one.writer for one in own), None)

    def show_mask(self, model: Any, positions_BL: torch.Tensor, *, data_length: int, step: int) -> None:
        """Draw the attention mask over the first tokens of the first batch, once in a run.

        ``positions_BL``: of a prepared batch; ``data_length``: tokens of a row before a method doubled it.
        """
        if self._mask_is_drawn:
            return
        self._mask_is_drawn = True
        writer, tokens = self.writer, self.config.mask_picture_tokens
        if writer is None or tokens == 0:
            return
        if importlib.util.find_spec("matplotlib") is None:
            logger.info("TensorBoard gets no picture of the mask: matplotlib is not installed")
            return
        from torchtitan_ext.planning.mask_picture import mask_figure  # needs rooms that import this one

        mask, parts = prefix_mask(model, positions_BL, data_length=data_length, tokens=tokens)
        if mask is None:
            return
        figure = mask_figure(
            mask,
            block=getattr(model.config, "block_size", None),
            title=f"the first {mask.q_len // parts} tokens of the first batch",
            labels=("clean", "mask") if parts == 2 else (),
        )
        figure.set_dpi(100)  # of a screen: the first step waits for it
        writer.add_image(MASK_TAG, _pixels(figure), step, dataformats="HWC")
        writer.flush()


def prefix_mask(
    model: Any, positions_BL: torch.Tensor, *, data_length: int, tokens: int
) -> tuple[Mask | None, int]:
    """The model's mask over the first tokens of the first row, and of how many parts its sequence is.

    None for a model without attention. ``tokens``: of each part.
    """
    config = model.config
    doubled = hasattr(config, "block_size") and positions_BL.shape[1] == 2 * data_length
    parts = 2 if doubled else 1
    first_1PL = positions_BL[:1].unflatten(1, (parts, -1))
    first_1L = first_1PL[..., :tokens].flatten(1).cpu()
    if not isinstance(model, Backbone):
        return (masks.causal_document(first_1L) if isinstance(model, Decoder) else None), parts
    kernel = config.attention
    config.attention = "dense"  # the rule does not depend on the kernel, which may need a GPU
    try:
        form = model.get_attention_masks(positions=first_1L)
    finally:
        config.attention = kernel
    length = first_1L.shape[1]
    allowed_QK = _whole(form, length)

    def mod(b, h, q_idx, kv_idx):
        return allowed_QK[q_idx, kv_idx]

    return Mask("first tokens", mod, first_1L, length, length), parts


def _whole(form: torch.Tensor | TiledMask, length: int) -> torch.Tensor:
    """A dense mask of one row as booleans [Q, K], from its tiles where it is in tiles."""
    if isinstance(form, torch.Tensor):
        return form[0, 0]
    allowed_QK = torch.zeros(length, length, dtype=torch.bool)
    for tile in form.tiles:
        keys = torch.cat([torch.arange(length)[part] for part in tile.keys])
        allowed_QK[tile.queries, keys] = tile.allowed_B1QK[0, 0]
    return allowed_QK


def _pixels(figure: Any) -> Any:
    """A matplotlib figure as [H, W, 3] bytes, without pyplot and its windows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


# --- evaluations -----------------------------------------------------------------------


def evaluation_folder(checkpoint: Path, given: str, *, folder: str = "tb") -> Path:
    """Where the numbers of a checkpoint's evaluations go.

    ``given``: what the user says; empty: the run's own TensorBoard ``folder`` beside its checkpoints.
    Errors: UserError for weights that lie in no run's folder, and for a file.
    """
    if given:
        base = Path(given)
    elif step_of(checkpoint) is None:
        raise UserError(f"{checkpoint} is no step-N of a run: give --tensorboard a folder")
    else:
        base = checkpoint.resolve().parent.parent / folder
    if base.exists() and not base.is_dir():
        raise UserError(f"--tensorboard {base} is a file, expected a folder")
    return base / EVALUATION


def step_of(checkpoint: Path) -> int | None:
    """The step of a ``step-N`` folder, None for another one."""
    match = re.fullmatch(r"step-(\d+)", checkpoint.resolve().name)
    return None if match is None else int(match.group(1))


def write_evaluation(
    folder: Path, *, step: int, scalars: Mapping[str, float], pictures: Mapping[str, Path]
) -> None:
    """Numbers and PNG files of one evaluation, at the checkpoint's step.

    Errors: UserError when the folder cannot be written.
    """
    try:
        with SummaryWriter(str(folder)) as writer:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)
            for name, path in pictures.items():
                writer.add_image(name, _read_png(path), step, dataformats="HWC")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error


def scalars_of(rows: Sequence[Mapping[str, Any]], *, names: Sequence[str], prefix: str) -> dict[str, float]:
    """The numbers of a table by tag: ``prefix``, the column, and the row by its columns ``names``.

    So TensorBoard shows a panel for each number of each row, over the steps of the checkpoints.
    """
    found: dict[str, float] = {}
    for row in rows:
        which = [f"{name}_{row[name]}" if _is_number(row[name]) else str(row[name]) for name in names]
        for column, value in row.items():
            if column not in (*names, *NOT_MEASURED) and _is_number(value):
                parts = (re.sub(r"[^-\w.]", "_", part) for part in (column, *which))
                found["/".join([prefix, *parts])] = float(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_png(path: Path) -> Any:
    """Pixels [H, W, 3]."""
    from PIL import Image  # matplotlib, which drew it, needs it too

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
