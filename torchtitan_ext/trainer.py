"""The one class that touches torchtitan's training loop.

It overrides hooks and calls ``super()``; the loop itself is torchtitan's.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, make_dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import tyro
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

import torchtitan_ext
from torchtitan_ext import attention, masks, models, registry, stopping
from torchtitan_ext import config as front
from torchtitan_ext.checkpoint.manager import ExtCheckpointManager
from torchtitan_ext.config.sections import (
    ActivationCheckpointSection,
    JobSection,
    ModelSection,
    OptimizerSection,
    TrainingSection,
)
from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError
from torchtitan_ext.faults import hang
from torchtitan_ext.faults.nonfinite import GuardedOptimizers, Layout, NonFiniteGuard, takes_found_inf
from torchtitan_ext.faults.section import FaultsSection
from torchtitan_ext.losses import LossSection
from torchtitan_ext.metrics import ExtMetricsProcessor
from torchtitan_ext.objective import Objective, global_rows, merge_metrics, row_generators
from torchtitan_ext.validation import ExtValidator


class ExtTrainer(Trainer):
    """torchtitan's trainer with an objective, per-term global counts and metrics."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's config with flat sections; a method adds a section of its own name."""

        dump_folder: Annotated[str, tyro.conf.Suppress] = "./outputs"
        hf_assets_path: Annotated[str, tyro.conf.Suppress] = ""
        override: Annotated[OverrideConfig, tyro.conf.Suppress] = field(default_factory=OverrideConfig)

        job: JobSection = field(default_factory=JobSection)
        model: ModelSection = field(default_factory=ModelSection)
        tokenizer: Tokenizer.Config = field(default_factory=Tokenizer.Config)
        dataloader: DataLoader.Config = field(default_factory=DataLoader.Config)
        # pyrefly: ignore[bad-override] - flat keys, the same build()
        optimizer: OptimizerSection = field(default_factory=OptimizerSection)
        training: TrainingSection = field(default_factory=TrainingSection)
        checkpoint: ExtCheckpointManager.Config = field(default_factory=ExtCheckpointManager.Config)
        # pyrefly: ignore[bad-override] - flat keys, the same build()
        activation_checkpoint: ActivationCheckpointSection = field(
            default_factory=ActivationCheckpointSection
        )
        metrics: ExtMetricsProcessor.Config = field(default_factory=ExtMetricsProcessor.Config)
        validator: ExtValidator.Config = field(default_factory=ExtValidator.Config)
        # pyrefly: ignore[bad-override] - the same build()
        loss: LossSection = field(default_factory=LossSection)
        faults: FaultsSection = field(default_factory=FaultsSection)

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)
            self.dump_folder = self.job.dump_folder
            self.hf_assets_path = self.model.hf_assets_path
            if self.debug.seed is None:
                # Corruption and initial weights are functions of the seed, so there always is one.
                self.debug.seed = 0
            if self.activation_checkpoint.mode == "memory_budget" and not (
                self.compile.enable and "model" in self.compile.components
            ):
                raise ValueError(
                    "activation_checkpoint.mode = 'memory_budget' needs compile.enable = true "
                    "with 'model' in compile.components"
                )
            self.loss.check(seq_len=self.training.seq_len)

    config: Config
    objective: Objective
    metrics_processor: ExtMetricsProcessor
    validator: ExtValidator
    checkpointer: ExtCheckpointManager
    model_config: Any
    _exhausted: bool = False
    _first_step: int | None = None
    """The first step of this start, whose collectives may take longer."""

    def __init__(self, config: Config) -> None:
        spec = models.build_spec(config)
        config.model_spec = spec
        vocabulary = getattr(spec.model, "vocab_size")  # noqa: B009 - every language model has one
        config.loss.global_vocab_size = vocabulary
        check_before_start(config, vocabulary=vocabulary)
        self.objective = models.build_objective(config)
        super().__init__(config)
        hold_last_rate(self.lr_schedulers, config)
        self.metrics_processor.collect = self._reduced_metrics
        self._begin_step()
        if config.validator.enable:
            self.validator.trainer = self
        if config.checkpoint.enable:
            rows = config.training.local_batch_size * self._batch_rank()[1]
            self.checkpointer.attach(config, global_batch=rows * self.gradient_accumulation_steps)
        self._add_guard()
        self.stopper = stopping.Stopper(stopping.REQUEST, timeout_s=config.comm.init_timeout_seconds)

    # --- one step, as the data sees it -------------------------------------------------

    def _begin_step(self) -> None:
        self._local_counts: list[dict[str, float]] = []
        self._data_tokens: list[int] = []
        self._counts: dict[str, torch.Tensor] | None = None
        self._step_metrics: dict[str, torch.Tensor] = {}

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        self._begin_step()
        self.guard.begin(self.step, microbatches=self.gradient_accumulation_steps)
        if not self.config.dataloader.infinite:
            data_iterator = self._whole_step(data_iterator)
        try:
            super().train_step(data_iterator)
        except RuntimeError:
            # torchtitan refuses to log a loss that is not finite, at the very end of the step.
            if not self.guard.was_skipped(self.step):
                raise

    # --- faults ------------------------------------------------------------------------

    def _add_guard(self) -> None:
        dims, world = self.parallel_dims, dist.get_world_size()
        layout = Layout(
            world=world,
            rank=dist.get_rank(),
            stages=dims.pp,
            loss_copies=dims.tp,
            has_loss=not dims.pp_enabled or self.pp_has_last_stage,
        )
        self.guard = NonFiniteGuard(
            self.config.faults,
            layout=layout,
            device=self.device,
            # Adam's kernel for bfloat16 moments is not known to leave them alone.
            on_device=self.config.optimizer.implementation == "fused"
            and takes_found_inf(self.optimizers, device=self.device),
            last_good=self._last_good,
            on_skip=self.metrics_processor.log_skipped,
        )
        guarded: Any = GuardedOptimizers(self.optimizers, self.guard)
        self.optimizers = guarded
        self.checkpointer.before_save = lambda: self.guard.before_save(self._parameters())

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for part in self.model_parts for p in part.parameters()]

    def _last_good(self) -> str:
        """The newest whole checkpoint, in words."""
        if not self.config.checkpoint.enable:
            return "none ([checkpoint] enable = false)"
        try:
            return str(self.checkpointer.newest_whole() or "none yet")
        except UserError as error:  # of a save under way; it must not hide why the run ends
            return f"see the checkpoint folder ({error})"

    def _place(self) -> hang.Place:
        comm = self.config.comm
        first = self._first_step is None or self.step <= self._first_step
        return hang.Place(self.step, comm.init_timeout_seconds if first else comm.train_timeout_seconds)

    def _whole_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """The step's microbatches, if every rank has all of its own.

        A rank that runs out of finite data alone would leave the others waiting
        in a collective.
        """
        count = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
        try:
            batches = [next(data_iterator) for _ in range(count)]
        except DataloaderExhaustedError:
            batches = []
        complete = torch.tensor(float(len(batches) == count), device=self.device)
        dist.all_reduce(complete, op=dist.ReduceOp.MIN)
        if not complete:
            self.step -= 1  # the cancelled step was not made
            self._exhausted = True
            raise DataloaderExhaustedError()
        return iter(batches)

    def train(self) -> None:
        """torchtitan's loop; says what a run that ends early was doing, and notes the run in run.json."""
        begin = time.perf_counter()
        try:
            with hang.explained(self._place, self.config.comm, self.config.dump_folder):
                super().train()
                self.guard.settle()
        except stopping.Stopped:
            self._note_run(time.perf_counter() - begin)
            raise
        self._note_run(time.perf_counter() - begin)
        if self._exhausted and self.step > 0:
            # torchtitan leaves its loop without saving when the data ends before the steps do.
            self.checkpointer.save(self.step, last_step=True)

    def should_continue_training(self) -> bool:
        """Whether steps are left; between two of them a stop signal of any rank ends the run."""
        if not super().should_continue_training():
            return False
        self.stopper.stop_if_asked(step=self.step, checkpointer=self.checkpointer)
        return True

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Microbatches prepared by the objective, before torchtitan counts their tokens."""
        self._save_config()
        self._first_step = self.step
        rank, ranks = self._batch_rank()
        for inputs, labels in super().batch_generator(data_iterable):
            microbatch = len(self._local_counts)
            rows = global_rows(microbatch=microbatch, size=len(labels), ranks=ranks, rank=rank)
            generators = row_generators(seed=self.config.debug.seed or 0, step=self.step, rows=rows)
            self._data_tokens.append(labels.numel())
            prepared = self.objective.prepare(inputs, labels, generator=generators)
            self._local_counts.append(prepared.counts)
            self.metrics_processor.show_mask(
                self.model_parts[0],
                prepared.inputs["positions"],
                data_length=labels.shape[1],
                step=self.step,
            )
            yield prepared.inputs, prepared.labels

    def _note_run(self, seconds: float) -> None:
        """What this start of the run did, for tools that compare runs: run.json in the dump folder."""
        if dist.get_rank() != 0:
            return
        note = {
            "step": self.step,
            "seconds": round(seconds, 3),
            "ranks": dist.get_world_size(),
            "tokens_seen_by_rank_0": self.ntokens_seen,
            "versions": {
                "torchtitan_ext": torchtitan_ext.__version__,
                "torch": torch.__version__,
                "torchtitan": metadata.version("torchtitan"),
            },
        }
        folder = Path(self.config.dump_folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").write_text(json.dumps(note, indent=2) + "\n")
        except OSError as error:  # a run that has ended or stopped well stays so
            logger.warning(f"{folder / 'run.json'} cannot be written: {error.strerror}")

    def _save_config(self) -> None:
        """The resolved config into the dump folder; after loading, so a refused run replaces nothing."""
        if dist.get_rank() == 0:
            front.save(self.config, Path(self.config.dump_folder) / "config.toml")

    def _batch_rank(self) -> tuple[int, int]:
        """This rank's place among the data-parallel ranks, and their number."""
        if not self.parallel_dims.dp_enabled:
            return 0, 1
        mesh = self.parallel_dims.get_mesh("batch")
        return mesh.get_local_rank(), mesh.size()

    def global_counts(self, local: list[dict[str, float]]) -> dict[str, torch.Tensor]:
        """Supervised tokens of every loss term over all microbatches and data-parallel ranks."""
        terms = self.objective.terms
        sums = [sum(counts[term] for counts in local) for term in terms]
        # float64: exact for token counts, and terms may count fractional weights.
        counts = torch.tensor(sums, dtype=torch.float64, device=self.device)
        if self.parallel_dims.dp_enabled:
            counts = dist_utils.dist_sum_tensor(counts, self.parallel_dims.get_mesh("batch"))
        return {term: count.float() for term, count in zip(terms, counts, strict=True)}

    def model_inputs(
        self, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any], dict[str, torch.Tensor]]:
        """Split a prepared batch into tokens, the model's other inputs with masks, and the loss's."""
        loss_inputs = {k: inputs[k] for k in self.objective.loss_inputs}
        rest = {k: v for k, v in inputs.items() if k != "input" and k not in loss_inputs}
        rest["attention_masks"] = self._attention_masks(inputs["positions"])
        return inputs["input"], rest, loss_inputs

    def _attention_masks(self, positions: torch.Tensor) -> Any:
        backend = attention.backend_of(self.model_config.first_attention.inner_attention)
        model: Any = self.model_parts[0]
        if backend is not None and self.config.model.name in models.TORCHTITAN_MODELS:
            # torchtitan's own model with this project's attention put in.
            return attention.build_mask(masks.causal_document(positions), backend)
        return model.get_attention_masks(positions=positions)

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Tokens, labels and the model's other inputs, with masks; the loss's under "loss_inputs"."""
        loss_inputs = {k: input_dict.pop(k) for k in self.objective.loss_inputs}
        seen = self.ntokens_seen
        tokens, labels, kwargs = super().post_dataloading_process(input_dict, labels)
        # Each data token counts once, whatever the method made of it.
        self.ntokens_seen = seen + self._data_tokens.pop(0)
        if "attention_masks" not in kwargs:  # torchtitan builds masks for flex and varlen alone
            kwargs["attention_masks"] = self._attention_masks(kwargs["positions"])
        if loss_inputs:
            kwargs["loss_inputs"] = loss_inputs
        return tokens, labels, kwargs

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens) -> torch.Tensor:
        if self._counts is None:  # all microbatches of the step have been fetched by now
            self._counts = self.global_counts(self._local_counts)
        loss = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        self.guard.after_backward(loss, self._parameters())
        return loss

    def _forward_backward_body(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
        extra_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        assert self._counts is not None
        loss_inputs = extra_kwargs.pop("loss_inputs", {})
        with self.train_context():
            loss, metrics = self.objective.loss(
                self.model_parts[0],
                inputs,
                labels,
                model_inputs=extra_kwargs,
                loss_inputs=loss_inputs,
                counts=self._counts,
                loss_fn=self.loss_fn,
            )
            with spmd.no_typecheck():
                loss.backward()
        merge_metrics(self._step_metrics, metrics)
        return loss

    def _reduced_metrics(self) -> dict[str, float]:
        """The step's metrics; called on every rank."""
        own = self.reduced(self._step_metrics, microbatches=len(self._local_counts))
        if self.config.faults.non_finite == "skip":
            self.guard.settle()
            own["faults/skipped_steps"] = float(self.guard.skipped)
        return own

    def reduced(self, metrics: dict[str, torch.Tensor], *, microbatches: int) -> dict[str, float]:
        """Merged metrics of this rank's microbatches, reduced over data-parallel ranks."""
        dims = self.parallel_dims
        mesh = dims.get_optional_mesh("loss") if dims.dp_cp_enabled else None
        reduced = {}
        for name in sorted(metrics):
            value = metrics[name]
            if name.endswith("/max"):
                reduced[name] = dist_utils.dist_max(value, mesh)
            elif name.endswith("/min"):
                reduced[name] = -dist_utils.dist_max(-value, mesh)
            else:
                reduced[name] = dist_utils.dist_sum(value, mesh)
            if name.endswith("/mean"):
                reduced[name] /= microbatches * (mesh.size() if mesh is not None else 1)
        return reduced


def hold_last_rate(schedulers: Any, config: ExtTrainer.Config) -> None:
    """After the end of its schedule a run keeps the last learning rate, lr * min_lr_factor where it decays.

    torchtitan's functions go on: the linear one below zero, with which every step undoes what was
    learned, the cosine up again. So would a finished run that is extended under its own total_steps.
    """
    total = config.lr_scheduler.total_steps
    if total is None:
        return
    if total < config.training.steps:
        logger.warning(
            f"[lr_scheduler] total_steps = {total} is less than [training] steps = {config.training.steps}: "
            f"from step {total + 1} on the learning rate stays what the schedule ends with"
        )
    for scheduler in schedulers:
        scheduler.lr_lambdas = [
            lambda step, rate=rate: rate(min(step, total)) for rate in scheduler.lr_lambdas
        ]


def check_before_start(config: ExtTrainer.Config, *, vocabulary: int) -> None:
    """Errors that are known before anything is built.

    Raises:
        UserError: degrees that do not multiply to the world size, a batch that
            does not divide, no tokenizer where it should be, one larger than the model's vocabulary.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    p, t = config.parallelism, config.training
    model_degree = p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree
    fixed = p.data_parallel_replicate_degree * model_degree
    shard = p.data_parallel_shard_degree if p.data_parallel_shard_degree > 0 else max(world // fixed, 1)
    if fixed * shard != world:
        raise UserError(
            f"[parallelism] degrees do not multiply to the world size: replicate "
            f"{p.data_parallel_replicate_degree} x shard {shard} x tensor {p.tensor_parallel_degree} x "
            f"pipeline {p.pipeline_parallel_degree} x context {p.context_parallel_degree} = {fixed * shard}, "
            f"got {world} processes"
        )
    per_pass = t.local_batch_size * p.data_parallel_replicate_degree * shard
    if t.global_batch_size > 0 and t.global_batch_size % per_pass:
        raise UserError(
            f"[training] global_batch_size = {t.global_batch_size} must be a multiple of local_batch_size "
            f"x data-parallel ranks = {t.local_batch_size} x {per_pass // t.local_batch_size} = {per_pass}"
        )
    assets = config.hf_assets_path
    if assets and config.tokenizer.kind == "auto" and not Path(assets).exists():
        # Bytes are what it takes where nothing is; a typo, or a start in another folder, is not meant so.
        raise UserError(
            f"[model] hf_assets_path = {assets!r} is not there, seen from {Path.cwd()} "
            "([tokenizer] kind = 'byte' reads text as bytes)"
        )
    tokenizer = config.tokenizer.build(tokenizer_path=assets)
    if tokenizer.get_vocab_size() > vocabulary:
        raise UserError(
            f"the tokenizer has {tokenizer.get_vocab_size()} tokens but [model] flavor = "
            f"{config.model.flavor!r} has a vocabulary of {vocabulary}"
        )


def default_config(model: dict[str, Any]) -> ExtTrainer.Config:
    """The default config for a ``[model]`` section: the method's own section is part of it.

    Raises:
        UserError: unknown method.
    """
    name = model.get("name", ModelSection().name)
    cls: type[ExtTrainer.Config] = ExtTrainer.Config
    if not registry.is_torchtitan_model(name):
        section = getattr(registry.method(name), "Section", None)
        if section is not None:
            own = (name, section, field(default_factory=section))
            cls = make_dataclass("Config", [own], bases=(cls,), kw_only=True, slots=True)
    config = cls(model=ModelSection(name=name))
    if not registry.is_torchtitan_model(name):
        config.optimizer.no_weight_decay = list(getattr(registry.method(name), "NO_WEIGHT_DECAY", ()))
    return config
