"""Names of a TDLM model in a Hugging Face folder, and its temporal parameters in a file of their own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from torchtitan_ext.backbones import BackboneSize, HFAdapter
from torchtitan_ext.backbones.sizes import differences
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.errors import UserError

FORMAT = "tdlm-adapter-1"
_SAMPLE = 64
"""Values of each tensor that enter the fingerprint of a backbone."""

_MUST_MATCH = ("layers", "heads", "head_dim", "shift", "prediction", "mask_token_id")
"""Keys of the section without which the tensors mean something else; the others are defaults of decoding."""


def is_temporal(name: str) -> bool:
    """Whether a parameter belongs to a temporal module."""
    return ".temporal." in name


class TDLMAdapter(HFAdapter):
    """The backbone's adapter; the temporal parameters keep their names and may be absent (a start)."""

    allow_missing: ClassVar[tuple[str, ...]] = ("layers.*.temporal.*",)


# --- the temporal parameters alone -----------------------------------------------------


def export_adapter(model: nn.Module, path: str | Path) -> Path:
    """Write the temporal parameters of a whole model (no shards) as one safetensors file.

    Its metadata say which backbone they belong to and how they are used. Errors: UserError for a
    model without temporal modules, or a file that cannot be written.
    """
    config, path = _config_of(model), Path(path)
    tensors = {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if is_temporal(name)
    }
    metadata = {
        "format": FORMAT,
        "backbone": json.dumps(dataclasses.asdict(config.size)),
        "backbone_weights": backbone_fingerprint(model),
        "section": json.dumps(section_of_config(config)),
    }
    temporary = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata=metadata)
        hf_folder.apply_umask(temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} was not written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load_adapter(model: nn.Module, path: str | Path) -> None:
    """Put the temporal parameters of a file into a whole model.

    Errors: UserError for a file that is no such adapter, one of another backbone (its shape or its
    weights) or of other temporal modules, or tensors that are not exactly the model's.
    """
    config = _config_of(model)
    metadata = _read_metadata(path)
    _refuse_backbone(path, config.size, BackboneSize(**json.loads(metadata["backbone"])))
    theirs, ours = json.loads(metadata["section"]), section_of_config(config)
    for key in _MUST_MATCH:
        if theirs[key] != ours[key]:
            raise UserError(f"{path}: its {key} = {theirs[key]!r}, the model's is {ours[key]!r}")
    if metadata["backbone_weights"] != backbone_fingerprint(model):
        raise UserError(f"{path} was trained on other weights of this backbone than the model's")
    own = {name: parameter for name, parameter in model.named_parameters() if is_temporal(name)}
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    hf_folder.refuse(set(own) - set(found), set(found) - set(own), where=str(path))
    wrong = [name for name in own if own[name].shape != found[name].shape]
    if wrong:
        shapes = f"{list(found[wrong[0]].shape)}, the model's is {list(own[wrong[0]].shape)}"
        raise UserError(f"{path}: {wrong[0]} is {shapes}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])


def read_section(path: str | Path) -> dict[str, Any]:
    """The [tdlm] section that a backbone needs to take this adapter."""
    return json.loads(_read_metadata(path)["section"])


def section_of_config(config: Any) -> dict[str, Any]:
    """The [tdlm] section of a model's config, as plain data."""
    section = {
        key: getattr(config, key)
        for key in (
            *("heads", "head_dim", "window", "shift", "prediction"),
            *("states", "tau", "block_size", "mask_token_id"),
        )
    }
    return {"layers": list(config.temporal), **section}


@torch.no_grad()
def backbone_fingerprint(model: nn.Module) -> str:
    """A short text that differs between backbones of equal shape and other weights.

    It reads the first values of every tensor, in bfloat16, so that a model's dtype does not matter.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not is_temporal(name):
            sample = parameter.flatten()[:_SAMPLE].cpu().bfloat16()
            digest.update(name.encode() + sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def _config_of(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if not hasattr(config, "temporal"):
        raise UserError(f"{type(model).__name__} has no temporal modules (method tdlm)")
    return config


def _read_metadata(path: str | Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path} is no adapter of temporal parameters (format {metadata.get('format')!r})")
    return metadata


def _refuse_backbone(path: str | Path, ours: BackboneSize, theirs: BackboneSize) -> None:
    for key in differences(theirs, ours):
        raise UserError(
            f"{path} belongs to another backbone: its {key} is {getattr(theirs, key)!r}, "
            f"the model's {getattr(ours, key)!r}"
        )
