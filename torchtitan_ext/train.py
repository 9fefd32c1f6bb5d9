"""Entry: ``torchrun --nproc-per-node 2 -m torchtitan_ext.train --job.config_file X.toml``."""

import os
import sys
import time

import torch
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import init_logger, logger

from torchtitan_ext import __version__
from torchtitan_ext import config as front
from torchtitan_ext.errors import UserError
from torchtitan_ext.trainer import ExtTrainer, default_config

DEBUG = "TORCHTITAN_EXT_TRACEBACK"
"""Environment variable: set to 1 to see the traceback of an error in the input."""


def run(argv: list[str]) -> None:
    """Train as the arguments and the TOML say."""
    init_logger()
    # One process is a world of its own: no launcher needed.
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    config = front.parse(argv, make_default=default_config)
    text = front.toml_text(config)
    logger.info(f"torchtitan_ext {__version__}, torch {torch.__version__}; the resolved config:\n{text}")
    sl.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    trainer: ExtTrainer | None = None
    try:
        trainer = _build(config)
        if config.checkpoint.create_seed_checkpoint:
            _save_seed(trainer)
        else:
            trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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
        run(sys.argv[1:])
    except UserError as error:
        if os.environ.get(DEBUG) == "1":
            raise
        # Every rank meets the same error. The others wait until the launcher ends them, so that
        # the line is printed once; an error of one rank alone is still printed.
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        # A peer may wait in a collective: leave without the process group's clean-up.
        os._exit(2)


if __name__ == "__main__":
    main()
