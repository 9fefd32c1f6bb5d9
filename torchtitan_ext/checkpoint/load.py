"""A model with its tokenizer from a checkpoint or a Hugging Face folder, in one process.

This is the full replica that decoding and evaluation run: no process group, dense
attention, evaluation mode, no gradients.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, OPTIMIZER, TRAIN_STATE
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from torchtitan_ext import config as front
from torchtitan_ext import models
from torchtitan_ext.backbones import HFAdapter
from torchtitan_ext.backbones.adapter import EMBEDDING, HEAD
from torchtitan_ext.checkpoint import assets, hf_folder, published, whole
from torchtitan_ext.checkpoint.convert import MARKER, hf_choice
from torchtitan_ext.data.chat import turn_end_id
from torchtitan_ext.data.encoders import resolve_bos
from torchtitan_ext.data.tokenizer_cores import read_json
from torchtitan_ext.data.tokenizers import Tokenizer, find_hf, find_tiktoken
from torchtitan_ext.errors import UserError

CONFIG = "config.toml"
_NOT_MODEL = (OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model that is ready to be run, and what belongs to it."""

    model: nn.Module
    """In evaluation mode, without gradients."""

    tokenizer: Tokenizer
    """The one it was trained with."""

    config: Any
    """The resolved config of the run; defaults around [model] for a Hugging Face folder."""

    spec: ModelSpec
    """What the model was built from."""

    method: str
    """[model] name: how it is decoded."""

    flavor: str
    """[model] flavor; ``hf`` when the size came from a config.json."""

    path: Path
    """The folder the weights came from."""

    add_bos: bool
    """Whether plain text starts with BOS: as in training, or as the tokenizer of a Hugging Face folder has
    it."""

    stop_ids: frozenset[int]
    """Tokens that end a sequence: EOS, the chat template's end of an answer, and those of a
    generation_config.json."""

    @property
    def config_dict(self) -> dict[str, Any]:
        """The config as plain data."""
        return front.to_dict(self.config)


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    step: int | None = None,
) -> LoadedModel:
    """Load a ``step-N`` folder, the newest whole one of a run, or a Hugging Face folder.

    ``path``: a checkpoint folder, a folder of them, a dump folder, or a folder with
    config.json and safetensors. ``step``: take this one instead of the newest.
    Errors: nothing to load there, a damaged checkpoint, tensors that are not exactly the model's.
    """
    folder = find_folder(Path(path).expanduser(), step=step)
    native = (folder / CONFIG).is_file()
    if not native and not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no {CONFIG} and no config.json that says which model this is")
    config = _native_config(folder) if native else _hf_config(folder)
    spec = models.build_spec(config)
    model = _empty_model(spec, dtype=dtype, device=torch.device(device))
    if (folder / ".metadata").is_file():
        _load_dcp(model, folder)
    else:
        _load_hf(model, folder, spec=spec)
    tokenizer = _tokenizer(config, folder)
    trained = native and not (folder / MARKER).is_file()
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        config=config,
        spec=spec,
        method=config.model.name,
        flavor=config.model.flavor,
        path=folder,
        add_bos=_adds_bos(tokenizer, config=config if trained else None),
        stop_ids=_stop_ids(tokenizer, folder),
    )


# --- which folder ----------------------------------------------------------------------


def find_folder(path: Path, *, step: int | None = None) -> Path:
    """The folder with the weights that a user means by ``path``."""
    if not path.is_dir():
        raise UserError(f"{path} is {'not a folder' if path.exists() else 'not there'}")
    if step is None and (folder := _itself(path)) is not None:
        return folder
    for parent in (path, path / "checkpoint"):
        found = whole.steps(parent)
        if found:
            return _of_run(parent, found, step=step)
    if step is not None:
        raise UserError(f"{path} holds no step-N folder, so there is no step {step}")
    raise UserError(
        f"{path} is no checkpoint (no .metadata), holds no step-N folder or checkpoint/step-N, "
        "and is no Hugging Face folder (config.json with safetensors)"
    )


def _itself(path: Path) -> Path | None:
    """The path when it holds weights, whole or not."""
    if (path / ".metadata").is_file() or (whole.STEP_FOLDER.match(path.name) and not whole.steps(path)):
        if reason := whole.damage(path):
            raise UserError(f"checkpoint {path} cannot be loaded: {reason}")
        return path
    return path if any(path.glob("*.safetensors")) else None


def _of_run(parent: Path, found: list[int], *, step: int | None) -> Path:
    if step is None:
        newest, skipped = whole.newest_whole(parent)
        if newest < 0:
            raise UserError(f"{parent} has no whole checkpoint; step-{skipped[0][0]}: {skipped[0][1]}")
        for bad, reason in skipped:
            logger.warning(f"{parent / f'step-{bad}'} is damaged: {reason}; using step-{newest}")
        return parent / f"step-{newest}"
    if step not in found:
        raise UserError(f"{parent} has no step-{step} (it has {', '.join(str(s) for s in sorted(found))})")
    if reason := whole.damage(parent / f"step-{step}"):
        raise UserError(f"checkpoint {parent / f'step-{step}'} cannot be loaded: {reason}")
    return parent / f"step-{step}"


# --- which model -----------------------------------------------------------------------


def _native_config(folder: Path) -> Any:
    from torchtitan_ext.trainer import default_config  # the trainer imports this room

    config = front.load_toml(folder / CONFIG, make_default=default_config)
    beside = folder / assets.FOLDER
    given = Path(config.model.hf_assets_path) if config.model.hf_assets_path else None
    # A converted checkpoint names its assets relative to itself.
    if given is not None and not given.is_dir() and (folder / given).is_dir():
        given = folder / given
    if config.model.flavor == "hf" and (beside / "config.json").is_file():
        given = beside
    config.model.hf_assets_path = str(given) if given is not None else ""
    config.model.attention = "dense"
    return config


def _hf_config(folder: Path) -> Any:
    from torchtitan_ext.trainer import default_config

    published.refuse(folder)
    choice = hf_choice(folder)
    config: Any = default_config({"name": choice.name})
    config.model.name, config.model.flavor = choice.name, "hf"
    if choice.section:
        section = getattr(config, choice.name)
        setattr(config, choice.name, dataclasses.replace(section, **choice.section))
    config.model.hf_assets_path = str(folder)
    config.model.attention = "dense"
    return config


def _empty_model(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with allocated, unset parameters and computed buffers."""
    with torch.device("meta"):
        model = spec.model.build()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    _share_rotary_tables(model)
    model.to_empty(device=device)
    if getattr(model, "enable_weight_tying", False):
        # to_empty gives every module a parameter of its own.
        model.tok_embeddings.weight = model.lm_head.weight
    for module in model.modules():
        if isinstance(module, Module):
            module._init_self_buffers(buffer_device=device)
    return model


def _share_rotary_tables(model: nn.Module) -> None:
    """One table for all blocks with the same rotation: a long context times many blocks is gigabytes."""
    shared: dict[str, RoPE] = {}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, RoPE):
                setattr(module, name, shared.setdefault(f"{type(child).__name__} {child.config}", child))


# --- weights ---------------------------------------------------------------------------


def _load_dcp(model: nn.Module, folder: Path) -> None:
    """Read the model's tensors out of a checkpoint, which may hold optimizer state too."""
    stored = whole.read_metadata(folder).state_dict_metadata
    weights = {name: entry for name, entry in stored.items() if name.split(".")[0] not in _NOT_MODEL}
    state_dict = model.state_dict()
    _refuse_names(folder, missing=set(state_dict) - set(weights), unexpected=set(weights) - set(state_dict))
    for name, tensor in state_dict.items():
        entry = weights[name]
        if isinstance(entry, TensorStorageMetadata) and entry.size != tensor.shape:
            raise UserError(
                f"{folder} does not fit the model: {name} is {list(entry.size)}, "
                f"the model has {list(tensor.shape)}"
            )
    with warnings.catch_warnings():
        # One process without a process group is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state_dict, checkpoint_id=folder, no_dist=True)


def _load_hf(model: nn.Module, folder: Path, *, spec: ModelSpec) -> None:
    """Read the tensors of a Hugging Face folder, one at a time from mapped files."""
    adapter_class = spec.state_dict_adapter
    if adapter_class is None or not issubclass(adapter_class, HFAdapter):
        raise UserError(f"{folder}: model {spec.name!r} has no Hugging Face names")
    adapter = adapter_class(spec.model, None)
    found = adapter.check_folder(folder)
    # A method's own parameters keep their names in a folder.
    names = {name: adapter.names.get(name, name) for name in model.state_dict()}
    if adapter.size.tied:
        names[HEAD] = names[EMBEDDING]
    absent = {name for name, theirs in names.items() if theirs not in found}
    # The adapter lets a method's own parameters be absent; a trained model has them.
    _refuse_names(folder, missing=absent, unexpected=set())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(hf_folder.load_tensor(found[names[name]]))


def _refuse_names(folder: Path, *, missing: set[str], unexpected: set[str]) -> None:
    parts = [
        f"{kind} {sorted(names)[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for kind, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if parts:
        raise UserError(f"{folder} does not fit the model: {'; '.join(parts)}")


# --- tokenizer -------------------------------------------------------------------------


def _tokenizer(config: Any, folder: Path) -> Tokenizer:
    """The first tokenizer beside the weights or where the config says, else bytes."""
    given = config.model.hf_assets_path
    candidates = [folder / assets.FOLDER, folder, *([Path(given)] if given else [])]
    path = next((p for p in candidates if p.exists() and (find_hf(p) or find_tiktoken(p))), None)
    if path is None and config.tokenizer.kind in ("hf", "tiktoken"):
        raise UserError(
            f"{folder} needs a {config.tokenizer.kind} tokenizer, but there is none in "
            f"{' or '.join(str(p) for p in candidates)}"
        )
    if path is None and config.tokenizer.kind == "auto" and not (folder / CONFIG).is_file():
        logger.warning(f"{folder} holds no tokenizer: text is read as bytes")
    return config.tokenizer.build(tokenizer_path=str(path) if path is not None else "")


def _adds_bos(tokenizer: Tokenizer, *, config: Any) -> bool:
    """As a run's config says; None: of a Hugging Face folder, or one that was converted and not trained."""
    if config is None and tokenizer.core.adds_bos is not None:
        return tokenizer.bos_id is not None and tokenizer.core.adds_bos
    return resolve_bos(tokenizer, getattr(getattr(config, "dataloader", None), "add_bos", "auto"))


def _stop_ids(tokenizer: Tokenizer, folder: Path) -> frozenset[int]:
    """EOS, the end of an answer, and what the model's own generation config (or else its config) ends on."""
    ids = {token for token in (tokenizer.eos_id, turn_end_id(tokenizer)) if token is not None}
    for parent in (folder, folder / assets.FOLDER):
        own = read_json(parent / "generation_config.json") or read_json(parent / "config.json") or {}
        value = own.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)
