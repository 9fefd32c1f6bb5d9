"""Tiny models and batches for the tests of WeDLM and ALoDLM."""

from __future__ import annotations

from typing import Any

import torch

import torchtitan_ext  # noqa: F401  (before torchtitan)
from torchtitan_ext import initialization, registry
from torchtitan_ext.losses import LossSection
from torchtitan_ext.objective import IGNORE_INDEX, Prepared, row_generators

MASK = 260
FLAVOR = "qwen3-untied-debug"


def build(method: Any, *, flavor: str = FLAVOR, scale: float = 1.0, **knobs: Any) -> Any:
    """A model with keyed weights; the blocks' times ``scale``, so that a pass shows."""
    spec = method.model_registry(flavor, section=method.Section(mask_token_id=MASK, **knobs))
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    initialization.key_initialisers(model, seed=0)
    with torch.no_grad():
        model.init_weights()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layers." in name:
                parameter.mul_(scale)
    return model


def open_gate(model: Any, *, scale: float = 0.1) -> None:
    """A gate whose hazards differ between tokens."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.core.gate.weight.copy_(scale * torch.randn(model.core.gate.weight.shape, generator=generator))


def positions_of(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def next_labels(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The next token of the same document, as the data gives it."""
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[:, :-1] = torch.where(positions[:, 1:] != 0, tokens[:, 1:], IGNORE_INDEX)
    return labels


def rows(*lengths: int, prompt: int = 0, batch: int = 1, seed: int = 0) -> tuple[dict, torch.Tensor]:
    """Equal packings of random tokens; the first ``prompt`` tokens of each document are not supervised."""
    positions = positions_of(*lengths).repeat(batch, 1)
    tokens = torch.randint(0, 256, positions.shape, generator=torch.Generator().manual_seed(seed))
    labels = next_labels(tokens, positions).masked_fill(positions < prompt - 1, IGNORE_INDEX)
    return {"input": tokens, "positions": positions}, labels


def prepare(objective: Any, batch: tuple[dict, torch.Tensor], *, step: int = 1) -> Prepared:
    generator = row_generators(seed=0, step=step, rows=range(len(batch[1])))
    return objective.prepare(dict(batch[0]), batch[1], generator=generator)


def loss_of(
    model: Any, objective: Any, prepared: Prepared, *, counts: dict | None = None
) -> tuple[Any, dict]:
    """The loss as the trainer computes it, and the metrics."""
    loss_inputs = {name: prepared.inputs[name] for name in objective.loss_inputs}
    rest = {k: v for k, v in prepared.inputs.items() if k not in loss_inputs and k != "input"}
    rest["attention_masks"] = model.get_attention_masks(prepared.inputs["positions"])
    return objective.loss(
        model,
        prepared.inputs["input"],
        prepared.labels,
        model_inputs=rest,
        loss_inputs=loss_inputs,
        counts={k: torch.tensor(v) for k, v in (counts or prepared.counts).items()},
        loss_fn=LossSection(global_vocab_size=model.config.vocab_size).build(),
    )


def gradients(model: Any, objective: Any, prepared: Prepared, **kwargs: Any) -> tuple[float, dict]:
    """Loss and every parameter's gradient, under the plain backbone's names."""
    model.zero_grad()
    loss, _ = loss_of(model, objective, prepared, **kwargs)
    loss.backward()
    named = {name.replace("core.layers", "layers"): p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in named.values())
    return loss.item(), {name: gradient.clone() for name, gradient in named.items()}


def run_config(name: str, monkeypatch: Any) -> Any:
    """A config with the method's section, whether or not it is in the registry."""
    from torchtitan_ext.trainer import default_config

    monkeypatch.setitem(registry.METHODS, name, f"torchtitan_ext.methods.{name}")
    return default_config({"name": name})
