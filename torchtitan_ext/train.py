"""Entry: ``torchrun --nproc-per-node 2 -m torchtitan_ext.train --job.config_file X.toml``.

Exit codes are those of :mod:`torchtitan_ext.stopping` and
:mod:`torchtitan_ext.faults.errors`, and 1 for a failure. With ``--validate`` the run is
only checked, on any machine (:mod:`torchtitan_ext.planning.fake_run`).
"""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Generator

import torch
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import init_logger, logger

from torchtitan_ext import __version__, startup, stopping
from torchtitan_ext import config as front
from torchtitan_ext.errors import UserError
from torchtitan_ext.trainer import ExtTrainer, default_config

DEBUG = "TORCHTITAN_EXT_TRACEBACK"
"""Environment variable: set to 1 to see the traceback of an error in the input."""

HELP = f"""usage: python -m torchtitan_ext.train --job.config_file X.toml [--section.key value ...]
       python -m torchtitan_ext.train --validate --job.config_file X.toml [--nodes N | --world-size W]

  --job.config_file X.toml  read this file; every option further below overrides it
  --validate                build the run for its real number of ranks and make one step on tensors without
                            data, on any machine; nothing is read or written
  --nodes N                 with --validate: so many nodes, of as many ranks as the file states (else 8)
  --world-size W            with --validate: so many ranks; without either, what the file states
  -h, --help                show all of this; with --job.config_file or --model.name, the method's keys too

On several GPUs: ./launch/run_train.sh and ./launch/run_multinode.sh. {DEBUG}=1 (environment) shows
the traceback behind an error in the input.
"""
"""The options that are no keys of the config; :mod:`torchtitan_ext.config` prints those that are."""


def run(argv: list[str]) -> int:
    """Train as the arguments and the TOML say; the exit code."""
    if "-h" in argv or "--help" in argv:
        print(HELP)
    if "--validate" in argv:
        from torchtitan_ext.planning import fake_run

        fake_run.run(argv)
        return 0
    # Before anything slow: a stop that comes while the model is built ends before the first step.
    stopping.REQUEST.install()
    init_logger()
    # One process is a world of its own: no launcher needed.
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    config = front.parse(argv, make_default=default_config)
    text = front.toml_text(config)
    logger.info(f"torchtitan_ext {__version__}, torch {torch.__version__}; the resolved config:\n{text}")
    _say_restart()
    startup.check(config)
    sl.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    trainer: ExtTrainer | None = None
    code = 0
    with _refused_writes(config.dump_folder):
        try:
            trainer = _build(config)
            if config.checkpoint.create_seed_checkpoint:
                _save_seed(trainer)
            else:
                trainer.train()
        except stopping.Stopped as stopped:
            code = int(stopped.code or 0)
        finally:
            if trainer is not None:
                trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


def _say_restart() -> None:
    count, most = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if count is not None and count != "0":
        logger.info(f"Restart {count} of {most}: going on from the newest whole checkpoint, if there is one.")


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What the system says of a disk that is full, over its quota, read-only or broken."""


@contextlib.contextmanager
def _refused_writes(folder: str) -> Generator[None]:
    """TensorBoard, the resolved config and the like find the disk full as a checkpoint does, in a line.

    Raises:
        UserError: the disk takes nothing more.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK:
            raise
        where = f": {error.filename}" if error.filename else ""
        raise UserError(
            f"[job] dump_folder = {folder!r} cannot be written: {error.strerror}{where}"
        ) from error


def _build(config: ExtTrainer.Config) -> ExtTrainer:
    try:
        return config.build()
    except (ValueError, NotImplementedError) as error:
        # torchtitan's own refusals of a config (degrees, sequence length, tying with pipelines).
        if isinstance(error, UserError):
            raise
        raise UserError(str(error)) from error


def _save_seed(trainer: ExtTrainer) -> None:
    if int(os.environ["WORLD_SIZE"]) != 1 or not trainer.config.checkpoint.enable:
        raise UserError(
            "[checkpoint] create_seed_checkpoint needs one process and [checkpoint] enable = true"
        )
    trainer.checkpointer.save(curr_step=0, last_step=True)
    logger.info("Created seed checkpoint")


def main() -> None:
    """Run; an error in the input ends with one line and exit code 2."""
    try:
        code = run(sys.argv[1:])
    except UserError as error:
        if os.environ.get(DEBUG) == "1":
            raise
        # Every rank meets the same error. The others wait until the launcher ends them, so that
        # the line is printed once; an error of one rank alone is still printed.
        stopping.release()
        if os.environ.get("RANK", "0") != "0":
            time.sleep(10)
            if isinstance(error, startup.SharedError):
                os._exit(error.exit_code)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        # A peer may wait in a collective: leave without the process group's clean-up.
        os._exit(getattr(error, "exit_code", stopping.USER_ERROR))
    sys.exit(code)


if __name__ == "__main__":
    main()
