"""lm-eval's command line with this project's model and local tasks.

    python -m torchtitan_ext.evaluation.lm_eval --model torchtitan_ext \\
        --model_args checkpoint=outputs/ --tasks local_arc_easy --metadata data=FOLDER

Everything is as ``lm_eval`` has it; without ``--include_path`` the project's tasks are found too.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch.distributed as dist

from torchtitan_ext.errors import UserError, run_cli


def check_installed() -> None:
    """Errors: UserError when lm-eval, or something that it needs, is missing."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("this needs the package lm-eval (pip install 'torchtitan-ext[eval]')")
    try:
        importlib.import_module("lm_eval.evaluator")
    except ImportError as error:
        raise UserError(f"lm-eval is not installed whole: {error}") from error


def main() -> None:
    """Run ``lm_eval`` with the arguments of this process."""
    check_installed()
    from lm_eval.__main__ import cli_evaluate

    from torchtitan_ext.evaluation import lm_eval_model  # noqa: F401 - registers the model
    from torchtitan_ext.evaluation.local_tasks import FOLDER

    runs = len(sys.argv) > 2 and sys.argv[1] not in ("ls", "validate")
    if runs and not any(argument.startswith("--include_path") for argument in sys.argv):
        sys.argv += ["--include_path", str(FOLDER)]
    try:
        cli_evaluate()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    run_cli(main)
