"""A config tree written as TOML and read back."""

import dataclasses
import json
import os
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import test_config_front as toy
from torchtitan_ext.config import load_toml, parse, save, to_dict, toml_text
from torchtitan_ext.config.toml_writer import leaves
from torchtitan_ext.errors import UserError

_finite = st.floats(allow_nan=False)
_text = st.text(max_size=8).filter(lambda text: text != "none")
_json = st.recursive(
    st.booleans() | st.integers() | _finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_sources = st.builds(
    toy.Source,
    path=_text,
    weight=st.floats(min_value=1e-300, allow_nan=False),
    tags=st.lists(_text, max_size=2),
    filter=st.none() | st.builds(toy.Filter, pattern=_text),
)
_loaders = st.builds(
    toy.MixLoader,
    dataset=_text,
    sources=st.lists(_sources, max_size=3),
    weights=st.dictionaries(_text, _finite, max_size=3),
    extra=st.dictionaries(_text, _json, max_size=3),
)
_roots = st.builds(
    toy.Root,
    model_spec=st.just(toy.SPEC),
    job=st.builds(toy.Job, dump_folder=_text, description=_text),
    optimizer=st.builds(
        toy.Optimizer,
        name=st.sampled_from(["AdamW", "Adam"]),
        lr=st.floats(min_value=1e-300, allow_nan=False),
        no_weight_decay=st.lists(_text, max_size=3),
        betas=st.tuples(_finite, _finite),
    ),
    training=st.builds(
        toy.Training,
        steps=st.integers(),
        seq_len=st.integers(1, 4096),
        max_norm=st.integers() | _finite,
        seed=st.none() | st.integers(),
        half=st.none() | st.booleans(),
        stages=st.none() | st.lists(st.lists(_text, max_size=2), max_size=2),
        hook=st.none(),
    ),
    dataloader=_loaders,
    checkpoint=st.builds(toy.Checkpoint, enable=st.booleans(), load_balancer=st.none() | _text),
    validator=st.builds(toy.Validator, freq=st.integers(1), dataloader=_loaders),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=_roots)
def test_round_trip_of_a_toy_tree(tmp_path, config: toy.Root) -> None:
    path = tmp_path / "config.toml"
    save(config, path)
    again = load_toml(path, make_default=toy.make_default)
    assert again == config
    assert toml_text(again) == path.read_text(encoding="utf-8")
    assert type(again.training.max_norm) is type(config.training.max_norm)


@settings(deadline=None, max_examples=60)
@given(
    values=st.fixed_dictionaries(
        {
            "training.steps": st.integers(),
            "optimizer.lr": st.floats(min_value=1e-300, allow_nan=False),
            "job.description": _text,
            "checkpoint.enable": st.booleans(),
            "training.seed": st.none() | st.integers(),
        }
    )
)
def test_any_value_passes_the_command_line(values: dict[str, object]) -> None:
    argv = [f"--{key}={value}" for key, value in values.items()]
    config = parse(["--model.name=ar", *argv], make_default=toy.make_default)
    for key, value in values.items():
        section, name = key.split(".")
        assert getattr(getattr(config, section), name) == value


def test_what_is_written() -> None:
    config = toy.Root(
        checkpoint=toy.Checkpoint(load_balancer=None),
        validator=toy.Validator(dataloader=toy.MixLoader(sources=[toy.Source(path="a")])),
    )
    tables = to_dict(config)
    assert list(tables)[:2] == ["job", "model"]
    assert "validation" in tables and "profiling" in tables and "validator" not in tables
    assert "model_spec" not in tables and "dump_folder" not in tables
    assert "seed" not in tables["training"] and "hook" not in tables["training"]
    assert tables["checkpoint"]["load_balancer"] == "none"
    assert tables["optimizer"]["betas"] == [0.9, 0.95]
    assert tables["validation"]["dataloader"]["sources"] == [{"path": "a", "weight": 1.0, "tags": []}]
    assert tomllib.loads(toml_text(config)) == tables == tomllib.loads(toml_text(tables))


def test_a_value_without_a_toml_form_is_refused_and_nothing_is_written(tmp_path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("before")
    config = toy.Root(dataloader=toy.MixLoader(extra={"a": {"b": None}}))
    with pytest.raises(
        UserError, match=r"^dataloader.extra.a.b: None \(NoneType\) cannot be written to TOML$"
    ):
        save(config, path)
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["config.toml"]


def test_save_is_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    path = tmp_path / "deep" / "config.toml"
    save(toy.Root(), path)
    before = path.read_text()

    def fail(*args: object) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        save(toy.Root(training=toy.Training(steps=99)), path)
    assert path.read_text() == before and os.listdir(path.parent) == ["config.toml"]


# --- the real tree ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    return pytest.importorskip("torchtitan_ext.trainer", exc_type=ImportError)


def test_round_trip_of_the_real_tree(tmp_path, real) -> None:
    path = tmp_path / "config.toml"
    config = real.default_config({"name": "ar"})
    save(config, path)
    assert load_toml(path, make_default=real.default_config) == config


def test_round_trip_of_the_real_tree_with_changes(tmp_path, real) -> None:
    path = tmp_path / "config.toml"
    argv = [
        "--model.name=ar",
        "--training.steps=3",
        "--training.max-norm=2",
        "--optimizer.no_weight_decay=norm,bias",
        "--parallelism.context_parallel_load_balancer=none",
        "--parallelism.module_fqns_per_model_part=[['a'],['b']]".replace("'", '"'),
        "--activation_checkpoint.mode=full",
        "--checkpoint.enable",
        "--checkpoint.no_last_save_model_only",
        "--validation.freq=5",
        "--profiling.profile_freq=5",
        "--comm.mode=fake_backend",
        '--dataloader.sources=[{"dataset": "stdlib", "weight": 2}, {"dataset": "text", "dataset_path": "x"}]',
    ]
    config = parse(argv, make_default=real.default_config)
    assert config.parallelism.context_parallel_load_balancer is None
    assert config.parallelism.module_fqns_per_model_part == [["a"], ["b"]]
    assert config.optimizer.no_weight_decay == ["norm", "bias"] and config.validator.freq == 5
    assert [s.weight for s in config.dataloader.sources] == [2.0, 1.0]
    save(config, path)
    assert load_toml(path, make_default=real.default_config) == config


def test_every_section_of_the_real_tree_has_its_fields(real) -> None:
    config = real.default_config({"name": "ar"})
    sections = {
        f.name for f in dataclasses.fields(config) if dataclasses.is_dataclass(getattr(config, f.name))
    }
    written = {{"profiling": "profiler", "validation": "validator"}.get(n, n) for n in to_dict(config)}
    # override is set in code only; model_spec is no section.
    assert sections - written <= {"model_spec", "override"}


def test_help_of_the_real_tree(real, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], make_default=real.default_config)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "--optimizer.lr" in out and "--activation_checkpoint.mode" in out and "--model.flavor" in out


# --- whatever is given -----------------------------------------------------------------

_keys = st.sampled_from([*leaves(toy.Root()), "training", "job.x", "t2mlr.depth", "x", "validator.freq"])
_value = _json | st.sampled_from(["none", "true", "1", "[1]", "{}", [{"path": "a"}], [{}]])


def _one_line_or_config(call: Callable[[], Any]) -> None:
    try:
        assert isinstance(call(), toy.Root)
    except UserError as error:
        assert len(str(error).splitlines()) == 1


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=_keys, value=_value)
def test_any_value_in_a_file_gives_a_config_or_one_line(tmp_path, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    document = {name: value}
    for section in reversed(sections):
        document = {section: document}
    path = tmp_path / "config.toml"
    path.write_text(toml_text(document), encoding="utf-8")
    _one_line_or_config(lambda: load_toml(path, make_default=toy.make_default))


@settings(deadline=None, max_examples=150)
@given(key=_keys, text=st.none() | st.text(max_size=6) | _value.map(json.dumps), equals=st.booleans())
def test_any_option_gives_a_config_or_one_line(key: str, text: str | None, equals: bool) -> None:
    words = [f"--{key}"] if text is None else [f"--{key}={text}"] if equals else [f"--{key}", text]
    if "-h" not in words and "--help" not in words:
        _one_line_or_config(lambda: parse(["--model.name=ar", *words], make_default=toy.make_default))
