"""Turn a checkpoint into a Hugging Face folder.

    python tools/convert_to_hf.py outputs/ HF_DIR --dtype bfloat16
    python tools/convert_to_hf.py outputs/checkpoint/step-1000 FILE.safetensors --adapter

CKPT_DIR is a ``step-N`` folder, a folder of them or a dump folder: the newest whole step is taken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_ext import registry
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.checkpoint.convert import ModelChoice, convert_to_hf
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.errors import UserError, run_cli


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ckpt_dir", metavar="CKPT_DIR", help="step-N, a folder of them, or a dump folder")
    parser.add_argument("hf_dir", metavar="HF_DIR", help="folder to write")
    parser.add_argument(
        "--dtype", help=f"dtype of the weights: {', '.join(hf_folder.DTYPES)} (default: as in the checkpoint)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", help="largest weight file, as in 200MB (default: %(default)s)"
    )
    parser.add_argument("--model.flavor", dest="flavor", help="only for a checkpoint without config.toml")
    parser.add_argument("--model.name", dest="name", help="only for a checkpoint without config.toml")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only what the method adds to its frozen backbone, as one safetensors file at HF_DIR",
    )
    parser.add_argument(
        "--self-contained",
        action=argparse.BooleanOptionalAction,
        help="add the code with which transformers opens the folder without this package "
        "(default: where there is such code for the method)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace HF_DIR whatever it holds")
    return parser


def write_adapter(args: argparse.Namespace) -> Path:
    """The method's own parameters alone.

    Errors: a method that has no adapter, a file that is there.
    """
    target = Path(args.hf_dir)
    if target.exists() and not args.overwrite:
        raise UserError(f"{target} exists; --overwrite replaces it")
    loaded = load_model(args.ckpt_dir)
    module = None if registry.is_torchtitan_model(loaded.method) else registry.method(loaded.method)
    export = getattr(module, "export_adapter", None)
    if export is None:
        raise UserError(f"--adapter: method {loaded.method!r} trains its whole model")
    return export(loaded.model, target)


def main(argv: list[str] | None = None) -> None:
    """Convert as the command line says."""
    args = parser().parse_args(argv)
    if args.adapter:
        print(f"wrote {write_adapter(args)}")
        return
    if args.name and not args.flavor:
        raise UserError("--model.name also needs --model.flavor")
    choice = ModelChoice(name=args.name or "ar", flavor=args.flavor) if args.flavor else None
    folder = convert_to_hf(
        args.ckpt_dir,
        args.hf_dir,
        dtype=args.dtype,
        max_shard_bytes=hf_folder.parse_bytes(args.max_shard_size),
        choice=choice,
        self_contained=args.self_contained,
        overwrite=args.overwrite,
    )
    print(f"wrote {folder}")


if __name__ == "__main__":
    run_cli(main)
