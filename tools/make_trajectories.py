"""Record how a masked diffusion model answers prompts, one token a forward: what TDLM is trained on.

    python tools/make_trajectories.py outputs/ --prompts chain_sum --count 3500 --response-length 16
    python tools/make_trajectories.py HF_DIR --prompts prompts.txt --response-length 128 --out outputs/t
    torchrun --nproc_per_node 8 tools/make_trajectories.py HF_DIR --prompts chat.jsonl --count 3500 \
        --response-length 256 --batch-size 64 --dtype bfloat16 --out outputs/trajectories

--prompts is a task, a .txt file of one prompt a line, or conversations (.jsonl, .parquet or a hub name).
Parquet shards and manifest.json go to --out, which is a data set: [dataloader] dataset = "trajectories",
dataset_path = OUT. Killed, the same command goes on; any number of workers makes the same files, and so
does another batch size where no two confidences are within its rounding of each other. On a CPU a worker
uses one thread, so start one a core. The summary goes to stdout, the rest to stderr.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist

from torchtitan_ext.checkpoint.hf_folder import DTYPES
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.data.tasks import TASKS
from torchtitan_ext.device import default_device, usable_device
from torchtitan_ext.errors import UserError, run_cli, unknown
from torchtitan_ext.evaluation import tasks
from torchtitan_ext.progress import plain_line
from torchtitan_ext.trajectories import make, prompts

LONGEST_WAIT = datetime.timedelta(days=30)
"""Workers end at different times, and the first waits for the last."""

SECONDS_BETWEEN_LINES = 30


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("path", metavar="CKPT_OR_HF_DIR", help="step-N, a folder of them, a dump folder, or a HF folder")
    add("--step", type=int, help="step to load instead of the newest")
    add("--prompts", required=True, metavar="SOURCE", help=f"{', '.join(TASKS)}, a path, or a hub name")
    add("--processor", default="auto", help="how a record becomes a conversation (default: by its fields)")
    add("--count", type=int, help="prompts (default: all of a path)")
    add("--response-length", type=int, required=True, help="tokens of every response")
    add("--max-prompt-tokens", type=int, help="longer prompts of a path are left out (default: what fits)")
    add("--block-size", type=int, help="tokens of a block (default: the model's, else 32)")
    add("--seed", type=int, default=0, help="of the choice of prompts (default: %(default)s)")
    add("--shard-size", type=int, default=256, help="prompts of a file (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="prompts that run together (default: %(default)s)")
    add("--out", type=Path, default=Path("outputs/trajectories"), help="default: %(default)s")
    for knob in tasks.KNOBS:
        flag, kind = f"--{knob.replace('_', '-')}", tasks.knob_type(knob)
        add(flag, type=kind, help=f"{knob} of the task instead of the checkpoint's")
    add("--dtype", default="float32", help=f"of the weights: {', '.join(DTYPES)} (default: %(default)s)")
    add("--device", help="default: the accelerator where there is one, else cpu")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Make trajectories as the command line says."""
    args = parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s", force=True
    )
    if args.dtype not in DTYPES:
        raise unknown("--dtype", args.dtype, DTYPES)
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is a file, expected a folder")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = usable_device(worker_device(args.device or default_device()))
    make.fix_threads(device)
    loaded = load_model(args.path, dtype=DTYPES[args.dtype], device=device, step=args.step)
    denoiser = make.denoiser_of(loaded)
    recipe = make.Recipe(
        response_length=args.response_length,
        block_size=denoiser.block_size if args.block_size is None else args.block_size,
        mask_id=denoiser.mask_id,
        prediction=denoiser.prediction,
        stop_ids=sorted(loaded.stop_ids),
        shard_size=args.shard_size,
        dtype=args.dtype,
    )
    chosen = prompts.open_prompts(
        loaded,
        args.prompts,
        count=args.count,
        seed=args.seed,
        longest=longest_prompt(args, context=denoiser.context),
        processor=args.processor,
        knobs={knob: getattr(args, knob) for knob in tasks.KNOBS if getattr(args, knob) is not None},
    )
    with workers(world):
        identity = make.make(
            loaded,
            chosen,
            args.out,
            recipe=recipe,
            batch_size=args.batch_size,
            rank=rank,
            world=world,
            on_batch=lines(len(chosen.tokens), world=world),
        )
    if rank == 0:
        print(summary(args.out, make.finish(args.out, identity)))


def worker_device(name: str) -> str:
    """The device of this worker: of several accelerators the one with its number on this machine."""
    local = os.environ.get("LOCAL_RANK")
    return name if local is None or ":" in name or name == "cpu" else f"{name}:{local}"


def longest_prompt(args: argparse.Namespace, *, context: int) -> int:
    """Tokens of the longest prompt that is answered.

    Errors: UserError for a limit that leaves no room for the response.
    """
    room = context - args.response_length
    if args.max_prompt_tokens is None:
        return room
    if not 1 <= args.max_prompt_tokens <= room:
        raise UserError(
            f"--max-prompt-tokens is {args.max_prompt_tokens}, expected 1 to {room} (the model's context of "
            f"{context} tokens without the response)"
        )
    return args.max_prompt_tokens


@contextmanager
def workers(world: int) -> Generator[None]:
    """Wait at the end for all workers, where there are several."""
    if world == 1:
        yield
        return
    dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def lines(total: int, *, world: int) -> make.OnBatch:
    """Where there is no bar, a line from time to time; worker 0 stands for all of them."""
    about = f" (worker 0 of {world})" if world > 1 else ""
    done, last = 0, time.monotonic()

    def line(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            plain_line(f"{done} of about {-(-total // world)} trajectories{about}")

    return line


def summary(folder: Path, result: dict[str, Any]) -> str:
    """What came out, in one line."""
    text = (
        f"{folder}: {result['trajectories']} trajectories of {result['steps']} steps in {result['shards']} "
        f"shards, {result['shortest']} to {result['longest']} tokens with their prompts, "
        f"{result['ended']} with a stop token, {result['mean_answer_tokens']:.1f} tokens up to it"
    )
    if result["accuracy"] is None:
        return text
    return f"{text}; {result['right']} answers right ({result['accuracy']:.2%})"


if __name__ == "__main__":
    run_cli(main)
