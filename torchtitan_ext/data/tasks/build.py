"""From the keys of a source to a task's samples and documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.encoders import resolve_bos
from torchtitan_ext.data.order import derive_seed, uniform
from torchtitan_ext.data.packing import Document, next_token_document
from torchtitan_ext.data.sources import IndexedSource, Record
from torchtitan_ext.data.tasks.bounded_counter import BoundedCounter
from torchtitan_ext.data.tasks.chain_sum import ChainSum
from torchtitan_ext.data.tasks.config import TaskSection
from torchtitan_ext.data.tasks.group_retrieval import GroupRetrieval
from torchtitan_ext.data.tasks.interface import Task, TextTask, TokenTask
from torchtitan_ext.data.tasks.prosqa import ProsQA
from torchtitan_ext.data.tasks.variable_assignment import VariableAssignment
from torchtitan_ext.errors import UserError, unknown

if TYPE_CHECKING:
    from torchtitan_ext.data.config import SourceFields
    from torchtitan_ext.data.registry import Context

TASKS: dict[str, type[Task]] = {
    cls.name: cls for cls in (GroupRetrieval, VariableAssignment, BoundedCounter, ProsQA, ChainSum)
}

HELD_OUT = {"validation": 0.05, "test": 0.05}
"""Share of the identities of a task's samples that belong to each split; the rest is for training."""

TRIES = 4000
"""Draws for a sample of the right split: a split that holds 1 % of them is missed once in 10**17."""

Encode = Callable[[Sequence[Record]], "list[Document | None]"]

_FOR_ANY_TASK = ("samples",)


class TaskSource(IndexedSource):
    """Sample i of a task, a pure function of the seed, the split and i."""

    def __init__(self, task: Task, *, seed: int, split: str) -> None:
        self.task = task
        self.name = task.name
        self.size = task.knobs.samples or None
        self._seed, self._split = seed, split

    def read(self, index: int) -> dict[str, Any]:
        """Errors: UserError when the knobs leave the split without a sample."""
        rng = np.random.default_rng(derive_seed(self._seed, "task", self.name, self._split, index))
        for _ in range(TRIES):
            sample = self.task.sample(rng)
            identity = self.task.identity(sample)
            if identity is None or split_of(self.name, identity) == self._split:
                return sample
        knobs = ", ".join(f"{knob} = {getattr(self.task.knobs, knob)}" for knob in self.task.knobs_used)
        raise UserError(
            f"{self.name}: these knobs allow so few different samples that none is in split "
            f"{self._split!r} ({knobs})"
        )


def split_of(task: str, identity: str) -> str:
    """The split that samples with this identity belong to, for every seed and all knobs."""
    point = uniform("held out", task, identity)
    for split, share in HELD_OUT.items():
        if point < share:
            return split
        point -= share
    return "train"


def make_task(name: str, knobs: TaskSection, *, where: str) -> Task:
    """A task by name.

    Errors: UserError for an unknown name, for knobs that do not fit each other, and for one that
    was set and is another task's.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    used = TASKS[name].knobs_used
    foreign = [key for key in _changed(knobs) if key not in (*used, *_FOR_ANY_TASK)]
    if foreign:
        raise UserError(f"{where}: {foreign[0]} belongs to another task; {name} has {', '.join(used)}")
    return TASKS[name](knobs)


def used_knobs(fields: SourceFields) -> dict[str, Any]:
    """The knobs that the samples of a source depend on, and what else they do."""
    task = TASKS[fields.dataset](fields.task)
    return {key: getattr(fields.task, key) for key in task.knobs_used} | task.library_probe()


def _changed(knobs: TaskSection) -> list[str]:
    """Knobs that are not at their defaults."""
    return [field.name for field in fields_of(knobs) if getattr(knobs, field.name) != field.default]


def build_task(fields: SourceFields, context: Context) -> tuple[TaskSource, Encode]:
    """The samples of ``fields.dataset`` and their encoder.

    Errors: UserError for keys that a task does not take, and for rows too short for a sample.
    """
    _check_keys(fields, context)
    task = make_task(fields.dataset, fields.task, where=f"{context.where}.task")
    source = TaskSource(task, seed=context.seed, split=fields.split)
    source.read(0)  # so that a split without samples ends the run at its start
    if isinstance(task, TokenTask):
        return source, _token_encoder(task, context)
    assert isinstance(task, TextTask)
    return source, _text_encoder(task, context)


def _check_keys(fields: SourceFields, context: Context) -> None:
    for key in ("dataset_path", "subset", "held_out"):
        if getattr(fields, key) is not None:
            raise UserError(
                f"{context.where}: a task takes no {key}, got {getattr(fields, key)!r}"
                " (split = 'validation' draws other samples)"
            )
    # A part of a mixture does not have these two keys.
    if getattr(fields, "packing", "auto") == "concatenate":
        raise UserError(f"{context.where}: packing = 'concatenate' would cut samples (allowed: auto, whole)")
    if not getattr(fields, "infinite", True) and not fields.task.samples:
        raise UserError(
            f"{context.where}: infinite = false needs task.samples, the size of the data set (0 is endless)"
        )


def _token_encoder(task: TokenTask, context: Context) -> Encode:
    if context.tokenizer.get_vocab_size() < task.vocabulary:
        raise UserError(
            f"{context.where}: needs a vocabulary of {task.vocabulary} or more, the tokenizer has "
            f"{context.tokenizer.get_vocab_size()} tokens (tokenizer.kind = 'byte' has enough)"
        )
    needed = task.tokens_of_length(task.longest)
    if needed > context.seq_len:
        raise UserError(
            f"{context.where}: a sample has up to {needed} tokens ({task.size_in_words()}), but "
            f"training.seq_len is {context.seq_len}"
        )
    return lambda samples: [task.document(sample) for sample in samples]  # pyrefly: ignore


def encode_text(tokenizer: BaseTokenizer, sample: Any, *, add_bos: bool) -> tuple[list[int], list[int]]:
    """Ids of a sample's prompt, and of its answer with EOS where the tokenizer has one."""
    prompt = list(tokenizer.encode(sample["prompt"], add_bos=add_bos, add_eos=False))
    return prompt, list(tokenizer.encode(sample["answer"], add_bos=False, add_eos=True))


def _text_encoder(task: TextTask, context: Context) -> Encode:
    add_bos = resolve_bos(context.tokenizer, context.add_bos)

    def one(sample: Record) -> Document:
        prompt, answer = encode_text(context.tokenizer, sample, add_bos=add_bos)
        tokens = np.array(prompt + answer, dtype=np.int64)
        if len(tokens) > context.seq_len:
            raise UserError(
                f"{context.where}: a sample has {len(tokens)} tokens, but training.seq_len is "
                f"{context.seq_len}"
            )
        return next_token_document(tokens, np.arange(len(tokens)) >= len(prompt))

    one(task.longest_sample())  # so that short rows end the run at its start
    return lambda samples: [one(sample) for sample in samples]
