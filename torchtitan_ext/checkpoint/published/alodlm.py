"""Folders of amazon/ALoDLM-1.7B and amazon/ALoDLM-8B: a plain Qwen3 folder, and two files beside it.

Known from the public code that writes and reads them (amazon-science/ALoDLM, CC BY-NC; read for
names and behaviour) and its guides:

- ``config.json`` and safetensors are those of ``Qwen3ForCausalLM`` with an LM head of its own.
- ``alodlm_config.json``: the core is the layers [``loop_start``, ``loop_end``), ``max_depth`` passes,
  the mask token's id (151665, which Qwen3's tokenizer calls ``<tool_response>``), and what training used.
- ``exit_gate.pt``: ``net.weight`` [1, D], ``net.bias`` [1], ``depth_bias`` [K]. The logit of pass s is
  net(r_s) + depth_bias[s]; this package has one bias for each pass, so both are added (in fp32).
- Between passes the core's output goes through the model's last norm (``carry_norm``). The gate and the
  LM head read norm(coda(core)).
- Decoding gives a committed token's embedding to the next pass alone ("one_shot"), training to all
  later passes ("cumulative"). The section written here says "one_shot", as tools decode; a run
  that trains on names its own in its TOML.
- Their decoder's defaults are this package's: window 16, tau 0.4, q 0.5, penalty 0.02 (0.05 tau). Their
  quality preset is left1 with q 0.4 (1.7B) or 0.5 (8B).

Not known: the published files were not there to be read; the sizes 1.7B with the core [0, 28) and 8B
with [10, 26) are the guides'. Some older gates, with an MLP or without depth_bias, are refused.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext.backbones.hf_config import size_from_hf
from torchtitan_ext.checkpoint.hf_folder import listed
from torchtitan_ext.checkpoint.published.facts import Published, require, whole_number
from torchtitan_ext.errors import UserError, unknown

RECURRENCE, GATE = "alodlm_config.json", "exit_gate.pt"

_FIELDS = {
    "loop_start": "start",
    "loop_end": "end",
    "max_depth": "passes",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "kl_beta_mi": "a",
    "kl_beta_marg": "b",
    "depth_prior_c": "prior_decay",
}
"""Field of ``alodlm_config.json`` -> knob of [alodlm]."""

_NEEDED = ("loop_start", "loop_end", "max_depth", "mask_token_id")
"""Fields without which a folder is not complete."""

_NOT_READ = (
    # Initial values of a new gate, memory, kernels.
    "gate_init_pi",
    "gradient_checkpointing",
    "gradient_checkpointing_stride",
    "attention_backend",
    "compile_layers",
)

_SEMANTICS = {"carry_norm": True, "feedback": "one_shot"}
"""What their code does and no field says."""


def is_published(folder: Path) -> bool:
    """Whether a folder has one of the files that theirs have beside the backbone's."""
    return any((folder / name).is_file() for name in (RECURRENCE, GATE))


def describe(folder: Path, config: dict[str, Any]) -> Published:
    """The folder in this package's terms.

    Errors: a missing file, a backbone that is not an untied Qwen3, an unknown field, another gate.
    """
    for name in ("config.json", RECURRENCE, GATE):
        if not (folder / name).is_file():
            raise UserError(f"{folder} lacks {name}, which a published ALoDLM folder has")
    require(config, {"model_type": "qwen3"}, where=str(folder / "config.json"))
    size = size_from_hf(config)
    if size.tied:
        raise UserError(
            f"{folder / 'config.json'} has tie_word_embeddings = true, but ALoDLM's LM head is its own"
        )
    section = _section(folder / RECURRENCE)
    if not 0 <= section["start"] < section["end"] <= size.n_layers or section["passes"] < 1:
        raise UserError(
            f"{folder / RECURRENCE}: loop_start = {section['start']}, loop_end = {section['end']}, max_depth "
            f"= {section['passes']} is not a core of the {size.n_layers} layers"
        )
    return Published(
        method="alodlm",
        section=section,
        backbone=config,
        place=lambda name: name,
        own={},
        tensors=_gate(folder / GATE, dim=size.dim, passes=section["passes"]),
    )


def _section(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(fields).__name__}")
    known = [*_FIELDS, *_NOT_READ]
    for name in fields:
        if name not in known:
            raise UserError(f"{path}: {unknown('field', name, known)}")
    for name in _NEEDED:
        whole_number(fields, name, where=str(path))
    return {**_SEMANTICS, **{ours: fields[name] for name, ours in _FIELDS.items() if name in fields}}


def _gate(path: Path, *, dim: int, passes: int) -> dict[str, torch.Tensor]:
    """The exit gate under this package's names."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path} is not a gate that torch.save wrote: {reason}") from error
    shapes = {"net.weight": (1, dim), "net.bias": (1,), "depth_bias": (passes,)}
    if not isinstance(stored, dict):
        raise UserError(f"{path} must hold named tensors, got {type(stored).__name__}")
    found = {name: tuple(getattr(value, "shape", ())) for name, value in stored.items()}
    if found != shapes:
        got = listed(f"{name} {list(shape)}" for name, shape in sorted(found.items())) or "nothing"
        wanted = listed(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise UserError(f"{path} holds {got}; only a linear gate is supported: {wanted}")
    return {
        "core.gate.weight": stored["net.weight"],
        # One bias a pass in fp32: in bfloat16 the sum would be rounded.
        "core.gate.depth_bias": stored["depth_bias"].float() + stored["net.bias"].float(),
    }
