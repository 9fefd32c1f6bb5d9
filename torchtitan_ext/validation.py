"""Validation on held-out data: the mean over all its tokens, the same on any number of ranks.

``[validation] steps`` ends it after so many batches of each rank, as in torchtitan: more ranks then
see more rows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.validate import Validator
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger

from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.metrics import ExtMetricsProcessor
from torchtitan_ext.objective import IGNORE_INDEX, Prepared, global_rows, merge_metrics, row_generators


class ExtValidator(Validator):
    """Runs a method's objective over a held-out split.

    Counts are summed over the whole split first, so the result is a mean over
    tokens and not a mean of batch means, and ranks may hold unequal numbers of
    batches.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        dataloader: DataLoader.Config = field(
            default_factory=lambda: DataLoader.Config(dataset="stdlib", split="validation", infinite=False)
        )
        """Held-out data; the same keys as [dataloader]."""

        def __post_init__(self) -> None:
            if self.steps != -1 and self.steps < 1:
                raise ValueError(f"validation.steps must be positive or -1 (all data), got {self.steps}")
            if self.freq < 1:
                raise ValueError(f"validation.freq must be at least 1, got {self.freq}")

    config: Config
    metrics_processor: ExtMetricsProcessor
    trainer: Any = None
    """The trainer, whose objective and masks are used; set after both are built."""

    def post_dataloading_process(self, input_dict, labels, model_parts):
        """Inputs of a pipeline-parallel evaluation, which stays torchtitan's own."""
        tokens, model_inputs, _ = self.trainer.model_inputs(input_dict)
        return tokens, labels, model_inputs

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the loss over the held-out split, a mean over all its tokens.

        A stop signal of any rank ends it at the next batch, on all ranks and without a result.
        """
        if self.parallel_dims.pp_enabled:
            super().validate(model_parts, step)
            return
        (model,) = model_parts
        model.eval()
        batches = self._prepare()
        counts = self.trainer.global_counts([b.counts for b in batches])
        total = torch.zeros((), dtype=torch.float64, device=self.trainer.device)
        metrics: dict[str, torch.Tensor] = {}
        for batch in batches:
            # All ranks have as many batches, so all of them ask.
            if self.trainer.stopper.asked():
                logger.info(f"Validation of step {step} is given up: a stop was asked.")
                model.train()
                return
            loss, own = self._loss(model, batch, counts)
            total += loss.double()
            merge_metrics(metrics, own)
        mesh = self.parallel_dims.get_optional_mesh("loss") if self.parallel_dims.dp_cp_enabled else None
        loss = dist_utils.dist_sum(total, mesh)
        self.metrics_processor.log_validation(loss=loss, step=step)
        if self.trainer.objective.perplexity:
            self.metrics_processor.log_perplexity(loss, step)
        reduced = self.trainer.reduced(metrics, microbatches=len(batches))
        self.metrics_processor.log_validation_metrics(reduced, step)
        model.train()

    def _loss(
        self, model: nn.Module, batch: Prepared, counts: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        device = self.trainer.device
        tokens, model_inputs, loss_inputs = self.trainer.model_inputs(
            {k: v.to(device) for k, v in batch.inputs.items()}
        )
        with self.validation_context():
            result = self.trainer.objective.loss(
                model,
                tokens,
                batch.labels.to(device),
                model_inputs=model_inputs,
                loss_inputs=loss_inputs,
                counts=counts,
                loss_fn=self.loss_fn,
            )
        if isinstance(model, FSDPModule):
            # A loss in chunks calls the head behind the model's forward, and no backward tells FSDP that
            # this was all: the next step would begin with the group of norm and head half run, and free
            # the norm's weight between two uses.
            model.reset_iter_state()
        return result

    def _prepare(self) -> list[Prepared]:
        """All prepared batches of this rank, filled up with empty ones to the longest rank's number."""
        loader = self.dl_config.build(
            dp_world_size=self.dp_world_size,
            dp_rank=self.dp_rank,
            tokenizer=self.tokenizer,
            seq_len=self.seq_len,
            local_batch_size=self.local_batch_size,
        )
        batches = []
        for inputs, labels in loader:
            self.metrics_processor.ntokens_since_last_log += labels.numel()
            batches.append(self._prepared(inputs, labels, index=len(batches)))
            if len(batches) == self.config.steps:
                break
        longest = torch.tensor(len(batches), device=self.trainer.device)
        if dist.is_initialized():
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        # Under FSDP every rank must run the same number of forwards.
        for index in range(len(batches), int(longest)):
            positions = torch.arange(self.seq_len).expand(self.local_batch_size, -1)
            empty = {"input": torch.zeros_like(positions), "positions": positions}
            batches.append(self._prepared(empty, torch.full_like(positions, IGNORE_INDEX), index=index))
        return batches

    def _prepared(self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, index: int) -> Prepared:
        # Step 0 belongs to validation alone: training counts from 1. The noise is the same every time.
        rows = global_rows(microbatch=index, size=len(labels), ranks=self.dp_world_size, rank=self.dp_rank)
        generators = row_generators(seed=self.trainer.config.debug.seed, step=0, rows=rows)
        return self.trainer.objective.prepare(inputs, labels, generator=generators)
