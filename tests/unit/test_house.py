"""Arrows between rooms, the torchtitan signatures we rely on, and words that must not appear."""

from __future__ import annotations

import ast
import inspect
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "torchtitan_ext"
SHARED_BASE_ROOMS = {("wedlm", "alodlm"), ("mdlm", "tdlm")}
"""Pairs of methods of which the second may import the first."""


def imports(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def method_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["torchtitan_ext", "methods"] and len(parts) > 2 else None


def test_shared_rooms_do_not_import_methods():
    for path in files():
        if PACKAGE / "methods" in path.parents:
            continue
        for name in imports(path):
            assert method_of(name) is None, f"{path.relative_to(ROOT)} imports {name}"


def test_methods_do_not_import_each_other():
    for path in files():
        if PACKAGE / "methods" not in path.parents or path.parent == PACKAGE / "methods":
            continue
        own = path.relative_to(PACKAGE / "methods").parts[0]
        for name in imports(path):
            other = method_of(name)
            allowed = other in (None, own) or (other, own) in SHARED_BASE_ROOMS
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_nothing_in_torchtitan_imports_us_and_tools_are_leaves():
    for path in files():
        for name in imports(path):
            assert not name.startswith(("tools.", "tests.")), f"{path.relative_to(ROOT)} imports {name}"


def test_registry_lists_exactly_the_method_folders():
    from torchtitan_ext.registry import METHODS

    folders = {p.name for p in (PACKAGE / "methods").iterdir() if (p / "__init__.py").is_file()}
    assert set(METHODS) == folders


@pytest.mark.parametrize(
    "method", ["alodlm", "ar", "block_diffusion", "looped", "mdlm", "t2mlr", "tdlm", "tidar", "wedlm"]
)
def test_method_folder_has_the_usual_files(method):
    folder = PACKAGE / "methods" / method
    for name in ("README.md", "__init__.py", "config_registry.py", "model.py", "objective.py", "decode.py"):
        assert (folder / name).is_file(), f"{method} lacks {name}"


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_signatures_of_torchtitan_that_we_rely_on():
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.validate import Validator
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.trainer import Trainer

    assert parameters(Trainer.batch_generator) == ["self", "data_iterable"]
    assert parameters(Trainer.train_step) == ["self", "data_iterator"]
    assert parameters(Trainer.post_dataloading_process) == ["self", "input_dict", "labels"]
    assert parameters(Trainer.forward_backward_step) == [
        "self",
        "input_dict",
        "labels",
        "global_valid_tokens",
    ]
    assert parameters(Trainer._forward_backward_body) == [
        "self",
        "inputs",
        "labels",
        "global_valid_tokens",
        "extra_kwargs",
    ]
    assert parameters(CheckpointManager._find_load_step) == ["self", "folder"]
    assert parameters(CheckpointManager.dcp_load) == [
        "self",
        "state_dict",
        "checkpoint_id",
        "from_hf",
        "from_quantized",
    ]
    for save in (CheckpointManager._save, CheckpointManager._should_save):
        assert parameters(save) == ["self", "curr_step", "last_step"]
    for argument_free in (
        CheckpointManager._purge_stale_checkpoints,
        CheckpointManager._wait_for_saving,
        Trainer.should_continue_training,
    ):
        assert parameters(argument_free) == ["self"]
    assert parameters(CheckpointManager.dcp_save)[:3] == ["self", "state_dict", "checkpoint_id"]
    assert parameters(MetricsProcessor.log)[1:5] == [
        "step",
        "global_avg_loss",
        "global_max_loss",
        "grad_norm",
    ]
    assert parameters(Validator.validate) == ["self", "model_parts", "step"]
    assert parameters(Decoder.forward) == ["self", "tokens", "positions", "attention_masks"]
    assert "dp_mesh_dims" in parameters(apply_fsdp_to_decoder)
    assert "loss_inputs" in parameters(ChunkedLossWrapper.__call__)


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def test_repository_speaks_of_the_project_alone():
    # Built from parts, so that this file does not contain what it looks for.
    forbidden = ["/" + "work/", "/" + "root/", "/" + "home/", "pypi." + "org", "git" + "hub.com/user"]
    for path in tracked_files():
        if path.suffix in {".png", ".pt"}:
            continue
        text = path.read_text(errors="replace")
        for word in forbidden:
            assert word not in text, f"{path.relative_to(ROOT)} contains {word!r}"
