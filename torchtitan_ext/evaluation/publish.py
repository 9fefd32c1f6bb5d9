"""Where the results of an evaluation go besides the terminal: its picture, and TensorBoard."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_ext import metrics
from torchtitan_ext.checkpoint.load import LoadedModel
from torchtitan_ext.errors import UserError


def add_argument(add: Any) -> None:
    """``--tensorboard``; None tells that it was not given."""
    add(
        "--tensorboard",
        nargs="?",
        const="",
        metavar="DIR",
        help="write the table's numbers and its picture there, at the checkpoint's step "
        "(default: the run's own TensorBoard folder)",
    )


def check_given(args: argparse.Namespace) -> None:
    """What can be refused before a model is loaded."""
    if args.tensorboard and Path(args.tensorboard).exists() and not Path(args.tensorboard).is_dir():
        raise UserError(f"--tensorboard {args.tensorboard} is a file, expected a folder")


def settle(args: argparse.Namespace, loaded: LoadedModel) -> None:
    """Put the folder into ``args``, before anything is measured.

    Errors: UserError where there is no run whose folder it could be.
    """
    if args.tensorboard is not None:
        args.tensorboard = metrics.evaluation_folder(
            loaded.path, args.tensorboard, folder=loaded.config.metrics.save_tb_folder
        )


def publish(
    args: argparse.Namespace,
    loaded: LoadedModel,
    rows: Sequence[Mapping[str, Any]],
    *,
    names: Sequence[str],
    prefix: str,
    draw: Callable[[Path], None] | None = None,
) -> None:
    """Draw the picture that ``--png`` asks for, and write what ``--tensorboard`` does.

    ``rows``: the table, ``names`` the columns that say which row it is. ``prefix``: of the tags.
    """
    if args.png is not None and draw is not None:
        draw(args.png)
    if args.tensorboard is None:
        return
    scalars = metrics.scalars_of(rows, names=names, prefix=prefix)
    with tempfile.TemporaryDirectory() as scratch:
        picture = args.png
        if picture is None and draw is not None and importlib.util.find_spec("matplotlib") is not None:
            picture = Path(scratch) / "picture.png"
            draw(picture)
        pictures = {} if picture is None else {prefix: picture}
        step = metrics.step_of(loaded.path) or 0
        metrics.write_evaluation(args.tensorboard, step=step, scalars=scalars, pictures=pictures)
    print(f"TensorBoard: {len(scalars)} numbers in {args.tensorboard}", file=sys.stderr, flush=True)
