"""The keys of ``[dataloader]`` that name data, and of each ``[[dataloader.sources]]`` table."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.components.dataloader import BaseDataLoader

from torchtitan_ext.data.tasks.config import TaskSection


@dataclass(kw_only=True, slots=True)
class SourceFields(BaseDataLoader.Config):
    """One data set: which, where, and how its records become documents."""

    dataset: str = "stdlib"
    """Name in the registry: stdlib, text, chat, c4, fineweb_edu, a task (group_retrieval,
    variable_assignment, prosqa_hard, chain_sum), or one that was registered."""

    dataset_path: str | None = None
    """A file, a glob or a folder (text, chat, c4, fineweb_edu), or a hub name (chat, c4, fineweb_edu)."""

    subset: str | None = None
    """Configuration of a hub data set, such as ``sample-10BT``; none: the registry's choice."""

    split: Literal["train", "validation", "test"] = "train"
    """Part of the data. Data sets without parts of their own hold out ``held_out`` for ``validation``."""

    held_out: float | None = None
    """Share of the documents that only ``split = "validation"`` sees, chosen by a hash. None: 0.05 for
    stdlib, 0.001 for fineweb_edu (which is read through to find them), else 0: ``dataset_path`` then
    names the part itself."""

    text_field: str = "text"
    """Field of a record that holds the text."""

    txt_documents: Literal["file", "line", "paragraph"] = "file"
    """What is one document of a .txt file."""

    processor: str = "auto"
    """How a chat record becomes messages: a name in the processor registry; ``auto`` looks at its fields."""

    broken_lines: Literal["error", "skip"] = "error"
    """A record that cannot be read or encoded ends the run, or is left out and counted."""

    task: TaskSection = field(default_factory=TaskSection)
    """What the samples of a task look like; other data sets have no use for it."""


@dataclass(kw_only=True, slots=True)
class Source(SourceFields):
    """One part of a mixture."""

    name: str = ""
    """How messages call it; empty: the data set's name."""

    weight: float = 1.0
    """Share of the documents, relative to the other sources."""
