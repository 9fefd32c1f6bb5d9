"""A toy tree through the TOML front: messages, precedence, forms of the command line."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pytest
import tyro

from torchtitan_ext.config import load_toml, parse
from torchtitan_ext.config.sections import JobSection, ModelSection
from torchtitan_ext.errors import UserError


@dataclass(kw_only=True, slots=True)
class Job:
    dump_folder: str = "./outputs"
    description: str = ""


@dataclass(kw_only=True, slots=True)
class Optimizer:
    name: Literal["AdamW", "Adam"] = "AdamW"
    lr: float = 1e-3
    no_weight_decay: list[str] = field(default_factory=list)
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"optimizer.lr must be positive,\n got {self.lr}")


@dataclass(kw_only=True, slots=True)
class Training:
    steps: int = 10
    seq_len: int = 128
    max_norm: float | int = 1.0
    compile: bool = False
    seed: int | None = None
    half: bool | None = None
    stages: list[list[str]] | None = None
    hook: Callable[[], None] | None = None


@dataclass(kw_only=True, slots=True)
class Filter:
    pattern: str = ""


@dataclass(kw_only=True, slots=True)
class Source:
    path: str
    weight: float = 1.0
    tags: list[str] = field(default_factory=list)
    filter: Filter | None = None

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight must be positive, got {self.weight}")


@dataclass(kw_only=True, slots=True)
class Loader:
    _owner: ClassVar[type | None] = None
    dataset: str = ""


@dataclass(kw_only=True, slots=True)
class MixLoader(Loader):
    sources: list[Source] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    enable: bool = False
    folder: str = "checkpoint"
    async_mode: Literal["disabled", "async"] = "disabled"
    load_balancer: str | None = "headtail"


@dataclass(kw_only=True, slots=True)
class Validator:
    enable: bool = False
    freq: int = 10
    dataloader: Loader = field(default_factory=MixLoader)

    def __post_init__(self) -> None:
        assert self.freq > 0, "freq must be positive"


@dataclass(kw_only=True, slots=True)
class Profiler:
    profile_freq: int = 10


@dataclass(kw_only=True, slots=True)
class Method:
    depth: int = 2


@dataclass(kw_only=True, slots=True)
class Root:
    model_spec: Annotated[Any, tyro.conf.Suppress] = None
    dump_folder: Annotated[str, tyro.conf.Suppress] = ""
    job: Job = field(default_factory=Job)
    model: ModelSection = field(default_factory=ModelSection)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    dataloader: Loader = field(default_factory=MixLoader)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validator: Validator = field(default_factory=Validator)
    profiler: Profiler = field(default_factory=Profiler)

    def __post_init__(self) -> None:
        self.dump_folder = self.job.dump_folder
        if self.training.seq_len > 4096 and not self.checkpoint.enable:
            raise ValueError("long sequences need checkpoint.enable")


@dataclass(kw_only=True, slots=True)
class MethodRoot(Root):
    t2mlr: Method = field(default_factory=Method)


SPEC = object()


def make_default(model: dict[str, Any]) -> Root:
    """The toy tree of a method; t2mlr has a section and fewer steps."""
    section = ModelSection(**model)
    if section.name == "t2mlr":
        return MethodRoot(model=section, model_spec=SPEC, training=Training(steps=7))
    if section.name != "ar":
        raise UserError(f"unknown [model] name {section.name!r}")
    return Root(model=section, model_spec=SPEC)


@pytest.fixture
def write(tmp_path):
    """Write a TOML text to a file named cfg.toml and return its path."""

    def _write(text: str) -> str:
        path = tmp_path / "cfg.toml"
        path.write_text(text)
        return str(path)

    return _write


def cli(*argv: str) -> Root:
    return parse(["--model.name", "ar", *argv], make_default=make_default)


def refused(call: Callable[[], Any]) -> str:
    """The message of the UserError, which must be one line."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and message
    return message


# --- precedence ------------------------------------------------------------------------


def test_command_line_over_file_over_defaults(write) -> None:
    path = write("[training]\nsteps = 20\nseq_len = 64\n[model]\nname = 'ar'\n")
    config = parse(["--job.config_file", path, "--training.steps", "30"], make_default=make_default)
    assert (config.training.steps, config.training.seq_len, config.training.max_norm) == (30, 64, 1.0)
    assert config.model_spec is SPEC and type(config) is Root


def test_the_model_name_of_the_command_line_chooses_the_tree(write) -> None:
    path = write("[model]\nname = 'ar'\n")
    config = parse(
        [f"--job.config_file={path}", "--model.name=t2mlr", "--t2mlr.depth=3"], make_default=make_default
    )
    assert isinstance(config, MethodRoot) and config.t2mlr.depth == 3
    assert config.training.steps == 7, "the method's default stays where nothing is said"


@pytest.mark.parametrize("form", ["--job.config_file={}", "--job.config-file={}"])
def test_config_file_forms(write, form: str) -> None:
    path = write("[training]\nsteps = 20\n")
    assert parse([form.format(path)], make_default=make_default).training.steps == 20
    name = form.removesuffix("={}")
    assert parse([name, path], make_default=make_default).training.steps == 20
    assert parse([name, "nowhere.toml", name, path], make_default=make_default).training.steps == 20


def test_post_init_sees_merged_values(write) -> None:
    path = write("[training]\nseq_len = 8192\n[job]\ndump_folder = 'x'\n")
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert message == f"{path}: long sequences need checkpoint.enable"
    config = parse([f"--job.config_file={path}", "--checkpoint.enable"], make_default=make_default)
    assert config.dump_folder == "x"


def test_post_init_errors_name_file_and_section(write) -> None:
    path = write("[optimizer]\nlr = 0.0\n")
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert message == f"{path}: [optimizer] optimizer.lr must be positive, got 0.0"
    path = write("[validation]\nfreq = 0\n")
    # pytest adds to the text of an assertion in a test file.
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert message.startswith(f"{path}: [validation] freq must be positive")


def test_defaults_that_the_method_refuses_name_the_file(write) -> None:
    path = write("[model]\nname = 'nope'\n")
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert message == f"{path}: unknown [model] name 'nope'"


# --- the file --------------------------------------------------------------------------


def test_aliases_and_the_class_of_the_value(write) -> None:
    path = write(
        "[profiling]\nprofile_freq = 3\n[validation]\nfreq = 4\n[validation.dataloader]\nweights = {a = 1}\n"
    )
    config = load_toml(path, make_default=make_default)
    assert config.profiler.profile_freq == 3 and config.validator.freq == 4
    assert config.validator.dataloader == MixLoader(weights={"a": 1.0})
    assert load_toml(write("[profiler]\nprofile_freq = 5\n"), make_default=make_default).profiler == Profiler(
        profile_freq=5
    )
    assert cli("--validator.freq=2").validator.freq == cli("--validation.freq=2").validator.freq == 2
    both = write("[profiler]\n[profiling]\n")
    assert "the same section" in refused(lambda: load_toml(both, make_default=make_default))


def test_array_of_tables(write) -> None:
    path = write(
        "[[dataloader.sources]]\npath = 'a'\n"
        "[[dataloader.sources]]\npath = 'b'\nweight = 2\ntags = ['x', 'y']\nfilter = {pattern = 'p'}\n"
    )
    sources = load_toml(path, make_default=make_default).dataloader.sources
    assert sources == [
        Source(path="a"),
        Source(path="b", weight=2.0, tags=["x", "y"], filter=Filter(pattern="p")),
    ]
    assert isinstance(sources[1].weight, float)
    assert cli('--dataloader.sources=[{"path": "c"}]').dataloader.sources == [Source(path="c")]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[[dataloader.sources]]\nweight = 1.0\n", ["missing key dataloader.sources[0].path", "a string"]),
        (
            "[[dataloader.sources]]\npath = 'a'\nwieght = 1.0\n",
            [
                "unknown key dataloader.sources[0].wieght",
                "did you mean 'dataloader.sources[0].weight'",
                "tags",
            ],
        ),
        (
            "[[dataloader.sources]]\npath = 'a'\n[[dataloader.sources]]\npath = 3\n",
            ["dataloader.sources[1].path", "got 3 (integer)", "allowed: a string"],
        ),
        (
            "[[dataloader.sources]]\npath = 'a'\nweight = 0\n",
            ["[dataloader.sources[0]] weight must be positive"],
        ),
        ("[dataloader]\nsources = ['a']\n", ["dataloader.sources[0]: got 'a' (string)", "path, weight"]),
        ("[dataloader]\nsources = 'a'\n", ["dataloader.sources: got 'a' (string)", "a list (each a table)"]),
    ],
)
def test_array_of_tables_is_strict(write, text: str, parts: list[str]) -> None:
    path = write(text)
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert message.startswith(f"{path}: ") and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("section", "line", "got", "allowed"),
    [
        ("training", "steps = 'eleven'", "'eleven' (string)", "an integer"),
        ("training", "steps = '11'", "'11' (string)", "an integer; did you mean 11?"),
        ("training", "steps = 11.0", "11.0 (number)", "an integer; did you mean 11?"),
        ("training", "steps = 11.5", "11.5 (number)", "an integer"),
        ("training", "steps = true", "true (boolean)", "an integer"),
        ("training", "steps = 'none'", "'none' (string)", "an integer"),
        ("training", "steps = 2024-01-01", "(date)", "an integer"),
        ("training", "steps = [1]", "[1] (list)", "an integer"),
        ("training", "steps = {a = 1}", "{'a': 1} (table)", "an integer"),
        ("training", "compile = 1", "1 (integer)", "true or false"),
        ("training", "compile = 'true'", "'true' (string)", "true or false; did you mean true?"),
        ("training", "max_norm = true", "true (boolean)", "a number"),
        ("training", "seed = 'x'", "'x' (string)", "an integer or none"),
        ("training", "stages = [['a'], 'b']", "[['a'], 'b'] (list)", "a list (each a list (each a string))"),
        ("optimizer", "lr = true", "true (boolean)", "a number"),
        ("optimizer", "lr = '1e-3'", "'1e-3' (string)", "a number; did you mean 0.001?"),
        ("optimizer", "name = 'adamw'", "'adamw' (string)", "'AdamW' or 'Adam'; did you mean 'AdamW'?"),
        ("optimizer", "no_weight_decay = 'a'", "'a' (string)", "a list (each a string)"),
        (
            "optimizer",
            "no_weight_decay = ['a', 2]",
            "['a', 2] (list)",
            "a list (each a string) (item 1 is 2 (integer))",
        ),
        ("optimizer", "betas = [0.9]", "[0.9] (list)", "a list (each a number)"),
        ("dataloader", "weights = {a = 'b'}", "{'a': 'b'} (table)", "a table"),
        ("dataloader", "dataset = 3", "3 (integer)", "a string"),
        ("model", "name = 3", "3 (integer)", "a string"),
        (
            "model",
            "attention = 'flexx'",
            "'flexx' (string)",
            "'auto', 'dense', 'flex' or 'varlen'; did you mean 'flex'?",
        ),
    ],
)
def test_wrong_types(write, section: str, line: str, got: str, allowed: str) -> None:
    path = write(f"[{section}]\n{line}\n")
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert message.startswith(f"{path}: {section}.{line.split(' =')[0]}: got ")
    assert f"{got}, allowed: {allowed}" in message


def test_an_integer_is_a_float_and_a_list_a_tuple(write) -> None:
    path = write(
        "[optimizer]\nlr = 1\nbetas = [0, 1]\n[training]\nmax_norm = 2\nseed = 'none'\nhalf = true\n"
        "[checkpoint]\nload_balancer = 'none'\n[dataloader]\nextra = {a = [1, 'x', {b = true}]}\n"
    )
    config = load_toml(path, make_default=make_default)
    assert config.optimizer == Optimizer(lr=1.0, betas=(0.0, 1.0)) and isinstance(config.optimizer.lr, float)
    assert config.training.max_norm == 2 and isinstance(config.training.max_norm, int)
    assert config.training.seed is None and config.training.half is True
    assert config.checkpoint.load_balancer is None
    assert config.dataloader.extra == {"a": [1, "x", {"b": True}]}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "[training]\nstpes = 1\n",
            ["unknown key training.stpes", "did you mean 'training.steps'?", "steps, seq_len"],
        ),
        (
            "[job]\nsteps = 1\n",
            ["unknown key job.steps", "did you mean 'training.steps'?", "dump_folder, description"],
        ),
        (
            "[optimizer]\nenable = true\n",
            ["unknown key optimizer.enable", "did you mean 'checkpoint.enable'?"],
        ),
        (
            "[trainning]\nsteps = 1\n",
            ["unknown section [trainning]", "did you mean 'training'?", "job, model, optimizer"],
        ),
        ("[t2mlr]\ndepth = 1\n", ["unknown section [t2mlr]"]),
        ("steps = 1\n", ["key 'steps' is outside any section", "did you mean 'training.steps'?"]),
        ('[job]\n"a\\nb" = 1\n', [r"unknown key job.'a\nb'"]),
        ("model_spec = 1\n", ["'model_spec' is outside any section"]),
        ("[training]\nhook = 'x'\n", ["unknown key training.hook"]),
        ("training = 5\n", ["training: got 5 (integer)", "a section [training] with keys steps, seq_len"]),
        ("[training.steps]\na = 1\n", ["training.steps: got {'a': 1} (table)"]),
        (
            "[validation.dataloader]\nsuorces = []\n",
            ["unknown key validation.dataloader.suorces", ".sources'?"],
        ),
        ("[training]\nseq-len = 1\n", ["unknown key training.seq-len", "did you mean 'training.seq_len'?"]),
    ],
)
def test_unknown_names(write, text: str, parts: list[str]) -> None:
    path = write(text)
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert message.startswith(f"{path}: ") and all(part in message for part in parts), message


def test_a_section_of_another_method_says_so(write, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules["torchtitan_ext.config.front"].METHODS, "t2mlr", "somewhere")
    path = write("[t2mlr]\ndepth = 1\n")
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert "unknown section [t2mlr]; it needs [model] name = 't2mlr'" in message


def test_long_lists_of_keys_and_long_values_are_cut(write) -> None:
    wide = dataclass(kw_only=True)(type("Wide", (), {"__annotations__": {f"k{i}": int for i in range(30)}}))
    root = type("R", (), {"__annotations__": {"wide": wide}})
    config = dataclass(kw_only=True)(root)(wide=wide(**{f"k{i}": i for i in range(30)}))
    message = refused(lambda: load_toml(write("[wide]\nzzzz = 1\n"), make_default=lambda model: config))
    assert message.endswith("k16, k17, ...)")
    message = refused(
        lambda: load_toml(write(f"[wide]\nk1 = '{'x' * 500}'\n"), make_default=lambda m: config)
    )
    assert len(message) < 300 and "... (string)" in message


# --- broken files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[training\nsteps = 1\n", "(at line 1, column 10)"),
        ("[training]\nsteps = \n", "(at line 2, column 9)"),
        ("[training]\nsteps = 1\nsteps = 2\n", "(at line 3, column 10)"),
    ],
)
def test_invalid_toml_has_line_and_column(write, text: str, where: str) -> None:
    path = write(text)
    message = refused(lambda: load_toml(path, make_default=make_default))
    assert message.startswith(f"{path}: invalid TOML: ") and message.endswith(where)


def test_unreadable_files(tmp_path) -> None:
    (tmp_path / "debug.toml").write_text("")
    missing = str(tmp_path / "debgu.toml")
    message = refused(lambda: parse(["--job.config_file", missing], make_default=make_default))
    assert f"{missing!r}: no such file; did you mean {str(tmp_path / 'debug.toml')!r}?" in message
    message = refused(lambda: parse(["--job.config_file", str(tmp_path)], make_default=make_default))
    assert "is a folder" in message
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[job]\ndescription = '\xe9'\n")
    assert "not UTF-8 at byte 21" in refused(lambda: load_toml(latin, make_default=make_default))


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 3\r\n")
    assert load_toml(path, make_default=make_default).training.steps == 3


# --- the command line ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "section", "key", "value"),
    [
        (["--training.steps", "5"], "training", "steps", 5),
        (["--training.steps=5"], "training", "steps", 5),
        (["--training.steps=4", "--training.steps=5"], "training", "steps", 5),
        (["--training.seq-len", "5"], "training", "seq_len", 5),
        (["--training.steps", "-1"], "training", "steps", -1),
        (["--checkpoint.enable"], "checkpoint", "enable", True),
        (["--checkpoint.enable", "--training.steps=5"], "checkpoint", "enable", True),
        (["--checkpoint.enable", "--checkpoint.no_enable"], "checkpoint", "enable", False),
        (["--checkpoint.enable", "--checkpoint.no-enable"], "checkpoint", "enable", False),
        (["--checkpoint.enable", "false"], "checkpoint", "enable", False),
        (["--checkpoint.enable=True"], "checkpoint", "enable", True),
        (["--training.half"], "training", "half", True),
        (["--training.no_half"], "training", "half", False),
        (["--training.half", "none"], "training", "half", None),
        (["--optimizer.no_weight_decay", "a,b"], "optimizer", "no_weight_decay", ["a", "b"]),
        (["--optimizer.no-weight-decay", "a, b"], "optimizer", "no_weight_decay", ["a", "b"]),
        (['--optimizer.no_weight_decay=["a{1,2}"]'], "optimizer", "no_weight_decay", ["a{1,2}"]),
        (["--optimizer.no_weight_decay="], "optimizer", "no_weight_decay", []),
        (["--optimizer.no_weight_decay=[ab]"], "optimizer", "no_weight_decay", ["[ab]"]),
        (["--optimizer.betas=0.5,1"], "optimizer", "betas", (0.5, 1.0)),
        (["--optimizer.lr", "1e-4"], "optimizer", "lr", 1e-4),
        (["--optimizer.lr", "1"], "optimizer", "lr", 1.0),
        (["--optimizer.name", "Adam"], "optimizer", "name", "Adam"),
        (["--training.max_norm", "1"], "training", "max_norm", 1),
        (["--training.max_norm", "0.5"], "training", "max_norm", 0.5),
        (["--training.seed", "3"], "training", "seed", 3),
        (["--training.seed", "3", "--training.seed", "null"], "training", "seed", None),
        (["--checkpoint.load_balancer", "None"], "checkpoint", "load_balancer", None),
        (["--job.description", "none"], "job", "description", "none"),
        (["--job.description", "5"], "job", "description", "5"),
        (["--job.description=--x=y"], "job", "description", "--x=y"),
        (["--job.description="], "job", "description", ""),
        (["--training.stages", '[["a"], ["b"]]'], "training", "stages", [["a"], ["b"]]),
        (["--dataloader.weights", '{"a": 1}'], "dataloader", "weights", {"a": 1.0}),
        (["--model.flavor", "x"], "model", "flavor", "x"),
    ],
)
def test_forms(argv: list[str], section: str, key: str, value: Any) -> None:
    got = getattr(getattr(cli(*argv), section), key)
    assert got == value and type(got) is type(value)


def test_nested_section_and_one_that_is_none() -> None:
    assert cli("--validation.dataloader.dataset", "d").validator.dataloader == MixLoader(dataset="d")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["--training.stpes", "1"],
            ["unknown option --training.stpes", "'training.steps'", "steps, seq_len"],
        ),
        (
            ["--trainin.steps", "1"],
            ["unknown option --trainin.steps", "did you mean 'training.steps'?", "job, model"],
        ),
        (["--steps", "1"], ["unknown option --steps", "did you mean 'training.steps'?"]),
        (["--training.steps"], ["--training.steps needs a value", "an integer"]),
        (["--training.steps", "--checkpoint.enable"], ["--training.steps needs a value"]),
        (["--training.steps", "eleven"], ["training.steps: got 'eleven' (string), allowed: an integer"]),
        (["--training.steps="], ["training.steps: got '' (string), allowed: an integer"]),
        (["--training.steps=5.0"], ["training.steps: got '5.0' (string), allowed: an integer"]),
        (["--checkpoint.enable", "maybe"], ["checkpoint.enable: got 'maybe' (string)", "true or false"]),
        (["--checkpoint.no_enable=true"], ["--checkpoint.no_enable: got 'true', allowed: no value"]),
        (["--training.no_steps"], ["unknown option --training.no_steps"]),
        (["--optimizer.name", "Adm"], ["got 'Adm'", "'AdamW' or 'Adam'", "did you mean 'Adam'?"]),
        (["--training.stages", "a,b"], ["training.stages: got 'a,b' (string)", "a list"]),
        (["--training.steps", "5", "6"], ["unexpected '6' after '--training.steps'"]),
        (["--training.steps=5", "6"], ["unexpected '6' after '--training.steps=5'"]),
        (["--training", "5"], ["--training is a section", "steps, seq_len"]),
        (["--training.steps.x", "5"], ["--training.steps has no keys", "an integer"]),
        (["--optimizer.lr", "-1"], ["[optimizer] optimizer.lr must be positive, got -1.0"]),
        (["--model.name"], ["--model.name needs a value"]),
        (["--model.attention", "x"], ["model.attention: got 'x' (string)", "'dense'"]),
        (["--job.config_file"], ["--job.config_file needs a value"]),
        (["--"], ["unexpected '--'"]),
    ],
)
def test_command_line_errors(argv: list[str], parts: list[str]) -> None:
    message = refused(lambda: cli(*argv))
    assert message.startswith("command line: ") and all(part in message for part in parts), message


def test_junk_and_nothing() -> None:
    assert "unexpected 'junk'" in refused(lambda: parse(["junk"], make_default=make_default))
    assert "--job.config_file X.toml" in refused(lambda: parse([], make_default=make_default))
    assert "--job.config_file X.toml" in refused(
        lambda: parse(["--training.steps=1"], make_default=make_default)
    )


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_option(write, capsys, flag: str) -> None:
    path = write("[model]\nname = 't2mlr'\n")
    with pytest.raises(SystemExit) as caught:
        parse(["--job.config_file", path, flag], make_default=make_default)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for option in ("--training.steps", "--t2mlr.depth", "--job.config_file", "--dataloader.weights"):
        assert option in out
    with pytest.raises(SystemExit):
        parse([flag], make_default=make_default)


def test_a_broken_config_ends_a_tool_with_one_line(tmp_path) -> None:
    program = (
        "import sys; from torchtitan_ext.errors import run_cli; from torchtitan_ext.config import parse\n"
        "run_cli(lambda: parse(sys.argv[1:], make_default=lambda m: None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--job.config_file", str(tmp_path / "x.toml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if "rror" in line]
    assert errors == [f"error: config file {str(tmp_path / 'x.toml')!r}: no such file"]


def test_the_tilde_of_a_folder_is_the_home_folder(monkeypatch):
    """No shell has seen that of a TOML or of --job.dump_folder=~/runs."""
    monkeypatch.setenv("HOME", "/own/folder")
    assert JobSection(dump_folder="~/runs").dump_folder == "/own/folder/runs"
    assert ModelSection(hf_assets_path="~/assets").hf_assets_path == "/own/folder/assets"
    assert (JobSection(dump_folder="a/~").dump_folder, ModelSection().hf_assets_path) == ("a/~", "")
