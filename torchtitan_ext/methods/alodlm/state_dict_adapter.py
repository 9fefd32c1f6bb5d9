"""Names of an ALoDLM model in a Hugging Face folder, and its LM head out of a tied one.

The gate keeps its own names and may be absent. The head is always the model's own: a folder
whose model ties it to the embedding gives a copy of the embedding. Folders of the paper's authors
have their gate in a file of its own: :mod:`torchtitan_ext.checkpoint.published`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from torchtitan_ext.backbones import HFAdapter, size_from_folder
from torchtitan_ext.backbones.adapter import EMBEDDING, HEAD
from torchtitan_ext.checkpoint import hf_folder, published
from torchtitan_ext.errors import UserError

GATE = "core.gate.*"


class ALoDLMAdapter(HFAdapter):
    """The backbone's adapter for a model with a gate and an LM head of its own."""

    # A tied folder need not hold the head.
    allow_missing: ClassVar[tuple[str, ...]] = (GATE, HEAD)
    _stored: frozenset[str] = frozenset()

    def to_hf(
        self,
        state_dict: dict[str, Any],
        *,
        tied_head: Literal["drop", "keep"] = "drop",
        added: Literal["drop", "keep"] | None = None,
    ) -> dict[str, Any]:
        """Rename to the folder's names; the gate goes along where the folder that was read has it."""
        renamed = super().to_hf(state_dict, tied_head=tied_head, added=added)
        kept = {name: state_dict[name] for name in state_dict if name in self._stored and name != HEAD}
        return {**renamed, **kept}

    def check_folder(self, folder: str | Path) -> dict[str, hf_folder.TensorInfo]:
        """Refuse a folder that does not fit; the LM head of a tied one is the embedding.

        Errors: a folder that ties the head and holds one that differs; one of the paper's authors,
        whose gate would be left behind.
        """
        published.refuse(folder)
        found = super().check_folder(folder)
        self._stored = frozenset(name for name in found if self.is_added(name))
        head, embedding = self.names[HEAD], self.names[EMBEDDING]
        if head not in found:
            if not _ties(Path(folder)):
                raise UserError(
                    f"{folder}: the tensors do not fit the model: missing {head}, "
                    "and config.json does not tie it to the embedding"
                )
            return {**found, head: found[embedding]}
        if _ties(Path(folder)) and not hf_folder.same_values(found[head], found[embedding]):
            raise UserError(
                f"{folder}: {head} differs from {embedding}, but config.json ties them; "
                "set tie_word_embeddings to false where the head is meant"
            )
        return found

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """Reader of a folder that was checked; the head of a tied one is read from the embedding."""
        super().get_hf_storage_reader(path, from_quantized)
        return _Reader(path, stands_for={self.names[HEAD]: self.names[EMBEDDING]})


class _Reader(HuggingFaceStorageReader):
    """A reader to whom one tensor may stand for another that the folder lacks."""

    def __init__(self, path: str, *, stands_for: dict[str, str]) -> None:
        super().__init__(path)
        self.stands_for = stands_for
        self.absent: dict[str, str] = {}

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        stored = metadata.state_dict_metadata
        self.absent = {name: other for name, other in self.stands_for.items() if name not in stored}
        stored.update({name: stored[other] for name, other in self.absent.items()})
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan = super().prepare_local_plan(plan)
        return dataclasses.replace(plan, items=[self._from_stored(item) for item in plan.items])

    def _from_stored(self, item: Any) -> Any:
        index = item.storage_index
        if index.fqn not in self.absent:
            return item
        return dataclasses.replace(item, storage_index=dataclasses.replace(index, fqn=self.absent[index.fqn]))


def _ties(folder: Path) -> bool:
    """Whether a folder's model shares its head with the embedding; without a config.json it may."""
    return not (folder / "config.json").is_file() or size_from_folder(folder).tied
