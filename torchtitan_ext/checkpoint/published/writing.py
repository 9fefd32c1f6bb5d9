"""Published folder -> checkpoint folder, as :mod:`~torchtitan_ext.checkpoint.convert` writes them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_ext.backbones import HFAdapter
from torchtitan_ext.backbones.adapter import EMBEDDING, HEAD, model_shapes
from torchtitan_ext.backbones.key_maps import is_ignorable
from torchtitan_ext.checkpoint import assets as hf_assets
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.convert import (
    ASSETS,
    CONFIG,
    HF_KEYS,
    MARKER,
    ModelChoice,
    model_spec,
)
from torchtitan_ext.checkpoint.hf_folder import TensorInfo
from torchtitan_ext.checkpoint.published import recognise
from torchtitan_ext.checkpoint.published.facts import Published
from torchtitan_ext.checkpoint.saving import save_weights
from torchtitan_ext.config import toml_text
from torchtitan_ext.errors import UserError

_COMPILED = "_orig_mod."
"""What torch.compile puts into the names of a module."""

_OVERHEAD_BYTES = 50 * 10**6
_TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")


def convert_published(hf_dir: str | Path, ckpt_dir: str | Path, *, overwrite: bool = False) -> Path:
    """Write a checkpoint folder with the weights of a published folder.

    The result is what :func:`~torchtitan_ext.checkpoint.convert.convert_from_hf` writes of an export: tools
    and ``checkpoint.initial_load_path`` take it. Tensors keep their dtype.
    Errors: no published folder, something in it that this package does not have, tensors that
    are not exactly the model's, a full disk, an output folder in use.
    """
    source, target = Path(hf_dir), Path(ckpt_dir)
    published = recognise(source)
    if published is None:
        raise UserError(f"{source} is not a folder in a published form that is known here")
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UserError(f"the output {target} must lie outside the input {source}, and not around it")
    choice = ModelChoice(name=published.method, flavor="hf", section=published.section)
    with hf_folder.replaced_folder(target, marker=MARKER, overwrite=overwrite) as folder:
        _write_assets(source, folder / ASSETS, config=published.backbone)
        spec = model_spec(choice, assets=folder / ASSETS)
        assert spec.state_dict_adapter is not None
        adapter: Any = spec.state_dict_adapter(spec.model, None)
        infos = _fitted(source, published, adapter=adapter)
        hf_folder.require_space(target, sum(info.nbytes for info in infos.values()) + _OVERHEAD_BYTES)
        if adapter.size.tied:
            infos[HEAD] = infos[EMBEDDING]
        weights = hf_folder.load_tensors(infos)
        weights.update(published.tensors)
        save_weights(weights, folder)
        keys = [adapter.names.get(ours, ours) for ours in [*infos, *published.tensors]]
        if adapter.size.tied:
            keys.remove(adapter.names[HEAD])
        hf_folder.write_json(folder / ASSETS / HF_KEYS, sorted(keys))
        (folder / CONFIG).write_text(_config_text(published), encoding="utf-8")
        hf_folder.write_json(folder / MARKER, {"from": str(source), "tensors": len(weights)})
    return target


def _fitted(source: Path, published: Published, *, adapter: HFAdapter) -> dict[str, TensorInfo]:
    """This package's name -> where the tensor lies, refused if the folder is not exactly the model.

    A tied head is not among them; one that is stored must equal the embedding.
    """
    found = _read(source)
    shapes = model_shapes(adapter.model_config)
    places = {ours: published.place(theirs) for ours, theirs in adapter.names.items()}
    places.update(published.own)
    absent = sorted(set(shapes) - set(places) - set(published.tensors))
    assert not absent, f"no published name for {absent[0]}"
    tied_head = places.pop(HEAD) if adapter.size.tied else None
    missing = [name for name in places.values() if name not in found]
    known = {*places.values(), tied_head}
    unexpected = [name for name in found if name not in known and not is_ignorable(name)]
    hf_folder.refuse(missing, unexpected, where=str(source))
    expected = {theirs: shapes[ours] for ours, theirs in places.items()}
    hf_folder.refuse_shapes(found, expected, where=str(source))
    if tied_head in found and not hf_folder.same_values(found[tied_head], found[places[EMBEDDING]]):
        raise UserError(f"{source}: {tied_head} differs from {places[EMBEDDING]}, but config.json ties them")
    return {ours: found[theirs] for ours, theirs in places.items()}


def _read(source: Path) -> dict[str, TensorInfo]:
    """The folder's tensors; a compiled model's names without what compilation adds."""
    found: dict[str, TensorInfo] = {}
    for name, info in hf_folder.read_tensors(source).items():
        plain = name.replace(_COMPILED, "")
        if plain in found:
            raise UserError(f"{source}: {name} and {found[plain].name} are the same tensor")
        found[plain] = info
    return found


def _write_assets(source: Path, target: Path, *, config: Mapping[str, Any]) -> None:
    """Tokenizer, terms of use, and the backbone's config.json; not their model's code."""
    target.mkdir()
    hf_assets.copy(source, target)
    for path in target.glob("*.py"):
        path.unlink()
    for path in (path for pattern in _TERMS for path in source.glob(pattern) if path.is_file()):
        shutil.copyfile(path, target / path.name)
    hf_folder.write_json(target / "config.json", dict(config))


def _config_text(published: Published) -> str:
    model = {"name": published.method, "flavor": "hf", "hf_assets_path": ASSETS}
    return toml_text({"model": model, published.method: published.section})
