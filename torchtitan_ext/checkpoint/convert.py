"""Hugging Face folder <-> checkpoint folder of this package.

A checkpoint folder is a DCP checkpoint whose keys are the model's state-dict names, with
``config.toml`` ([model] name and flavor) and ``hf_assets/`` (config.json, tokenizer, and
``hf_keys.json``, the tensor names of the folder it came from).  Tensors keep their dtype, so
that a round trip restores every byte.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from torchtitan_ext import registry
from torchtitan_ext.backbones import (
    BackboneSize,
    HFAdapter,
    hf_config,
    lookup,
    same_arithmetic,
    size_from_folder,
)
from torchtitan_ext.backbones.adapter import EMBEDDING, HEAD, model_shapes
from torchtitan_ext.backbones.key_maps import is_ignorable
from torchtitan_ext.checkpoint import assets as hf_assets
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.remote import describe
from torchtitan_ext.checkpoint.saving import save_weights
from torchtitan_ext.checkpoint.stored import StoredTensors
from torchtitan_ext.config import toml_text
from torchtitan_ext.errors import UserError, unknown
from torchtitan_ext.initialization import draw

ASSETS = hf_assets.FOLDER
HF_SECTION = "torchtitan_ext"
"""Key of an exported config.json with the method and its section, for methods that extend a backbone."""

CONFIG, HF_KEYS, MARKER = "config.toml", "hf_keys.json", "conversion.json"
"""Names inside the folders; the marker tells an earlier result from a folder of the user's."""

_OVERHEAD_BYTES = 50 * 10**6
_MODEL_FILES = ("*.py", "LICENSE*", "USE_POLICY*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """The [model] section of a checkpoint's ``config.toml``."""

    name: str
    """Method."""

    flavor: str
    """Backbone flavor, or ``hf`` for the size in ``hf_assets/config.json``."""

    section: dict[str, Any] = field(default_factory=dict)
    """The method's own section; what it leaves out has the method's default."""


def convert_from_hf(
    hf_dir: str | Path,
    ckpt_dir: str | Path,
    *,
    flavor: str = "hf",
    name: str | None = None,
    section: dict[str, Any] | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint folder with the weights of a Hugging Face folder.

    The result is what ``checkpoint.initial_load_path`` takes.  Tensors are copied one at a time
    from mapped files, each of which is opened once.
    ``name``, ``section``: the method and its own section; None: what the folder's config.json
    says (:data:`HF_SECTION`), else ``ar``. Parameters that the method adds and the folder does
    not have are drawn from ``seed``, as a run with that seed would draw them.
    Errors: tensors that are not exactly the model's, a full disk, an output folder in use.
    """
    source, target = Path(hf_dir), Path(ckpt_dir)
    _refuse_overlap(source, target)
    choice = hf_choice(source, flavor=flavor)
    if name is not None:
        own = choice.section if choice.name == name else {}
        choice = ModelChoice(name=name, flavor=flavor, section={**own, **(section or {})})
    choice = _completed(choice, assets=source)
    spec = model_spec(choice, assets=source)
    adapter = _adapter(spec, assets=None)
    found = adapter.check_folder(source)
    infos = {ours: found[theirs] for ours, theirs in adapter.names.items() if theirs in found}
    if adapter.size.tied:
        infos[HEAD] = infos[EMBEDDING]
    infos.update({name: found[name] for name in found if adapter.is_added(name)})
    hf_folder.require_space(target, sum(info.nbytes for info in infos.values()) + _OVERHEAD_BYTES)
    with hf_folder.replaced_folder(target, marker=MARKER, overwrite=overwrite) as folder:
        state_dict = hf_folder.load_tensors(infos)
        if adapter.allow_missing:  # else check_folder found them all
            state_dict.update(_fresh(spec, have=state_dict, seed=seed))
        save_weights(state_dict, folder)
        _copy_assets(source, folder / ASSETS)
        hf_folder.write_json(folder / ASSETS / HF_KEYS, sorted(found))
        (folder / CONFIG).write_text(_config_text(choice), encoding="utf-8")
        hf_folder.write_json(folder / MARKER, {"from": str(source), "tensors": len(infos)})
    return target


def convert_to_hf(
    ckpt_dir: str | Path,
    hf_dir: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = hf_folder.DEFAULT_SHARD_BYTES,
    choice: ModelChoice | None = None,
    self_contained: bool | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a Hugging Face folder with the model of a checkpoint; optimizer state is left out.

    ``ckpt_dir``: a ``step-N`` folder, a folder of them or a dump folder (the newest whole one is taken).
    ``dtype``: ``float32``, ``bfloat16`` or ``float16``; None keeps each tensor's own.
    ``choice``: method and flavor, for a checkpoint without ``config.toml``.
    ``self_contained``: with the code that opens a method's folder without this package; None: where
    there is such code.
    Errors: a damaged checkpoint, tensors that are not exactly the model's, a full disk, code asked for
    where there is none.
    """
    if dtype is not None and dtype not in hf_folder.DTYPES:
        raise unknown("dtype", dtype, hf_folder.DTYPES)
    checkpoint, target = find_checkpoint(ckpt_dir), Path(hf_dir)
    _refuse_overlap(checkpoint, target)
    assets = checkpoint / ASSETS
    choice = choice or read_choice(checkpoint)
    self_contained = describe.has_code(choice.name, asked=self_contained)
    spec = model_spec(choice, assets=assets)
    adapter = _adapter(spec, assets=assets)
    tensors = StoredTensors(checkpoint)
    stored = _model_tensors(tensors, adapter=adapter)
    sources = _exported_names(stored, adapter=adapter, assets=assets)
    cast = hf_folder.DTYPES[dtype] if dtype else None
    sizes = {theirs: _nbytes(stored[ours], cast) for theirs, ours in sources.items()}
    hf_folder.require_space(target, sum(sizes.values()) + _OVERHEAD_BYTES)

    def load(names: list[str]) -> dict[str, torch.Tensor]:
        loaded = tensors.load([sources[theirs] for theirs in names], dtype=cast)
        return {theirs: loaded[sources[theirs]] for theirs in names}

    with hf_folder.replaced_folder(target, marker=MARKER, overwrite=overwrite) as folder:
        if assets.is_dir():
            _copy_assets(assets, folder)
        hf_folder.write_weights(folder, sizes, load=load, max_shard_bytes=max_shard_bytes)
        written = cast or stored[EMBEDDING].properties.dtype
        section = _section(choice)
        write_config(
            folder,
            assets=assets,
            size=adapter.size,
            dtype=written,
            name=choice.name,
            section={} if section is None else asdict(section),
            self_contained=self_contained,
        )
        hf_folder.write_json(folder / MARKER, {"from": str(checkpoint), "tensors": len(sizes)})
    return target


def write_config(
    folder: Path,
    *,
    assets: Path,
    size: BackboneSize,
    dtype: torch.dtype,
    name: str,
    section: dict[str, Any],
    self_contained: bool | None = None,
) -> None:
    """The config.json of an export: the backbone's, with method and section under :data:`HF_SECTION`.

    And what goes with it: generation_config.json, and the code that opens the folder elsewhere.
    """
    config = _export_config(size, assets=assets, dtype=dtype)
    config.pop(HF_SECTION, None)
    if name != "ar":
        config[HF_SECTION] = {"name": name, "section": section}
    describe.describe(config, size=size, method=name, self_contained=self_contained)
    hf_folder.write_json(folder / "config.json", config)
    describe.copy_modelling(folder, config=config)
    describe.write_generation_config(folder, config=config)


def model_spec(choice: ModelChoice, *, assets: Path | None) -> ModelSpec:
    """The model of a method and flavor, as :mod:`torchtitan_ext.registry` knows it."""
    path = str(assets) if assets is not None else None
    section = _section(choice)
    own = {} if section is None else {"section": section}
    return registry.method(choice.name).model_registry(
        choice.flavor, attention="dense", hf_assets_path=path, **own
    )


def _completed(choice: ModelChoice, *, assets: Path) -> ModelChoice:
    """The choice with what the method's section leaves to the folder, such as the mask token's id."""
    complete = getattr(registry.method(choice.name), "complete", None)
    if complete is None:
        return choice
    from torchtitan_ext.trainer import default_config  # the trainer imports this room

    config: Any = default_config({"name": choice.name})
    config.model.flavor, config.model.hf_assets_path = choice.flavor, str(assets)
    setattr(config, choice.name, _section(choice))
    complete(config)
    return replace(choice, section=asdict(getattr(config, choice.name)))


def _section(choice: ModelChoice) -> Any:
    """The method's own section, or None for a method without one."""
    section = getattr(registry.method(choice.name), "Section", None)
    if section is None:
        return None
    try:
        return section(**choice.section)
    except (TypeError, ValueError) as error:
        raise UserError(f"[{choice.name}]: {error}") from error


def hf_choice(folder: Path, *, flavor: str = "hf") -> ModelChoice:
    """The method that a Hugging Face folder was exported from.

    Where it does not say: ``mdlm`` for a model that attends in both directions (LLaDA, Dream),
    else ``ar``.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    own = config.get(HF_SECTION, {}) if isinstance(config, dict) else {}
    name = own.get("name") or _plain_method(folder, flavor=flavor)
    return ModelChoice(name=name, flavor=flavor, section=own.get("section", {}))


def _plain_method(folder: Path, *, flavor: str) -> str:
    try:
        size = size_from_folder(folder) if flavor == "hf" else lookup(flavor)
    except UserError:  # what is wrong with the folder is said where it is read
        return "ar"
    # Without a mask token in its config it cannot be decoded, but it can still be converted.
    return "mdlm" if size.attention == "bidirectional" and size.mask_token_id is not None else "ar"


def _fresh(spec: ModelSpec, *, have: Collection[str], seed: int) -> dict[str, torch.Tensor]:
    """Initial values of the parameters that are not there yet."""
    with torch.device("meta"):
        model = spec.model.build()
    wanted = [name for name in model.state_dict() if name not in have]
    if wanted:
        logger.info(f"{len(wanted)} parameters of {spec.name} start fresh: {', '.join(wanted)}")
    return draw(model, wanted, seed=seed)


def read_choice(checkpoint: Path) -> ModelChoice:
    """Method and flavor from the ``config.toml`` of a checkpoint."""
    path = checkpoint / CONFIG
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        name = tables["model"]["name"]
        return ModelChoice(name=name, flavor=tables["model"]["flavor"], section=tables.get(name, {}))
    except FileNotFoundError:
        raise UserError(
            f"{path} not found; give --model.name and --model.flavor of this checkpoint"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} lacks [model] name and flavor ({error})") from error


def find_checkpoint(folder: str | Path) -> Path:
    """The checkpoint that a user means by ``folder``: itself, or the newest whole ``step-N`` in it."""
    from torchtitan_ext.checkpoint.load import find_folder  # it imports this module

    found = find_folder(Path(folder).expanduser())
    if not (found / ".metadata").is_file():
        raise UserError(f"{found} is a Hugging Face folder already (safetensors, no .metadata)")
    return found


def _adapter(spec: ModelSpec, *, assets: Path | None) -> HFAdapter:
    adapter_class = spec.state_dict_adapter
    if adapter_class is None or not issubclass(adapter_class, HFAdapter):
        raise UserError(f"model {spec.name!r} has no Hugging Face names")
    return adapter_class(spec.model, str(assets) if assets is not None else None)


def _model_tensors(tensors: StoredTensors, *, adapter: HFAdapter) -> dict[str, TensorStorageMetadata]:
    """The model's tensors in a checkpoint, refused if they are not exactly the model's."""
    shapes = model_shapes(adapter.model_config)
    roots, checkpoint = {name.split(".")[0] for name in shapes}, tensors.checkpoint
    stored = {name: entry for name, entry in tensors.entries.items() if name.split(".")[0] in roots}
    missing, extra = sorted(set(shapes) - set(stored)), sorted(set(stored) - set(shapes))
    if missing or extra:
        parts = [f"missing {missing[0]} ({len(missing)} in all)"] if missing else []
        parts += [f"unexpected {extra[0]} ({len(extra)} in all)"] if extra else []
        raise UserError(f"{checkpoint} does not fit the model in its config: {'; '.join(parts)}")
    for name, shape in shapes.items():
        if tuple(stored[name].size) != shape:
            raise UserError(f"{checkpoint}: {name} is {list(stored[name].size)}, the model has {list(shape)}")
    return {name: stored[name] for name in shapes}


def _exported_names(
    stored: Iterable[str],
    *,
    adapter: HFAdapter,
    assets: Path,
) -> dict[str, str]:
    """Name in the folder -> name in the checkpoint, with the tied head as in the source folder."""
    keys_file = assets / HF_KEYS
    own = keys_file.is_file() and _describes(assets, adapter.size)
    original = set(json.loads(keys_file.read_text(encoding="utf-8"))) if own else set()
    tied_head = "keep" if adapter.names[HEAD] in original else "drop"
    # The adapter renames without looking at values, so names can stand for the tensors.
    exported = adapter.to_hf({name: name for name in stored}, tied_head=tied_head, added="keep")
    lost = {key for key in original if not is_ignorable(key)} - set(exported)
    if lost:
        raise UserError(f"{keys_file} lists {sorted(lost)[0]}, which this model does not have")
    return exported


def _nbytes(entry: TensorStorageMetadata, cast: torch.dtype | None) -> int:
    return entry.size.numel() * (cast or entry.properties.dtype).itemsize


def _export_config(size: BackboneSize, *, assets: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The source's config.json where it describes this model, else one made from the size."""
    name = str(dtype).removeprefix("torch.")
    if not _describes(assets, size):
        return hf_config(size, dtype=name)
    config = json.loads((assets / "config.json").read_text(encoding="utf-8"))
    config["dtype" if "dtype" in config else "torch_dtype"] = name
    return config


def _describes(assets: Path, size: BackboneSize) -> bool:
    """Whether the assets are this model's own; they may be another's, whose tokenizer was used."""
    try:
        return same_arithmetic(size_from_folder(assets), size)
    except UserError:
        return False


def _copy_assets(source: Path, target: Path) -> None:
    """Copy config, tokenizer and chat template, the model's own code and its licence."""
    hf_assets.copy(source, target)
    target.mkdir(exist_ok=True)
    for path in (path for pattern in _MODEL_FILES for path in source.glob(pattern)):
        shutil.copyfile(path, target / path.name)
    # The list describes where the files came from; an export has its own tensors.
    (target / HF_KEYS).unlink(missing_ok=True)


def _refuse_overlap(source: Path, target: Path) -> None:
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UserError(f"the output {target} must lie outside the input {source}, and not around it")


def _config_text(choice: ModelChoice) -> str:
    section = {"name": choice.name, "flavor": choice.flavor, "hf_assets_path": ASSETS}
    own = _section(choice)
    return toml_text({"model": section, **({} if own is None else {choice.name: asdict(own)})})
