"""The TOML sections that torchtitan 0.3.0 does not have in this form.

Every other section is torchtitan's own dataclass. Each of these has the
``build`` that torchtitan calls, so the training loop does not know them.
"""

import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.nn as nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.tools.logging import logger


@dataclass(kw_only=True, slots=True)
class JobSection:
    """[job]"""

    dump_folder: str = "./outputs"
    """Folder for checkpoints, logs, TensorBoard and the resolved config."""

    description: str = ""
    """One line about the run, shown at the start."""

    def __post_init__(self) -> None:
        # A shell leaves the ~ of --job.dump_folder=~/runs as it is, and of a TOML it never sees one.
        self.dump_folder = os.path.expanduser(self.dump_folder)


@dataclass(kw_only=True, slots=True)
class ModelSection:
    """[model]"""

    name: str = "ar"
    """Method (ar, ...) or one of torchtitan's own models (llama3, qwen3, ...)."""

    flavor: str = "smollm2-debug"
    """Backbone and size, such as smollm2-135M; `hf` takes both from hf_assets_path's config.json."""

    hf_assets_path: str = ""
    """Folder with tokenizer files (and, for flavor `hf`, config.json). Empty: byte-level tokenizer."""

    attention: Literal["auto", "dense", "flex", "varlen"] = "auto"
    """Attention kernel. auto: dense on the CPU, flex on a GPU."""

    def __post_init__(self) -> None:
        self.hf_assets_path = os.path.expanduser(self.hf_assets_path)


class Optimizers(OptimizersContainer):
    """torchtitan's container; a checkpoint brings moments and step counts, the config all the rest."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torchtitan's would put the checkpoint's weight decay and the like in place of the config's."""
        own = {name: value for name, value in self.state_dict().items() if name.startswith("param_groups.")}
        changes = {}
        for name, value in own.items():
            key = _SHOWN.get(name.rsplit(".", 1)[1])
            if key and name in state_dict and state_dict[name] != value:
                changes[f"{key} = {value} (there {state_dict[name]})"] = None
        if changes:
            logger.warning(
                f"[optimizer] is not that of the checkpoint, and the config's holds: {'; '.join(changes)}"
            )
        super().load_state_dict({**state_dict, **own})


_SHOWN = {"initial_lr": "lr", "betas": "(beta1, beta2)", "eps": "eps", "weight_decay": "weight_decay"}
"""A parameter group's values that are worth a word, and their keys; ``lr`` itself is the schedule's."""


@dataclass(kw_only=True, slots=True)
class OptimizerSection(Configurable.Config):
    """[optimizer]: torchtitan's optimizer container with flat keys."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    """Optimizer class."""

    lr: float = 8e-4
    """Learning rate after warm-up."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Added to the denominator."""

    weight_decay: float = 0.1
    """Decoupled weight decay."""

    no_weight_decay: list[str] = field(default_factory=list)
    """Regular expressions of parameter names without weight decay."""

    implementation: Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"] = "fused"
    """Optimizer implementation, as torchtitan's."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr must be positive, got {self.lr}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"optimizer.beta1/beta2 must be in [0, 1), got {self.beta1}, {self.beta2}")
        if self.weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay must not be negative, got {self.weight_decay}")

    # pyrefly: ignore[bad-override] - torchtitan passes the runtime objects by keyword
    def build(self, *, model_parts: list[nn.Module], **kwargs: Any) -> Optimizers:
        """Optimizers over the trainable parameters of the model parts."""
        common = {
            "lr": self.lr,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }
        trained = [n for part in model_parts for n, p in part.named_parameters() if p.requires_grad]
        # A pattern may live on another pipeline stage; torchtitan refuses one that matches nothing.
        patterns = [p for p in self.no_weight_decay if any(re.search(p, n) for n in trained)]
        groups = [(p, {**common, "weight_decay": 0.0}) for p in patterns]
        if any(not any(re.search(p, n) for p in patterns) for n in trained):
            groups.append((r".*", common))
        config = Optimizers.Config(
            param_groups=[
                ParamGroupConfig(pattern=pattern, optimizer_name=self.name, optimizer_kwargs=kwargs_)
                for pattern, kwargs_ in groups
            ],
            implementation=self.implementation,
        )
        return config.build(model_parts=model_parts)


class _NoActivationCheckpointing:
    def apply(self, model: nn.Module) -> None: ...


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointSection(Configurable.Config):
    """[activation_checkpoint]"""

    mode: Literal["none", "selective", "full", "memory_budget"] = "selective"
    """What is recomputed in the backward pass."""

    memory_budget: float = 0.5
    """For mode memory_budget (needs compile): 0 recomputes all, 1 nothing."""

    preserve_rng_state: bool = True
    """Restore the random state in the recomputation."""

    def build(self, *, dump_folder: str = "", **kwargs: Any) -> Any:
        """torchtitan's activation checkpointing policy, which is then applied to the model."""
        if self.mode == "none":
            return _NoActivationCheckpointing()
        if self.mode == "memory_budget":
            config = MemoryBudgetAC.Config(memory_budget=self.memory_budget)
        else:
            policy = {"selective": SelectiveAC, "full": FullAC}[self.mode]
            config = policy.Config(preserve_rng_state=self.preserve_rng_state)
        return config.build(dump_folder=dump_folder)


@dataclass(kw_only=True, slots=True)
class TrainingSection(TrainingConfig):
    """[training]: torchtitan's, with CUDA graphs off.

    The trainer collects metrics on the host in every forward; a captured graph
    would not replay that.
    """

    disable_cuda_graphs: bool = True
    """CUDA graphs are not supported by this trainer; must stay true."""

    def __post_init__(self) -> None:
        if not self.disable_cuda_graphs:
            raise ValueError("training.disable_cuda_graphs = false is not supported (metrics are host-side)")
        for key in ("local_batch_size", "seq_len", "steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"training.{key} must be at least 1, got {getattr(self, key)}")
        if self.global_batch_size != -1 and self.global_batch_size < 1:
            raise ValueError(
                f"training.global_batch_size must be positive or -1 (local x ranks), "
                f"got {self.global_batch_size}"
            )
