"""Turn a Hugging Face folder into a checkpoint that training can start from.

    python tools/convert_from_hf.py HF_DIR CKPT_DIR --model.flavor smollm2-135M
    python tools/convert_from_hf.py HF_DIR CKPT_DIR --model.flavor hf
    python tools/convert_from_hf.py HF_DIR CKPT_DIR --model.name t2mlr --t2mlr.start 13 --t2mlr.end 18
    python tools/convert_from_hf.py ./ALoDLM-1.7B CKPT_DIR      # a folder of the paper's authors

Then set ``checkpoint.initial_load_path = "CKPT_DIR"``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_ext import config as front
from torchtitan_ext.checkpoint.convert import convert_from_hf
from torchtitan_ext.checkpoint.published import method_of
from torchtitan_ext.checkpoint.published.writing import convert_published
from torchtitan_ext.errors import UserError, run_cli
from torchtitan_ext.trainer import default_config


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hf_dir", metavar="HF_DIR", help="folder with config.json and safetensors")
    parser.add_argument("ckpt_dir", metavar="CKPT_DIR", help="checkpoint folder to write")
    parser.add_argument(
        "--model.flavor",
        dest="flavor",
        default="hf",
        help="backbone flavor; 'hf' takes family and sizes from config.json (default: %(default)s)",
    )
    parser.add_argument(
        "--model.name",
        dest="name",
        help="method, with options of its own section (default: the folder's, else ar)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters that the method adds (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace CKPT_DIR whatever it holds")
    return parser


def method_section(name: str, options: list[str]) -> dict[str, Any]:
    """What the options say of the method's own section, checked as a run's command line."""
    foreign = [word for word in options if word.startswith("--") and not word.startswith(f"--{name}.")]
    if foreign:
        raise UserError(f"unknown option {foreign[0]} (allowed beside the tool's own: --{name}.*)")
    config = front.parse(["--model.name", name, *options], make_default=default_config)
    return asdict(getattr(config, name)) if options else {}


def from_authors(args: argparse.Namespace, rest: list[str], *, method: str) -> Path:
    """Convert a folder of a method's authors, which says itself what its section and sizes are.

    Errors: options that would say it again.
    """
    given = [*rest, *(["--model.flavor"] if args.flavor != "hf" else [])]
    if given:
        raise UserError(
            f"{args.hf_dir} is a folder of {method}'s authors and says what its section and sizes are; "
            f"leave out {given[0]}"
        )
    return convert_published(args.hf_dir, args.ckpt_dir, overwrite=args.overwrite)


def main(argv: list[str] | None = None) -> None:
    """Convert as the command line says."""
    args, rest = parser().parse_known_args(argv)
    method = method_of(args.hf_dir)
    if method is not None and args.name in (None, method):
        print(f"wrote {from_authors(args, rest, method=method)}")
        return
    if rest and not args.name:
        raise UserError(f"unknown option {rest[0]}; options of a method's section need --model.name")
    folder = convert_from_hf(
        args.hf_dir,
        args.ckpt_dir,
        flavor=args.flavor,
        name=args.name,
        section=method_section(args.name, rest) if args.name else None,
        seed=args.seed,
        overwrite=args.overwrite,
    )
    print(f"wrote {folder}")


if __name__ == "__main__":
    run_cli(main)
