"""torchtitan's state-dict adapter for every family: names only, never values."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from torchtitan_ext.backbones import key_maps
from torchtitan_ext.backbones.hf_config import size_from_folder
from torchtitan_ext.backbones.sizes import BackboneSize, differences
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.errors import UserError

# What the shapes of the tensors do not show.
_HIDDEN_IN_SHAPES = ("n_heads", "n_kv_heads", "head_dim", "rope_theta", "norm_eps")

HEAD, EMBEDDING = "lm_head.weight", "tok_embeddings.weight"


class HFAdapter(StateDictAdapter):
    """Renames between a model's state dict and a Hugging Face folder.

    Tensors may be plain or DTensors.  A method that adds parameters subclasses this and lists
    them in :attr:`allow_missing`; one that renames blocks overrides :meth:`hf_names`.
    """

    allow_missing: ClassVar[tuple[str, ...]] = ()
    """Patterns (``fnmatch``) of a method's own parameters, which a folder need not have."""

    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None):
        # The base class would read the index itself, and fails on one that names a single file.
        super().__init__(model_config, None)
        self.size: BackboneSize = model_config.size  # pyrefly: ignore [missing-attribute]
        self.hf_assets_path = hf_assets_path
        self.names = self.hf_names()
        self.fqn_to_index_mapping = self._shard_numbers(hf_assets_path)
        self.added: Literal["drop", "keep"] = "drop"
        self._asked: set[str] | None = None
        self._checked: Path | None = None

    def hf_names(self) -> dict[str, str]:
        """This model's names -> names in the folder, for every tensor that a folder has."""
        return key_maps.hf_names(self.size)

    def is_added(self, name: str) -> bool:
        """Whether a tensor of the model is one that a folder need not have."""
        return any(fnmatchcase(name, pattern) for pattern in self.allow_missing)

    def to_hf(
        self,
        state_dict: dict[str, Any],
        *,
        tied_head: Literal["drop", "keep"] = "drop",
        added: Literal["drop", "keep"] | None = None,
    ) -> dict[str, Any]:
        """Rename to the folder's names.

        ``tied_head``: whether the LM head that shares the embedding is written too.
        ``added``: whether a method's own parameters go out, under their own names; None: as
        :attr:`added` says, which a save sets to "keep" (a folder to load from need not have them).
        Errors: a name that is neither of the backbone nor in :attr:`allow_missing`.
        """
        unknown = [name for name in state_dict if name not in self.names and not self.is_added(name)]
        if unknown:
            raise UserError(
                f"no Hugging Face name for {hf_folder.listed(unknown)} (family {self.size.family})"
            )
        # A pipeline stage asks for its own part only; from_hf must not miss the rest.
        self._asked = set(state_dict)
        renamed = {}
        for name, tensor in state_dict.items():
            if name == HEAD and self.size.tied and tied_head == "drop":
                continue
            if name in self.names:
                renamed[self.names[name]] = tensor
            elif (added or self.added) == "keep":
                renamed[name] = tensor
        return renamed

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Rename from the folder's names; a tied LM head is filled from the embedding.

        Errors: a tensor the model has no place for, or one that the model needs and is not there.
        """
        ours = {theirs: name for name, theirs in self.names.items()}
        state_dict, unexpected = {}, []
        for theirs, tensor in hf_state_dict.items():
            if theirs in ours:
                state_dict[ours[theirs]] = tensor
            elif self.is_added(theirs):
                state_dict[theirs] = tensor
            elif not key_maps.is_ignorable(theirs):
                unexpected.append(theirs)
        if self.size.tied and EMBEDDING in state_dict:
            state_dict[HEAD] = state_dict[EMBEDDING]
        needed = self.names if self._asked is None else self._asked & set(self.names)
        missing = [self.names[name] for name in needed if name not in state_dict and not self.is_added(name)]
        hf_folder.refuse(missing, unexpected, where="the Hugging Face weights")
        return state_dict

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """Reader of a folder that was checked against the model first."""
        if from_quantized:
            raise UserError(
                "checkpoint.initial_load_in_hf_quantized is not supported; use unquantised weights"
            )
        if self._checked != Path(path):
            self.check_folder(path)
        return HuggingFaceStorageReader(path)

    def check_folder(self, folder: str | Path) -> dict[str, hf_folder.TensorInfo]:
        """Refuse a folder whose tensors are not exactly this model's; returns what it holds.

        Only headers are read, except where a tied model comes with an LM head: that one is
        compared with the embedding.
        """
        found = hf_folder.read_tensors(folder)
        shapes = model_shapes(self.model_config)
        expected = {theirs: shapes[name] for name, theirs in self.names.items()}
        optional = {theirs for name, theirs in self.names.items() if self.is_added(name)}
        if self.size.tied:
            optional.add(self.names[HEAD])
        missing = [name for name in expected if name not in found and name not in optional]
        unexpected = [
            name
            for name in found
            if name not in expected and not key_maps.is_ignorable(name) and not self.is_added(name)
        ]
        hf_folder.refuse(missing, unexpected, where=str(folder))
        self._check_shapes(folder, found=found, expected=expected)
        self._check_arithmetic(Path(folder))
        head, embedding = found.get(self.names[HEAD]), found[self.names[EMBEDDING]]
        if self.size.tied and head is not None and not hf_folder.same_values(head, embedding):
            raise UserError(
                f"{folder}: {head.name} differs from {embedding.name}, but the model ties them; "
                "set tie_word_embeddings to false in config.json and use model.flavor = 'hf'"
            )
        self._checked = Path(folder)
        return found

    def _check_shapes(
        self,
        folder: str | Path,
        *,
        found: dict[str, hf_folder.TensorInfo],
        expected: dict[str, tuple[int, ...]],
    ) -> None:
        for name in (self.names[EMBEDDING], self.names[HEAD]):
            if name in found and found[name].shape[:1] != expected[name][:1]:
                raise UserError(
                    f"{folder}: {name} has {found[name].shape[0]} rows, but the model's vocabulary has "
                    f"{expected[name][0]} tokens; choose the flavor of these weights, or model.flavor = 'hf'"
                )
        hf_folder.refuse_shapes(found, expected, where=str(folder))

    def _check_arithmetic(self, folder: Path) -> None:
        """Refuse weights of equal shapes that were trained with another rotation, heads or epsilon."""
        if not (folder / "config.json").is_file():
            return
        theirs = size_from_folder(folder)
        for name in (name for name in differences(theirs, self.size) if name in _HIDDEN_IN_SHAPES):
            got, expected = getattr(theirs, name), getattr(self.size, name)
            raise UserError(
                f"{folder}: config.json has {name} {got}, the model {expected}; "
                "choose the flavor of these weights, or model.flavor = 'hf'"
            )

    def _shard_numbers(self, hf_assets_path: str | None) -> dict[Any, int] | None:
        """Output file of each tensor, as in the folder the model came from; None for one file."""
        weight_map = hf_folder.read_weight_map(hf_assets_path) if hf_assets_path else None
        if weight_map is None:
            return None
        written = {theirs for name, theirs in self.names.items() if not (name == HEAD and self.size.tied)}
        numbers: dict[Any, int] = {}
        for theirs in written:
            match = re.search(r"\d+", weight_map.get(theirs, ""))
            if match is None:
                return None
            numbers[theirs] = int(match.group(0))
        if self.allow_missing:
            last = max(numbers.values())
            own = (name for name in model_shapes(self.model_config) if self.is_added(name))
            numbers.update({name: last for name in own if name not in self.names})
        return numbers


def model_shapes(model_config: BaseModel.Config) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the model's state dict, from a build without storage."""
    with torch.device("meta"):
        model = model_config.build()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
