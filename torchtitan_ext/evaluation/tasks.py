"""Accuracy on the synthetic tasks against the length of their samples (T2MLR, Figure 4).

Tasks with targets at the positions of their inputs take one forward a batch;
tasks in words are decoded greedily with the method's own decoder.

Shape suffixes: B = batch, L = sequence length, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.common.decoder import Decoder as TitanDecoder

from torchtitan_ext import attention, masks, progress
from torchtitan_ext.backbones import Backbone
from torchtitan_ext.checkpoint.load import LoadedModel
from torchtitan_ext.data.config import SourceFields
from torchtitan_ext.data.tasks import TASKS, Task, TaskSection, TaskSource, TextTask, TokenTask, make_task
from torchtitan_ext.data.tasks.build import encode_text
from torchtitan_ext.decoding import Decoder, Generation, decoder_for
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation.decode_options import parse_options

KNOBS = ("group", "key_length", "alphabet", "chains", "nodes", "min_digits", "max_digits", "style")
"""Knobs that an evaluation may override; lengths are given on their own."""

SPLIT = "test"
"""Neither training nor validation draws these samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthResult:
    """Scores on samples of one length."""

    length: int
    """In the task's own measure: actions, copies, edges or terms."""

    samples: int
    """Number of samples."""

    token_accuracy: float
    """Share of right tokens among all targets."""

    exact_match: float
    """Share of samples without a wrong token."""

    answer_accuracy: float | None = None
    """Share of samples whose final answer is right; None for tasks that are not decoded."""

    score: float | None = None
    """Mean of the task's own measure of answers; None where it has none."""

    tokens_per_forward: float | None = None
    """New tokens for each row's forwards, of all samples together; None for tasks that are not decoded."""

    forwards_per_sample: float | None = None
    """Forwards of the model that a sample took part in, the prompt's included, on average; None as above."""

    layer_evaluations_per_token: float | None = None
    """Tokens x layers behind the prompts for each new token; None where the decoder does not count them."""

    trained: bool | None = None
    """Whether the length is within the trained range; None when that is not known."""


class Score:
    """Adds up samples of one length."""

    def __init__(self) -> None:
        self.samples = self.tokens = self.right_tokens = self.exact = 0
        self.answers: int | None = None
        self.new_tokens = self.forwards = 0
        self.layer_evaluations: list[int] = []
        self.scores: list[float] = []

    def add(self, right: Sequence[int], targets: Sequence[int]) -> None:
        """Samples with their numbers of right tokens and of targets."""
        self.samples += len(right)
        self.right_tokens += sum(right)
        self.tokens += sum(targets)
        self.exact += sum(r == t for r, t in zip(right, targets, strict=True))

    def add_decoded(self, generation: Generation, *, answers: int, scores: Sequence[float]) -> None:
        """What decoding the samples took, how many answers are right, and the task's own scores."""
        self.answers = (self.answers or 0) + answers
        self.scores += scores
        self.new_tokens += generation.new_tokens
        self.forwards += sum(row.forwards for row in generation)
        self.layer_evaluations += generation.extra.get("layer_evaluations", [])

    def result(self, length: int, *, trained: bool | None) -> LengthResult:
        """The shares."""
        return LengthResult(
            length=length,
            samples=self.samples,
            token_accuracy=self.right_tokens / self.tokens,
            exact_match=self.exact / self.samples,
            answer_accuracy=None if self.answers is None else self.answers / self.samples,
            score=sum(self.scores) / self.samples if self.scores else None,
            tokens_per_forward=self.new_tokens / self.forwards if self.forwards else None,
            forwards_per_sample=None if self.answers is None else self.forwards / self.samples,
            layer_evaluations_per_token=sum(self.layer_evaluations) / self.new_tokens
            if self.layer_evaluations and self.new_tokens
            else None,
            trained=trained,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSetup:
    """What a task in words needs besides the model."""

    tokenizer: Any
    """The one the model was trained with."""

    decode: Decoder
    """The method's decoder."""

    add_bos: bool = False
    """Whether prompts start with BOS, as in training."""

    stop_ids: Collection[int] = ()
    """Tokens that end an answer."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword options of the decoder."""

    @classmethod
    def of(cls, loaded: LoadedModel, *, options: str = "") -> TextSetup:
        """That of a loaded model; ``options``: ``key=value,...`` for its decoder.

        Errors: UserError for options that the decoder does not have.
        """
        decode = decoder_for(loaded.method)
        return cls(
            tokenizer=loaded.tokenizer,
            decode=decode,
            add_bos=loaded.add_bos,
            stop_ids=loaded.stop_ids,
            options=parse_options(options, decode),
        )


def evaluate_lengths(
    model: nn.Module,
    task: Task,
    lengths: Sequence[int],
    *,
    samples: int = 256,
    batch_size: int = 64,
    seed: int = 0,
    trained_maximum: int | None = None,
    text: TextSetup | None = None,
    on_result: Callable[[LengthResult], None] | None = None,
    what: str = "",
) -> list[LengthResult]:
    """Scores on ``samples`` samples of every length; the same samples for every model.

    ``trained_maximum``: the greatest length in training, to mark those beyond it.
    ``text``: needed for tasks in words. ``on_result``: called with each length's scores.
    ``what``: said by a progress bar, of which there is none without.
    Errors: UserError, before the first forward, for lengths that the task does not have or the
    model cannot hold.
    """
    if samples < 1 or batch_size < 1:
        raise UserError(f"samples ({samples}) and batch size ({batch_size}) must be 1 or more")
    tasks = [task.at_length(length) for length in lengths]
    if isinstance(task, TextTask) and text is None:
        raise ValueError(f"the task {task.name!r} needs a tokenizer and a decoder")
    sources = [TaskSource(one, seed=seed, split=SPLIT) for one in tasks]
    for one, source in zip(tasks, sources, strict=True):
        _check_fits(model, one, text=text)
        source.read(0)
    results = []
    with progress.bar(what, total=samples * len(lengths), unit="samples") as bar:
        for length, one, source in zip(lengths, tasks, sources, strict=True):
            score = Score()
            for begin in range(0, samples, batch_size):
                batch = [source.read(i) for i in range(begin, min(begin + batch_size, samples))]
                if isinstance(one, TokenTask):
                    tokens = _score_in_place(model, one, batch, into=score)
                else:
                    assert isinstance(one, TextTask) and text is not None
                    tokens = _score_decoded(model, one, batch, text=text, into=score)
                bar.advance(len(batch), tokens=tokens)
            trained = None if trained_maximum is None else length <= trained_maximum
            results.append(score.result(length, trained=trained))
            if on_result is not None:
                on_result(results[-1])
    return results


def _check_fits(model: nn.Module, task: Task, *, text: TextSetup | None) -> None:
    """Errors: UserError when a sample or its tokens do not fit the model."""
    if not isinstance(model, TitanDecoder):
        return
    config = model.config
    assert isinstance(config, TitanDecoder.Config)
    if isinstance(task, TokenTask):
        needed, formula = task.tokens_of_length(task.longest), f" ({task.size_in_words()})"
        if task.vocabulary > config.vocab_size:
            raise UserError(
                f"the task {task.name!r} needs a vocabulary of {task.vocabulary}, "
                f"the model has {config.vocab_size}"
            )
    else:
        assert isinstance(task, TextTask) and text is not None
        parts = encode_text(text.tokenizer, task.longest_sample(), add_bos=text.add_bos)
        needed, formula = sum(len(part) for part in parts), ""
    if needed > config.max_seq_len:
        raise UserError(
            f"{task.name}: length {task.longest} needs {needed} tokens{formula}, "
            f"the model's context has {config.max_seq_len}"
        )


# --- targets at the positions of the inputs --------------------------------------------


def attention_masks(model: Any, positions_BL: torch.Tensor) -> Any:
    """The model's masks; torchtitan's own models get those of the attention put into them."""
    if isinstance(model, TitanDecoder) and not isinstance(model, Backbone):
        first = getattr(model.config, "first_attention", None)
        backend = attention.backend_of(first.inner_attention) if first is not None else None
        if backend is not None:
            return attention.build_mask(masks.causal_document(positions_BL), backend)
    return model.get_attention_masks(positions=positions_BL)


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


@torch.no_grad()
def _score_in_place(model: nn.Module, task: TokenTask, batch: Sequence[Any], *, into: Score) -> int:
    """One forward; samples of one length have one number of tokens, so there is no padding. The tokens."""
    documents = [task.document(sample) for sample in batch]
    device = _device_of(model)
    tokens_BL = torch.from_numpy(np.stack([d.tokens for d in documents])).to(device)
    labels_BL = torch.from_numpy(np.stack([d.labels for d in documents])).to(device)
    positions_BL = torch.arange(tokens_BL.shape[1], device=device).expand_as(tokens_BL).contiguous()
    # A model that approximates a recurrence in training is evaluated as it decodes: exactly.
    exactly: Callable[..., Any] = getattr(model, "exact", contextlib.nullcontext)  # pyrefly: ignore
    with exactly(tokens_BL.shape[1]):
        logits_BLV = model(
            tokens_BL, positions=positions_BL, attention_masks=attention_masks(model, positions_BL)
        )
    wanted_BL = labels_BL != IGNORE_INDEX
    right_BL = logits_BLV.argmax(dim=-1) == labels_BL  # never where the label is to be ignored
    into.add(right_BL.sum(dim=1).tolist(), wanted_BL.sum(dim=1).tolist())
    return tokens_BL.numel()


# --- tasks in words --------------------------------------------------------------------


def held_out(
    task: TextTask, lengths: Sequence[int], *, samples: int, batch_size: int, seed: int
) -> list[tuple[TextTask, list[Any]]]:
    """Batches of held-out samples, ``samples`` of every length, each with the task at that length."""
    return [
        (one, [source.read(i) for i in range(begin, min(begin + batch_size, samples))])
        for one in (task.at_length(length) for length in lengths)
        for source in [TaskSource(one, seed=seed, split=SPLIT)]
        for begin in range(0, samples, batch_size)
    ]


def with_options(text: TextSetup, setting: Mapping[str, Any]) -> TextSetup:
    """The same with more options. Errors: UserError for one that is given already."""
    for key in setting:
        if key in text.options:
            raise UserError(f"--sweep varies {key}, which --decode-options sets to {text.options[key]}")
    return replace(text, options={**text.options, **setting})


def decode_samples(
    model: nn.Module, batch: Sequence[Any], *, text: TextSetup
) -> tuple[Generation, list[tuple[list[int], list[int]]]]:
    """Samples of a task in words, decoded as ``text`` says, and the tokens of their prompts and answers."""
    encoded = [encode_text(text.tokenizer, sample, add_bos=text.add_bos) for sample in batch]
    generation = text.decode(
        model,
        [prompt for prompt, _ in encoded],
        max_new_tokens=max(len(answer) for _, answer in encoded),
        stop_ids=text.stop_ids,
        bos_id=text.tokenizer.bos_id,
        **text.options,
    )
    return generation, encoded


def _score_decoded(
    model: nn.Module, task: TextTask, batch: Sequence[Any], *, text: TextSetup, into: Score
) -> int:
    """Greedy decoding; what follows a whole answer without EOS is not looked at. The new tokens."""
    generation, encoded = decode_samples(model, batch, text=text)
    right, answers, scores = [], 0, []
    for sample, (_, target), row in zip(batch, encoded, generation, strict=True):
        new = list(row.new_tokens)[: len(target)]
        right.append(sum(a == b for a, b in zip(new, target, strict=False)))
        said = text.tokenizer.decode(row.new_tokens)
        answers += task.final_answer(said) == task.final_answer(sample["answer"])
        scores.append(task.score(said, sample))
    into.add(right, [len(target) for _, target in encoded])
    into.add_decoded(generation, answers=answers, scores=[s for s in scores if s is not None])
    return generation.new_tokens


# --- what to evaluate ------------------------------------------------------------------


def task_of_run(
    name: str, config: Any, *, overrides: Mapping[str, Any] | None = None, length: int | None = None
) -> tuple[Task, int | None]:
    """A task with the knobs of a run's config, and the greatest length in its training.

    ``overrides``: knobs that take another value. ``length``: the only length, if given. No greatest
    length when the run was trained on other data, or on the task with other knobs.
    Errors: UserError for an unknown task and for knobs it does not have or that do not fit.
    """
    sources: list[SourceFields] = list(config.dataloader.sources) or [config.dataloader]
    own = next((source.task for source in sources if source.dataset == name), None)
    knobs = replace(own or TaskSection(), **(overrides or {}))
    trained = make_task(name, knobs, where="dataloader.task").longest if knobs == own else None
    if length is not None and name in TASKS:
        knobs = TASKS[name].knobs_at(knobs, length)
    return make_task(name, knobs, where="task"), trained


def knob_type(knob: str) -> type:
    """What a knob's value is read as on a command line."""
    return type(getattr(TaskSection(), knob))


def used(task: Task) -> dict[str, int | str]:
    """The knobs that the table does not already show as its length."""
    return {knob: getattr(task.knobs, knob) for knob in task.knobs_used if knob in KNOBS}


def describe(task: Task) -> str:
    """The task and its knobs in one line."""
    return f"{task.name} ({', '.join(f'{knob} {value}' for knob, value in used(task).items())})"


def parse_lengths(text: str) -> list[int]:
    """``1:32`` (both ends), ``1:32:4`` (every fourth), ``1,2,4``, ``16``, or several of these with commas.

    Errors: UserError for anything else.
    """
    found: list[int] = []
    for part in text.split(","):
        pieces = part.strip().split(":")
        if len(pieces) > 3 or not all(p.isascii() and p.isdigit() for p in pieces):
            raise UserError(f"lengths {text!r}: got {part.strip()!r}, expected 16, 1:32 or 1:32:4")
        numbers = [int(p) for p in pieces]
        if len(numbers) == 1:
            numbers *= 2
        first, last, step = numbers if len(numbers) == 3 else (*numbers, 1)
        if first < 1 or last < first or step < 1:
            raise UserError(f"lengths {text!r}: {part.strip()!r} holds no length of 1 or more")
        found += range(first, last + 1, step)
    return sorted(set(found))


# --- what comes out --------------------------------------------------------------------


_COLUMNS = (
    ("length", "length", ""),
    ("samples", "samples", ""),
    ("token accuracy", "token_accuracy", ".2%"),
    ("exact match", "exact_match", ".2%"),
    ("answer", "answer_accuracy", ".2%"),
    ("score", "score", ".4f"),
    ("tokens/forward", "tokens_per_forward", ".3f"),
    ("forwards/sample", "forwards_per_sample", ".2f"),
    ("layers/token", "layer_evaluations_per_token", ".2f"),
)
"""Head, field and format; a column whose value is not known is left out."""


def _columns(result: LengthResult) -> list[tuple[int, str, str]]:
    """Width, head and value."""
    shown = [(head, getattr(result, name), form) for head, name, form in _COLUMNS]
    return [(max(len(head), 7), head, format(v, form)) for head, v, form in shown if v is not None]


def header(result: LengthResult) -> str:
    """The first line of the table that holds this result."""
    return "  ".join(f"{head:>{width}}" for width, head, _ in _columns(result)) + "  range"


def row(result: LengthResult) -> str:
    """One line of the table."""
    where = {True: "trained", False: "beyond", None: "-"}[result.trained]
    return "  ".join(f"{value:>{width}}" for width, _, value in _columns(result)) + f"  {where}"


def records(results: Sequence[LengthResult]) -> list[dict[str, Any]]:
    """The results as plain data."""
    return [asdict(result) for result in results]


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A sibling to write to, which takes the path's name when the block ends without an error.

    Errors: UserError when the folder or the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def write_csv(path: Path, results: Sequence[LengthResult]) -> None:
    """One line a length, with a header; what is not known is empty."""
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(LengthResult)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records(results))
