"""Turn a Hugging Face folder into a checkpoint that training can start from.

    python tools/convert_from_hf.py HF_DIR CKPT_DIR --model.flavor smollm2-135M
    python tools/convert_from_hf.py HF_DIR CKPT_DIR --model.flavor hf

Then set ``checkpoint.initial_load_path = "CKPT_DIR"``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torchtitan_ext.checkpoint.convert import convert_from_hf
from torchtitan_ext.errors import run_cli


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
    parser.add_argument("--model.name", dest="name", default="ar", help="method (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace CKPT_DIR whatever it holds")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Convert as the command line says."""
    args = parser().parse_args(argv)
    folder = convert_from_hf(
        args.hf_dir, args.ckpt_dir, flavor=args.flavor, name=args.name, overwrite=args.overwrite
    )
    print(f"wrote {folder}")


if __name__ == "__main__":
    run_cli(main)
