"""Keys of torchtitan 0.2.2 and before: the error names where they went."""

import dataclasses

import pytest

from tests.unit.test_config_front import make_default, refused
from torchtitan_ext.config import load_toml, parse
from torchtitan_ext.config.moved import MOVED, moved
from torchtitan_ext.config.toml_writer import leaves

REAL = pytest.importorskip("torchtitan_ext.trainer", exc_type=ImportError)


@pytest.fixture(scope="module")
def root():
    return REAL.default_config({"name": "ar"})


def _section(root, key: str) -> bool:
    return any(leaf.startswith(f"{key}.") for leaf in leaves(root))


@pytest.mark.parametrize("key", [key for key, entry in MOVED.items() if entry.to])
def test_the_new_place_exists(root, key: str) -> None:
    to = MOVED[key].to
    assert to in leaves(root) or _section(root, to)


@pytest.mark.parametrize("key", MOVED)
def test_the_old_place_does_not_exist(root, key: str) -> None:
    assert key not in leaves(root) and not _section(root, key)


@pytest.mark.parametrize("entry", MOVED.items(), ids=lambda e: e[0])
def test_every_entry_says_something(entry) -> None:
    key, (to, why) = entry
    assert to or why
    assert to != key


@pytest.mark.parametrize("key", [key for key in MOVED if key.count(".") == 1])
def test_real_tree_refuses_a_moved_key(tmp_path, key: str) -> None:
    section, name = key.split(".")
    path = tmp_path / "old.toml"
    path.write_text(f"[{section}]\n{name} = true\n")
    message = refused(lambda: load_toml(path, make_default=REAL.default_config))
    assert message.startswith(f"{path}: {key} ")
    assert (MOVED[key].to or "was removed") in message


def test_examples(tmp_path) -> None:
    path = tmp_path / "old.toml"

    def message(text: str) -> str:
        path.write_text(text)
        return refused(lambda: load_toml(path, make_default=make_default)).removeprefix(f"{path}: ")

    assert message("[training]\ndataset = 'c4'\n") == "training.dataset moved to dataloader.dataset"
    assert (
        message("[lr_scheduler]\nlr_min = 0.1\n") == "lr_scheduler.lr_min moved to lr_scheduler.min_lr_factor"
    )
    assert message("[fault_tolerance]\nenable = true\n").startswith("fault_tolerance.enable was removed: ")
    assert message("[fault_tolerance]\n").startswith("fault_tolerance was removed: ")
    assert message("[quantize.linear.float8]\nemulate = true\n").startswith("quantize.linear was removed: ")
    assert message("[experimental]\npipeline_parallel_degree = 2\n") == (
        "experimental.pipeline_parallel_degree moved to parallelism.pipeline_parallel_degree"
    )
    assert message("[training.dataloader]\nnum_workers = 2\n") == (
        "training.dataloader.num_workers moved to dataloader.num_workers"
    )
    assert message("[model]\ntokenizer_path = 'x'\n").startswith(
        "model.tokenizer_path moved to model.hf_assets_path"
    )
    assert message("dump_folder = 'x'\n") == "dump_folder moved to job.dump_folder"


def test_on_the_command_line() -> None:
    argv = ["--model.name=ar", "--activation-checkpoint.selective-ac-option", "2"]
    message = refused(lambda: parse(argv, make_default=make_default))
    assert message.startswith("command line: --activation_checkpoint.selective_ac_option moved to")
    message = refused(
        lambda: parse(["--model.name=ar", "--model.converters=float8"], make_default=make_default)
    )
    assert message.startswith("command line: --model.converters was removed")


def test_a_key_that_a_section_still_has_is_not_moved(tmp_path) -> None:
    # The toy tree has training.seed and training.compile, as torchtitan once had.
    path = tmp_path / "toy.toml"
    path.write_text("[training]\nseed = 3\ncompile = true\n")
    config = load_toml(path, make_default=make_default)
    assert (config.training.seed, config.training.compile) == (3, True)


def test_prefixes() -> None:
    assert moved("training.steps") == "" and moved("fault_tolerances.enable") == ""
    assert moved("float8.enable_fsdp_float8_all_gather") == moved("float8")
    assert dataclasses.is_dataclass(REAL.ExtTrainer.Config)
