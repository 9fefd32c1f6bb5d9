"""The arguments of from_pretrained and save_pretrained: which are followed and which are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext.backbones import size_from_folder
from torchtitan_ext.backbones.sizes import differences
from torchtitan_ext.checkpoint.convert import hf_choice
from torchtitan_ext.checkpoint.hf.config import MethodConfig
from torchtitan_ext.checkpoint.hf_folder import DTYPES
from torchtitan_ext.device import default_device, usable_device
from torchtitan_ext.errors import UserError, unknown

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
"""What transformers passes on for folders that are fetched first."""

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (True, False, None),
    "low_cpu_mem_usage": (True, False, None),
    "use_safetensors": (True, None),
    "weights_only": (True, False, None),
    "attn_implementation": (None, "sdpa", "eager"),
    "ignore_mismatched_sizes": (False, None),
    "output_loading_info": (False, None),
    "_from_auto": (True, False),
    "_from_pipeline": ("text-generation", None),
}
"""Arguments that change nothing, and the values with which they do."""


def refuse_adapter(adapter_kwargs: dict[str, Any] | None, *, where: str) -> None:
    """Errors: UserError where the Auto classes found an adapter to load on top of the folder.

    Where the package peft is installed they say how they looked for one, whether there is one or not.
    """
    folder = (adapter_kwargs or {}).get("_adapter_model_path")
    if folder is not None:
        raise UserError(
            f"{where}: {folder} holds an adapter; load the folder that it was trained on, "
            "and then peft.PeftModel.from_pretrained(model, adapter)"
        )


def refuse_unused(kwargs: dict[str, Any], *, where: str) -> None:
    """Errors: UserError for an argument that would have to be ignored."""
    for name, value in kwargs.items():
        if name not in _HARMLESS:
            raise UserError(f"{where}: {name} is not supported (got {value!r})")
        if value not in _HARMLESS[name]:
            allowed = ", ".join(map(repr, _HARMLESS[name]))
            raise UserError(f"{where}: {name} = {value!r} is not supported (allowed: {allowed})")


def folder_of(name: str | os.PathLike[str], hub: dict[str, Any]) -> Path:
    """The local folder; a name that is none is fetched from the hub, or found in its cache."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # needed for names on the hub alone

    given = {key: value for key, value in hub.items() if value is not None}
    return Path(snapshot_download(str(name), **given))


def dtype_of(given: Any, config: MethodConfig) -> torch.dtype:
    """The dtype of the weights: as asked for, else (None or "auto") as config.json says.

    Errors: UserError for one that weights cannot have.
    """
    if given is None or given == "auto":
        given = getattr(config, "dtype", None) or torch.float32
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return DTYPES[name]


def device_of(device_map: Any) -> torch.device:
    """The one device that the model is put on; None: the CPU; "auto": the accelerator, if there is one.

    Errors: UserError for a map over several devices.
    """
    if isinstance(device_map, dict):
        if set(device_map) != {""}:
            raise UserError(
                f"device_map = {device_map!r}: the model is put on one device "
                "(allowed: 'auto', a device, or {'': device})"
            )
        device_map = device_map[""]
    if device_map is None:
        return torch.device("cpu")
    if device_map == "auto":
        return torch.device(usable_device(default_device()))
    if isinstance(device_map, int):
        return torch.device(default_device(), device_map)
    return torch.device(usable_device(str(device_map)))


def check_config(config: MethodConfig, folder: Path) -> None:
    """Errors: UserError for a config that was changed after it was read from the folder."""
    choice = hf_choice(folder)
    if choice.name != type(config).method:
        raise UserError(f"{folder} is a model of the method {choice.name!r}, not {type(config).method!r}")
    changed = differences(config.size, size_from_folder(folder))
    ours, theirs = config.section, choice.section
    changed += [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    if changed:
        raise UserError(
            f"{folder}: the config given differs from its config.json in {', '.join(map(str, changed))}; "
            "the folder is loaded as it was saved"
        )
