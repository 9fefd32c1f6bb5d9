"""Which generation arguments of lm-eval's tasks and of --gen_kwargs are taken, and which are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")

import torchtitan_ext  # noqa: E402, F401 - before torchtitan
from tests.unit import lm_eval_models  # noqa: E402
from torchtitan_ext.errors import UserError  # noqa: E402
from torchtitan_ext.evaluation import lm_eval_model  # noqa: E402

_LINE = re.compile(r"^( *)(\w+): *(.*?) *(?:#.*)?$")


@pytest.fixture(scope="module")
def model() -> Any:
    return lm_eval_model.ExtLM(lm_eval_models.loaded("ar"), max_length=48)


def test_neutral_values_are_the_defaults_of_generate():
    """What lm-eval's own model would do with them."""
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert {name: defaults[name] for name in lm_eval_model._NEUTRAL} == lm_eval_model._NEUTRAL


@pytest.mark.parametrize("name", lm_eval_model._NEUTRAL)
def test_what_changes_nothing_is_taken_and_the_rest_is_refused(name, model):
    neutral = lm_eval_model._NEUTRAL[name]
    plain = model._plan({"max_gen_toks": 4})
    for value in (neutral, None):
        assert model._plan({"max_gen_toks": 4, name: value}) == plain
    other = not neutral if isinstance(neutral, bool) else neutral + 2
    with pytest.raises(UserError, match=f"generation argument {name} = {other}"):
        model._plan({"max_gen_toks": 4, name: other})


@pytest.mark.parametrize(
    "given",
    [
        {"penalty_alpha": 0.6},
        {"min_p": 0.1},
        {"bad_words_ids": [[3]]},
        {"max_length": 40},
        {"stop": ["\n"]},
        {"num_beam": 1},
    ],
    ids=lambda given: next(iter(given)),
)
def test_other_arguments_are_refused(given, model):
    (name,) = given
    with pytest.raises(UserError, match=f"generation argument {name} = .*allowed: until, max_gen_toks"):
        model._plan({"max_gen_toks": 4, **given})


def test_sampling_is_what_was_asked_for(model):
    def sampling(**given: Any) -> tuple[float, int, float]:
        params = model._plan({"max_gen_toks": 4, **given}).sampling
        return params.temperature, params.top_k, params.top_p

    assert (
        sampling() == sampling(do_sample=False) == sampling(do_sample=False, temperature=0.7) == (0.0, 0, 1.0)
    )
    assert sampling(temperature=0.7) == (0.7, 0, 1.0)  # lm-eval: a temperature alone samples
    assert sampling(do_sample=True) == (1.0, 0, 1.0)
    assert sampling(do_sample=True, temperature=0.2, top_p=0.95, top_k=5) == (0.2, 5, 0.95)
    with pytest.raises(UserError, match="do_sample = True and temperature = 0 contradict"):
        model._plan({"max_gen_toks": 4, "do_sample": True, "temperature": 0.0})


def arguments(path: Path) -> dict[str, str]:
    """The generation_kwargs of a task file, without their lists; a YAML reader would follow its includes."""
    lines = path.read_text(errors="replace").splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r" *generation_kwargs: *(#.*)?$", line)]
    found: dict[str, str] = {}
    for start in starts:
        depth = None
        for line in lines[start + 1 :]:
            match = _LINE.match(line)
            if match is None:
                continue
            indent = len(match[1])
            if indent <= len(lines[start]) - len(lines[start].lstrip()):
                break
            depth = indent if depth is None else depth
            if indent == depth:
                found[match[2]] = match[3].strip("'\"")
    found.pop("until", None)
    return found


def value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return float(text) if "." in text else int(text)


def test_every_task_of_lm_eval_is_taken_but_the_one_with_beams(model):
    """All task files of the installed version; lengths aside, which depend on the model's context."""
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks"
    tasks = {path: arguments(path) for path in folder.rglob("*yaml*") if path.is_file()}
    tasks = {path: given for path, given in tasks.items() if given}
    assert len(tasks) > 100
    refused = {}
    for path, given in tasks.items():
        lengths = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_length")
        plain = {name: value(text) for name, text in given.items() if name not in lengths}
        try:
            model._plan({**plain, "max_gen_toks": 4})
        except UserError as error:
            refused[path.parent.name] = str(error)
    assert list(refused) == ["code-text"]
    assert "num_beams = 10" in refused["code-text"]
