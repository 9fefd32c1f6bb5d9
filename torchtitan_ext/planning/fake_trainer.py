"""The trainer on tensors without data: what :mod:`torchtitan_ext.planning.fake_run` builds and runs."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import spmd_types as spmd
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from torchtitan_ext import attention, masks, models
from torchtitan_ext.attention.flex import BLOCK
from torchtitan_ext.planning import kernel
from torchtitan_ext.planning import tracker as tracking
from torchtitan_ext.planning.step import synthetic_rows
from torchtitan_ext.trainer import ExtTrainer


class _OnGPU(Trainer):
    """Comes between :class:`ExtTrainer` and torchtitan's trainer: the model as a GPU would get it."""

    kernel: str
    """[model] attention."""

    mode: FakeTensorMode

    def __init__(self, config: ExtTrainer.Config) -> None:
        config.model.attention = self.kernel  # pyrefly: ignore[bad-assignment]
        spec = models.build_spec(config, device_type="cuda")
        kernel.put_in(spec.model, pad_to=1 if self.kernel == "varlen" else BLOCK)
        config.model_spec = _without_data(spec, self.mode)
        # From here on only torchtitan asks for data; the objective has seen where the run's are.
        config.dataloader = FakeRows.Config(method=config.model.name)  # pyrefly: ignore[bad-assignment]
        super().__init__(config)


class FakeTrainer(ExtTrainer, _OnGPU):
    """The trainer whose parameters have no data, and which logs and saves nothing.

    It is built and makes its step as any other. Meshes, counts and the prepared batch are real;
    :attr:`mode` is on where the model's tensors are made and where it runs.
    """

    def __init__(self, config: ExtTrainer.Config) -> None:
        # What a GPU computes with its own kernel, "dense" included, which has tiles by the documents.
        self.kernel = "varlen" if config.model.attention == "varlen" else "flex"
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.tracker = tracking.StepTracker(fake=self.mode)
        self.shapes: dict[str, tuple[int, ...]] = {}
        config.model.attention = "auto"  # for what is built before _OnGPU
        super().__init__(config)

    def _add_guard(self) -> None:
        """Numbers that are not there cannot be checked."""
        self.guard = _NoGuard()  # pyrefly: ignore[bad-assignment]

    def _save_config(self) -> None:
        """Nothing is written."""

    def _attention_masks(self, positions: torch.Tensor) -> Any:
        if self.kernel == "varlen":  # the kernel's form depends on the documents
            return super()._attention_masks(positions)
        with self.mode:
            positions = self.mode.from_tensor(positions)
            if self.config.model.name in models.TORCHTITAN_MODELS:
                return attention.build_mask(masks.causal_document(positions), "flex")
            return super()._attention_masks(positions)

    def _forward_backward_body(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
        extra_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        named = {"input": inputs, **extra_kwargs, **extra_kwargs.get("loss_inputs", {}), "labels": labels}
        self.shapes = {k: tuple(v.shape) for k, v in named.items() if isinstance(v, torch.Tensor)}
        given = (inputs, labels, global_valid_tokens, extra_kwargs)
        inputs, labels, global_valid_tokens, extra_kwargs = tree_map_only(torch.Tensor, self._fake, given)
        self._counts = tree_map_only(torch.Tensor, self._fake, self._counts)
        with self.mode:
            loss = super()._forward_backward_body(inputs, labels, global_valid_tokens, extra_kwargs)
        self.note((p.grad for p in self.parameters()), tracking.GRADIENTS)
        return loss

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without its data, in the tracker's books as an input."""
        fake = self.mode.from_tensor(tensor)
        if spmd.runtime.has_local_type(tensor):
            spmd.assert_type(fake, spmd.runtime.get_local_type(tensor))
        self.note([fake], tracking.INPUTS)
        return fake

    def parameters(self) -> list[torch.nn.Parameter]:
        """Of all parts of the model."""
        return [p for part in self.model_parts for p in part.parameters()]

    def note(self, tensors: Iterable[torch.Tensor | None], label: str) -> None:
        """Tell the tracker what these are."""
        for tensor in tensors:
            if tensor is not None:
                self.tracker.note(tensor, label)

    def later_step(self) -> None:
        """A step that is not the first, with one microbatch that is not the first either, tracked.

        The optimizer's states are there before it, and with more microbatches the gradient of those
        before: at no time of a run is more memory used.
        """
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        # Outside the mode, in which DTensor would not remember what it finds out about an operation.
        self.optimizers.step()
        if self.gradient_accumulation_steps > 1:
            self.optimizers.zero_grad = lambda *args, **kwargs: None
            self.gradient_accumulation_steps = 1
        self.step = 2
        with self.tracker:
            self.note(self.parameters(), tracking.PARAMETERS)
            self.note((p.grad for p in self.parameters()), tracking.GRADIENTS)
            self.note((b for part in self.model_parts for b in part.buffers()), tracking.BUFFERS)
            for optimizer in self.optimizers:
                for state in optimizer.state.values():
                    tensors = (v for v in state.values() if isinstance(v, torch.Tensor))
                    self.note(tensors, tracking.OPTIMIZER)
            self.train_step(self.batch_generator(self.dataloader))


class _NoGuard:
    """Takes every call of a guard and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: False


class FakeRows(BaseDataLoader):
    """The same batch of the run's shape again and again, as the loader gives it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        method: str = ""
        """[model] name, since trajectories look different."""

        infinite: bool = True

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **kwargs: Any) -> None:
        training = SimpleNamespace(seq_len=seq_len, local_batch_size=local_batch_size)
        model = SimpleNamespace(name=config.method)
        self.inputs, self.labels = synthetic_rows(SimpleNamespace(training=training, model=model))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield dict(self.inputs), self.labels

    def state_dict(self) -> dict[str, Any]:
        """Nothing to resume."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to resume."""


def _without_data(spec: ModelSpec, mode: FakeTensorMode) -> ModelSpec:
    """The spec whose model's tensors are made in the mode, and not drawn."""
    parallelize: Callable[..., Any] = spec.parallelize_fn

    def wrapped(model: Any, **kwargs: Any) -> Any:
        model = parallelize(model, **kwargs)
        for module in model.modules():
            if getattr(module, "_param_init", None):
                module._param_init = dict.fromkeys(module._param_init, skip_param_init)
        for name in ("to_empty", "init_weights"):
            setattr(model, name, _inside(mode, getattr(model, name)))
        return model

    return dataclasses.replace(spec, parallelize_fn=wrapped)


def _inside(mode: FakeTensorMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return wrapped
