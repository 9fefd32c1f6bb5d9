"""The prompts that trajectories answer: samples of a task, lines of a file, or conversations."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ext.checkpoint.load import LoadedModel
from torchtitan_ext.data.chat import Tools, render, tools_of
from torchtitan_ext.data.files import FORMATS, find_files, format_of, open_files
from torchtitan_ext.data.order import Order
from torchtitan_ext.data.processors import Completion, Messages, check_processor, resolve_processor
from torchtitan_ext.data.sources import IndexedSource, Record
from torchtitan_ext.data.streaming import HubTable
from torchtitan_ext.data.tasks import TASKS, TaskSource, TextTask
from torchtitan_ext.data.tasks.build import encode_text
from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.evaluation.tasks import task_of_run

SPLIT = "train"
"""Trajectories are for training, so their prompts come from the training part."""

Judge = Callable[[int, Sequence[int]], bool]
"""Whether the answer (ids up to the stop token) to prompt i is right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Prompts in order; number i is the same in every process."""

    tokens: list[list[int]]
    """Ids of each."""

    description: dict[str, Any]
    """Where they come from, with a digest of all ids."""

    judge: Judge | None = None
    """None where right answers are not known."""


def open_prompts(
    loaded: LoadedModel,
    source: str,
    *,
    count: int | None,
    seed: int,
    longest: int,
    processor: str = "auto",
    knobs: Mapping[str, Any] | None = None,
) -> Prompts:
    """``count`` prompts of a task by name, or of a path (a hub name too) in an order that ``seed`` decides.

    Lines of text files are prompts as they are; other records are conversations, whose last
    answer is left out. ``longest``: tokens of the longest prompt; conversations and lines beyond it
    are left out and counted. ``knobs``: of the task, instead of those of the run.
    Errors: UserError for an unknown source, too few prompts, a sample of a task that is too long.
    """
    if count is not None and count < 1:
        raise UserError(f"--count must be at least 1, got {count}")
    if longest < 1:
        raise UserError(f"the response leaves no room for a prompt (longest: {longest} tokens)")
    if source in TASKS:
        if count is None:
            raise UserError(f"--count is needed: the task {source!r} has no end")
        if processor != "auto":
            raise UserError(f"--processor has no use for the task {source!r}")
        return _of_task(loaded, source, count=count, seed=seed, longest=longest, knobs=knobs or {})
    if knobs:
        name = next(iter(knobs)).replace("_", "-")
        raise UserError(f"--{name} belongs to a task (allowed: {', '.join(TASKS)})")
    check_processor(processor)
    return _of_path(loaded, source, count=count, seed=seed, longest=longest, processor=processor)


def _of_task(
    loaded: LoadedModel, name: str, *, count: int, seed: int, longest: int, knobs: Mapping[str, Any]
) -> Prompts:
    TASKS[name].check_installed()
    task, _ = task_of_run(name, loaded.config, overrides=knobs)
    if not isinstance(task, TextTask):
        raise UserError(f"the task {name!r} is not in words, so nothing is decoded for it")
    source = TaskSource(task, seed=seed, split=SPLIT)
    tokens = []
    for i in range(count):
        prompt, _ = encode_text(loaded.tokenizer, source.read(i), add_bos=loaded.add_bos)
        if len(prompt) > longest:
            raise UserError(
                f"sample {i} of {name} has {len(prompt)} tokens; with the response at most {longest} fit"
            )
        tokens.append(prompt)

    def judge(index: int, answer: Sequence[int]) -> bool:
        said = loaded.tokenizer.decode(answer)
        return task.final_answer(said) == task.final_answer(source.read(index)["answer"])

    used = {knob: getattr(task.knobs, knob) for knob in task.knobs_used} | task.library_probe()
    return Prompts(tokens=tokens, description=_described(name, tokens, seed=seed, **used), judge=judge)


def _of_path(
    loaded: LoadedModel, path: str, *, count: int | None, seed: int, longest: int, processor: str
) -> Prompts:
    source, kind = _open(path)
    tokens: list[list[int]] = []
    left_out = 0
    for prompt in _encoded(loaded, _shuffled(source, seed=seed), kind=kind, processor=processor, path=path):
        if len(prompt) > longest:
            left_out += 1
            continue
        tokens.append(prompt)
        if len(tokens) == count:
            break
    if not tokens or (count is not None and len(tokens) < count):
        raise UserError(
            f"{path} has {len(tokens)} prompts of up to {longest} tokens ({left_out} are longer), "
            f"but {count or 'some'} are wanted"
        )
    described = _described(Path(path).name, tokens, seed=seed, left_out=left_out)
    return Prompts(tokens=tokens, description=described)


def _described(source: str, tokens: Sequence[Sequence[int]], **more: Any) -> dict[str, Any]:
    digest = hashlib.sha256()
    for prompt in tokens:
        digest.update(f"{list(prompt)}\n".encode())
    return {"source": source, **more, "digest": digest.hexdigest()[:32]}


# --- paths -----------------------------------------------------------------------------


def _open(path: str) -> tuple[IndexedSource, str]:
    """The records of a path, and whether they are ``txt`` or ``chat``."""
    where = f"--prompts {path}"
    local = Path(path).expanduser().exists() or any(c in path for c in "*?[")
    if not local and re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not format_of(Path(path)):
        return HubTable(path, subset=None, split=SPLIT, where=where), "chat"
    if not local:
        raise UserError(
            f"{where} is no task{nearest(path, TASKS)} (tasks: {', '.join(TASKS)}) and no file that is there"
        )
    files = find_files(path, split=SPLIT, where=where)
    kinds = {"txt" if format_of(file) == "txt" else "chat" for file in files}
    if len(kinds) > 1:
        raise UserError(f"{where} holds both .txt and other files; give one kind ({', '.join(FORMATS)})")
    source = open_files(files, name=path, txt_documents="line", columns=None, broken_lines="error")
    return source, kinds.pop()


def _shuffled(source: IndexedSource, *, seed: int) -> Iterator[Record]:
    assert source.size is not None
    order = Order(source.size, shuffle="full", block=max(source.size, 1), seed=seed)
    for place in range(source.size):
        record = source.read(order.document(0, place))
        if record is not None:
            yield record


def _encoded(
    loaded: LoadedModel, records: Iterable[Record], *, kind: str, processor: str, path: str
) -> Iterator[list[int]]:
    for record in records:
        if isinstance(record, str):
            yield list(loaded.tokenizer.encode(record, add_bos=loaded.add_bos))
            continue
        try:
            choose = resolve_processor(processor, set(record), where=f"--prompts {path}")
            yield prompt_of(loaded, choose(record), tools=tools_of(record))
        except UserError as error:
            raise UserError(f"{error} in the record {str(record)[:120]!r}") from error


def prompt_of(
    loaded: LoadedModel, conversation: Messages | Completion, *, tools: Tools | None = None
) -> list[int]:
    """Ids of a conversation up to where its last answer begins."""
    tokenizer = loaded.tokenizer
    if isinstance(conversation, Completion):
        return list(tokenizer.encode(conversation.prompt, add_bos=tokenizer.wants_bos))
    asked = list(conversation)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked:
        raise UserError("the conversation holds nothing but answers")
    return list(tokenizer.encode(render(tokenizer, asked, prompt=True, tools=tools)))
