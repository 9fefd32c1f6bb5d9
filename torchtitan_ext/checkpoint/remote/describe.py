"""``config.json`` and ``generation_config.json`` of an export, as transformers reads them.

A method whose weights are a plain backbone that also predicts next tokens (tidar, wedlm,
block_diffusion), or a masked one as it was published (mdlm), keeps the backbone's ``model_type``.
A method that adds parameters or runs its layers in another way gets a ``model_type`` of its own,
so that no tool opens it as the backbone and computes something else.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from torchtitan_ext.backbones import BackboneSize
from torchtitan_ext.backbones.hf_config import ARCHITECTURES, MODEL_TYPES, OWN_TYPES
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.data.chat import turn_end_id
from torchtitan_ext.data.tokenizers import Tokenizer, find_hf, find_tiktoken
from torchtitan_ext.errors import UserError

MODELLING = "modeling_torchtitan_ext.py"
"""The file with which transformers opens an export where this package is not installed."""

KNOWN = ("alodlm", "block_diffusion", "looped", "mdlm", "t2mlr", "tdlm", "tidar", "wedlm")
"""Methods whose models :data:`MODELLING` computes; it has the same list."""

_CONFIG_CLASS, _MODEL_CLASS = "TorchtitanExtConfig", "TorchtitanExtForCausalLM"


def backbone_type(size: BackboneSize) -> str:
    """The backbone's ``model_type``."""
    return next(kind for kind, family in MODEL_TYPES.items() if family == size.family)


def has_code(method: str, *, asked: bool | None) -> bool:
    """Whether an export of a method comes with :data:`MODELLING`; a plain backbone needs none.

    ``asked``: what the user says; None: where the method is :data:`KNOWN`, else a warning.
    Errors: UserError where it was asked for and the method is not known.
    """
    if method == "ar" or method in KNOWN:
        return method != "ar" and asked is not False
    if asked:
        raise UserError(
            f"--self-contained: {MODELLING} does not compute method {method!r} (allowed: {', '.join(KNOWN)})"
        )
    if asked is None:
        logger.warning(
            f"The export comes without {MODELLING}, which does not compute method {method!r}: "
            "where torchtitan_ext is missing it opens as the plain backbone, if at all"
        )
    return False


def describe(config: dict[str, Any], *, size: BackboneSize, method: str, self_contained: bool | None) -> None:
    """Settle ``model_type``, ``architectures`` and ``auto_map`` of a config.json.

    ``self_contained``: name the classes of :data:`MODELLING`, where the folder has none of its own
    that fit; None: see :func:`has_code`.
    """
    backbone = backbone_type(size)
    own = next((kind for kind, pair in OWN_TYPES.items() if pair == (method, backbone)), None)
    auto_map = config.pop("auto_map", {})
    ours = any(str(value).startswith(f"{Path(MODELLING).stem}.") for value in auto_map.values())
    if own is None and config.get("model_type") in OWN_TYPES:
        config["architectures"] = [ARCHITECTURES[size.family]]
    config["model_type"] = own or backbone
    if own is not None:
        # Published code of the backbone would drop what the method adds.
        config["architectures"] = [_MODEL_CLASS]
    elif auto_map and not ours:
        config["auto_map"] = auto_map
        return
    if not has_code(method, asked=self_contained):
        return
    classes = {"AutoConfig": _CONFIG_CLASS, "AutoModelForCausalLM": _MODEL_CLASS}
    if config["model_type"] in ("llama", "qwen2", "qwen3"):
        # transformers has the config; without the consent to run code the folder opens as the backbone.
        del classes["AutoConfig"]
    config["auto_map"] = {auto: f"{Path(MODELLING).stem}.{name}" for auto, name in classes.items()}


def copy_modelling(folder: Path, *, config: dict[str, Any]) -> None:
    """Put the modelling file into a folder whose config.json names it, else take an old one away."""
    named = any(MODELLING.removesuffix("py") in str(value) for value in config.get("auto_map", {}).values())
    if named:
        shutil.copyfile(Path(__file__).with_name(MODELLING), folder / MODELLING)
    else:
        (folder / MODELLING).unlink(missing_ok=True)


def write_generation_config(folder: Path, *, config: dict[str, Any]) -> None:
    """generation_config.json with BOS, EOS and padding of the folder's tokenizer.

    Nothing is written over one that is there, or without a tokenizer. EOS also has the chat template's
    end of an answer, and what config.json ends on.
    """
    target = folder / "generation_config.json"
    if target.exists() or not (find_hf(folder) or find_tiktoken(folder)):
        return
    try:
        tokenizer = Tokenizer.Config().build(tokenizer_path=str(folder))
    except UserError as error:
        logger.warning(f"{target} is not written: {error}")
        return
    given = config.get("eos_token_id")
    stops = [tokenizer.eos_id, turn_end_id(tokenizer), *(given if isinstance(given, list) else [given])]
    eos = list(dict.fromkeys(token for token in stops if token is not None))
    values = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": tokenizer.pad_id,
    }
    values = {name: value for name, value in values.items() if value is not None}
    if values:
        hf_folder.write_json(target, values)
