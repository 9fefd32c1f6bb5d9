"""One training step of a config as one rank of its cluster runs it, on fake tensors.

It is the trainer's own step: the same model, parallelisation, objective, gradient clipping and
optimizer, in a process group that communicates nothing. Nothing is computed and nothing large is
allocated, but every operation is seen (:mod:`torchtitan_ext.planning.tracker`).
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils

from torchtitan_ext import models
from torchtitan_ext.attention.flex import BLOCK
from torchtitan_ext.objective import IGNORE_INDEX, row_generators
from torchtitan_ext.planning import kernel
from torchtitan_ext.planning import tracker as tracking
from torchtitan_ext.planning.tracker import Message, Segment, StepTracker, Work
from torchtitan_ext.trainer import ExtTrainer

MICROBATCH, UPDATE = "microbatch", "step"
"""Phases of a step: forward and backward of each microbatch, and what is done once."""

AXES = ("dp_replicate", "dp_shard", "tp", "batch", "loss", "fsdp", "dp")
"""Mesh axes that a process group may be."""


@dataclass(kw_only=True)
class Step:
    """What one rank does in a step with one microbatch; gradients exist before it if it accumulates."""

    segments: list[Segment]
    messages: list[Message]
    work: dict[str, Work]
    """By phase."""

    groups: dict[str, tuple[str, tuple[int, ...]]]
    """Process group -> its mesh axis and its ranks."""


@contextlib.contextmanager
def fake_world(size: int) -> Generator[None]:
    """This process as rank 0 of ``size`` that are not there."""
    threads = torch.autograd.is_multithreading_enabled()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    # As torchtitan's own initialisation: the backward must see the mesh of this thread.
    torch.autograd.set_multithreading_enabled(False)
    # Specs of DTensors are cached by a mesh's shape, and would bring back the mesh of an earlier world.
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        _DIMS.clear()
        torch.autograd.set_multithreading_enabled(threads)
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


_DIMS: dict[str, ParallelDims] = {}
"""The meshes of this world by the degrees; all its steps share them, and what DTensor remembers of them."""


def _dims(config: Any, world: int) -> ParallelDims:
    key = f"{world} {config.parallelism}"
    if key not in _DIMS:
        _DIMS[key] = ParallelDims.from_config(config.parallelism, world)
        _DIMS[key].build_mesh()
    return _DIMS[key]


def synthetic_rows(config: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch as the loader gives it: each row one document, every token supervised.

    Tokens are zeros and ones: of the numbers of a step none depends on them.
    """
    batch, length = config.training.local_batch_size, config.training.seq_len
    tokens = torch.arange(length).expand(batch, -1) % 2
    labels = torch.cat([tokens[:, 1:], torch.full((batch, 1), IGNORE_INDEX)], dim=1)
    if config.model.name == "tdlm":
        # A response of as many steps as tokens, after a prompt of one token.
        labels = torch.arange(length).expand(batch, -1).clone()
        labels[:, 0] = IGNORE_INDEX
    positions = torch.arange(length).expand(batch, -1).contiguous()
    return {"input": tokens.contiguous(), "positions": positions}, labels


class PlannedTrainer(ExtTrainer):
    """The trainer without its surroundings: no data, no logger, no checkpoints, fake tensors."""

    def __init__(self, config: Any, spec: Any, *, world: int, stand_in: str | None, chunks: bool) -> None:
        self.config, self.stand_in = config, stand_in
        # How an LSTM's steps are packed depends on numbers; such models are small and really run.
        real = not hasattr(spec.model, "layers")
        self.fake = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        self.tracker = StepTracker(fake=self.fake)
        self.device = torch.device("cpu")
        self.step, self.ntokens_seen = 2, 0
        self.parallel_dims = _dims(config, world)
        dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
        self.objective = models.build_objective(config)
        self.model_config = spec.model
        spec.model.update_from_config(config=config)
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            model = spec.model.build()
        self.loss_fn = config.loss.build(compile_config=config.compile)
        model = spec.parallelize_fn(
            model,
            parallel_dims=self.parallel_dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="",
        )
        with self._mode():
            model.to_empty(device="cpu")
        if getattr(model, "enable_weight_tying", False):  # as the decoder's init_states
            model.tok_embeddings.weight = model.lm_head.weight
        model.train()
        self.model_parts = [model]
        self.head_called_by_chunks = False
        self._expects_chunks, self._heads = chunks, 0
        if isinstance(self.loss_fn, ChunkedLossWrapper):
            self.loss_fn.set_lm_head(model.lm_head)
            model._skip_lm_head = True
            self._watch_chunks()
        if (chunks or self.objective.chunked_head) and isinstance(model.lm_head, FSDPModule):
            # FSDP's state of the head as the chunked loss of the step before has left it.
            model.lm_head.set_reshard_after_forward(True)
            model.lm_head.set_reshard_after_backward(True)
        self.optimizers = config.optimizer.build(model_parts=[model])
        self.train_context = dist_utils.get_spmd_context(parallel_dims=self.parallel_dims)
        self.gradient_accumulation_steps, self.num_pipeline_parallel_microbatches = 1, 1
        self.fwd_bwd_fn = self._forward_backward_body
        nothing = lambda *args, **kwargs: None  # noqa: E731
        self.lr_schedulers = SimpleNamespace(get_metrics=dict, step=nothing)  # pyrefly: ignore
        self.metrics_processor = SimpleNamespace(  # pyrefly: ignore
            should_log=lambda step: False, log_skipped=nothing
        )
        self.checkpointer = SimpleNamespace(maybe_wait_for_staging=nothing)  # pyrefly: ignore
        self._add_guard()
        # As on a GPU, where the device decides; and the numbers that it would wait for are not there.
        self.guard._on_device = True
        self.guard.settle = nothing

    def _watch_chunks(self) -> None:
        """Notice when the run's own chunked loss is called."""
        token_loss = self.loss_fn.loss_fn  # pyrefly: ignore[missing-attribute]

        def noticed(*args: Any, **kwargs: Any) -> Any:
            self.head_called_by_chunks = True
            return token_loss(*args, **kwargs)

        self.loss_fn.loss_fn = noticed  # pyrefly: ignore[missing-attribute]

    def rows(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """The synthetic batch, prepared by the objective as rank 0 prepares its first."""
        inputs, labels = synthetic_rows(self.config)
        rows = range(len(labels))
        generator = row_generators(seed=self.config.debug.seed or 0, step=self.step, rows=rows)
        self._data_tokens.append(labels.numel())
        prepared = self.objective.prepare(inputs, labels, generator=generator)
        self._local_counts.append(prepared.counts)
        yield prepared.inputs, prepared.labels

    def planned_step(self, *, accumulates: bool) -> Step:
        """One step, gradient clipping and update included."""
        model, tracker = self.model_parts[0], self.tracker
        self._first_update()
        if accumulates:
            self._hold_gradients()
            self.optimizers.zero_grad = lambda *args, **kwargs: None
        self._mark_blocks(model)
        with tracker:
            self._note_states()
            self._begin_step()
            # The trainer's own, without what ExtTrainer does for finite data.
            super(ExtTrainer, self).train_step(self.rows())
        return Step(
            segments=tracker.segments(),
            messages=tracker.messages,
            work=dict(tracker.work),
            groups=self._groups(),
        )

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model_parts[0].parameters() if p.requires_grad]

    def _hold_gradients(self) -> None:
        with self._mode():
            for parameter in self._trained():
                parameter.grad = torch.zeros_like(parameter)

    def _first_update(self) -> None:
        """Optimizer states are there from the second step on."""
        self._hold_gradients()
        with self._mode():
            self.optimizers.step()
        for parameter in self._trained():
            parameter.grad = None

    def _note_states(self) -> None:
        model, note = self.model_parts[0], self.tracker.note
        for parameter in model.parameters():
            note(parameter.data, tracking.PARAMETERS)
            if parameter.grad is not None:
                note(parameter.grad, tracking.GRADIENTS)
        for buffer in model.buffers():
            note(buffer, tracking.BUFFERS)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        note(value, tracking.OPTIMIZER)

    def _note_gradients(self) -> None:
        for parameter in self._trained():
            if parameter.grad is not None:
                self.tracker.note(parameter.grad, tracking.GRADIENTS)

    def _mark_blocks(self, model: Any) -> None:
        """Segments begin with each block's forward and backward, and with the head's."""
        tracker = self.tracker
        for container in getattr(model, "containers", [model]):
            for index, block in container.layers.items():
                own = int(index)

                def begin(module: Any, args: Any, own: int = own) -> None:
                    tracker.part = "blocks"
                    tracker.mark("forward", own)

                def end(module: Any, args: Any, out: Any, own: int = own) -> None:
                    if isinstance(out, torch.Tensor) and out.requires_grad:
                        out.register_hook(lambda _: tracker.mark("backward", own))

                block.register_forward_pre_hook(begin)
                block.register_forward_hook(end)

        def head(module: Any, args: Any) -> None:
            self._heads += 1
            # The chunked loss calls its token loss after each chunk.
            if self._expects_chunks and self._heads == 2 and not self.head_called_by_chunks:
                raise _CutByObjective
            tracker.part = "head"
            tracker.mark("head")
            if args[0].requires_grad:
                args[0].register_hook(leave_head)

        def leave_head(_: Any) -> None:
            tracker.part = "blocks"
            tracker.mark("backward", "head")

        model.lm_head.register_forward_pre_hook(head)

    # --- hooks of the trainer ----------------------------------------------------------

    def _attention_masks(self, positions: torch.Tensor) -> Any:
        if self.stand_in is None:
            return super()._attention_masks(positions)
        if self.stand_in != "flex":
            return None
        # A block mask holds, for queries and for keys, how many blocks of either kind there are and which.
        blocks = -(-positions.shape[1] // BLOCK)
        with self._mode():
            return torch.empty(positions.shape[0], 4, blocks, blocks + 1, dtype=torch.int32)

    def _forward_backward_body(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
        extra_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        faked = tree_map_only(torch.Tensor, self._faked, (inputs, labels, global_valid_tokens, extra_kwargs))
        self._counts = tree_map_only(torch.Tensor, self._faked, self._counts)
        self.tracker.phase = MICROBATCH
        with self._mode():
            loss = super()._forward_backward_body(*faked)
        self.tracker.phase = UPDATE
        self._note_gradients()
        self.tracker.part = "blocks"
        self.tracker.mark("update")
        return loss

    def _mode(self) -> Any:
        return self.fake if self.fake is not None else contextlib.nullcontext()

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = tensor if self.fake is None else self.fake.from_tensor(tensor)
        if fake is not tensor and spmd.runtime.has_local_type(tensor):
            spmd.assert_type(fake, spmd.runtime.get_local_type(tensor))
        self.tracker.note(fake, tracking.INPUTS)
        return fake

    # --- groups ------------------------------------------------------------------------

    def _groups(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Mesh axis and ranks of every group that was used."""
        known: dict[str, str] = {}
        for axis in AXES:
            with contextlib.suppress(ValueError, KeyError, RuntimeError):
                mesh = self.parallel_dims.get_optional_mesh(axis)
                if mesh is not None and mesh.ndim == 1:
                    known.setdefault(mesh.get_group().group_name, axis)
        resolve: Any = dist.distributed_c10d._resolve_process_group
        found = {}
        for name in {message.group for message in self.tracker.messages}:
            ranks = tuple(dist.get_process_group_ranks(resolve(name)))
            found[name] = (known.get(name, f"{len(ranks)} ranks"), ranks)
        return found


def measure(config: Any, spec: Any, *, world: int, accumulates: bool = False, stand_in: str | None) -> Step:
    """One step of a config on ``world`` ranks, whose model is ``spec``'s; both are left as they are.

    ``stand_in``: the GPU kernel ("flex" or "varlen") whose memory attention takes; None runs the
    dense attention as it is. Call it inside :func:`fake_world`.
    """
    config = copy.deepcopy(config)
    config.compile.enable = False

    def run(chunks: bool) -> tuple[Step, bool]:
        own = copy.deepcopy(spec)
        if stand_in is not None:
            kernel.put_in(own.model, pad_to=BLOCK if stand_in == "flex" else 1)
        trainer = PlannedTrainer(config, own, world=world, stand_in=stand_in, chunks=chunks)
        return trainer.planned_step(accumulates=accumulates), trainer.head_called_by_chunks

    objective = type(models.build_objective(config))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
        chunked = config.loss.num_chunks > 1 and objective not in _CUTS_ITSELF
        with contextlib.suppress(_CutByObjective):  # known in the forward, which saves the backward
            step, called = run(chunked)
            if called == chunked:
                return step
        _CUTS_ITSELF.add(objective)
        return run(False)[0]


class _CutByObjective(Exception):
    """The objective passes the head by chunks itself, so the step was begun with a wrong assumption."""


_CUTS_ITSELF: set[type] = set()
"""Objectives that were seen to pass the head by chunks without torchtitan's chunked loss."""
