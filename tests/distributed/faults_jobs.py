"""What the processes of the fault tests do."""

from __future__ import annotations

import functools
import resource
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from tests.distributed import jobs
from torchtitan_ext.checkpoint import whole
from torchtitan_ext.errors import UserError

SMALL = ["--training.local_batch_size", "2", "--training.seq_len", "32", "--debug.seed", "1"]


class InfiniteGradient(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf


def poison(trainer: Any, *, steps: tuple[int, ...], rank: int = 0, kind: str = "nan") -> None:
    """Make the loss ("nan", "inf") or its gradient ("gradient") of one rank not finite at some steps."""
    inner = trainer.objective.loss

    def loss(*args: Any, **kwargs: Any) -> Any:
        value, metrics = inner(*args, **kwargs)
        if trainer.step in steps and dist.get_rank() == rank:
            value = InfiniteGradient.apply(value) if kind == "gradient" else value * float(kind)
        return value, metrics

    trainer.objective.loss = loss


def run_to_end(folder: str, args: list[str], change: Any = None, *, together: bool = True) -> dict[str, Any]:
    """Train; the losses, logged rows and warnings, or the line and exit code with which the run ended."""
    import logging

    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(level=logging.WARNING)
    logging.getLogger().addHandler(handler)
    trainer = jobs.build(folder, [*SMALL, *args])
    if change is not None:
        change(trainer)
    recorder = jobs.Recorder()
    trainer.metrics_processor.logger = recorder
    error: UserError | None = None
    try:
        trainer.train()
    except UserError as refused:
        error = refused
    result = {
        "error": None if error is None else str(error),
        "code": getattr(error, "exit_code", 2 if error else 0),
        "step": trainer.step,
        "loss": recorder.series("loss_metrics/global_avg_loss"),
        "grad_norm": recorder.series("grad_norm"),
        "rows": recorder.rows,
        "warnings": lines,
        "learning_rate": trainer.lr_schedulers.schedulers[0].get_last_lr()[0],
        "weights": jobs.weights(trainer) if error is None else {},
    }
    trainer.close()
    if together:
        jobs.leave_together(Path(folder))
    return result


def run_and_say(folder: str, args: list[str]) -> None:
    """:func:`run_to_end`; why it failed goes into a file: the queue of a killed process is not to be read."""
    try:
        error = run_to_end(folder, args)["error"]
    except BaseException as raised:
        error = repr(raised)
    if error is not None:
        (Path(folder) / f"error-{dist.get_rank() if dist.is_initialized() else 0}").write_text(error)


def poisoned(
    folder: str, args: list[str], *, steps: tuple[int, ...], rank: int = 0, kind: str = "nan"
) -> dict[str, Any]:
    return run_to_end(folder, args, functools.partial(poison, steps=steps, rank=rank, kind=kind))


def measured(folder: str, args: list[str]) -> dict[str, Any]:
    """Losses and gradient norms by step: what is logged, and what the guard measures."""
    seen: dict[int, tuple[float, float]] = {}

    def change(trainer: Any) -> None:
        class Watch:
            def __init__(self, name: str) -> None:
                self.values: dict[int, float] = {}
                seen[name] = self.values  # type: ignore[index]

            def see(self, step: int, value: float) -> None:
                self.values[step] = value

        trainer.guard._loss_spikes, trainer.guard._norm_spikes = Watch("loss"), Watch("grad_norm")

    result = run_to_end(folder, args, change)
    return {"logged": {name: result[name] for name in ("loss", "grad_norm")}, "measured": seen}


def asleep(folder: str, args: list[str], *, step: int) -> dict[str, Any]:
    """Rank 1 sleeps in the middle of a step."""

    def sleep(trainer: Any) -> None:
        if dist.get_rank() == 1:
            time.sleep(300)

    change = functools.partial(before_step, step=step, action=sleep)
    return run_to_end(folder, args, change, together=False)


def before_step(trainer: Any, step: int, action: Any) -> None:
    """Do something in the middle of every step from ``step`` on."""
    inner = trainer.objective.loss

    def loss(*args: Any, **kwargs: Any) -> Any:
        if trainer.step >= step:
            action(trainer)
        return inner(*args, **kwargs)

    trainer.objective.loss = loss


def with_small_files(folder: str, args: list[str], *, rank: int, step: int, limit: int) -> dict[str, Any]:
    """From a step on, one rank's file system refuses to write more than so many bytes into a file."""

    def refuse(trainer: Any) -> None:
        trainer.checkpointer.maybe_wait_for_saving()
        if dist.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    result = run_to_end(folder, args, functools.partial(before_step, step=step, action=refuse))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return result


def on_small_disk(folder: str, args: list[str], *, mount: str, megabytes: int) -> dict[str, Any]:
    """The checkpoints lie on a file system of their own that has room for one."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", mount], check=True)
    try:
        result = run_to_end(folder, ["--checkpoint.folder", mount, *args])
        result["left"] = sorted(path.name for path in Path(mount).iterdir())
        return result
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def slow_writer(seconds: float) -> None:
    """Every rank's data files take so long to write."""
    write = FileSystemWriter.write_data

    def slow(self: Any, plan: Any, planner: Any) -> Any:
        time.sleep(seconds)
        return write(self, plan, planner)

    FileSystemWriter.write_data = slow


def whole_at_each_step(folder: str, args: list[str], *, seconds: float) -> dict[str, Any]:
    """Which checkpoints are whole in the middle of each step, while data files are slow to write."""
    slow_writer(seconds)
    seen: list[list[int]] = []

    def look(trainer: Any) -> None:
        path = Path(folder) / "out" / "checkpoint"
        seen.append([step for step in whole.steps(path) if whole.damage(path / f"step-{step}") is None])

    result = run_to_end(folder, args, functools.partial(before_step, step=0, action=look))
    return {**result, "whole": seen}


def stopped_in_export(folder: str, args: list[str]) -> None:
    """The last save in Hugging Face form halts with its data written and its index cut short."""
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as consolidate

    def cut(output_dir: str, *rest: Any, **kwargs: Any) -> None:
        (Path(output_dir) / "model.safetensors.index.json").write_text('{"metadata": {"tot')
        time.sleep(300)

    consolidate._write_overall_metadata_file = cut
    run_to_end(folder, args)


def asynchronous_kept(folder: str, args: list[str]) -> dict[str, Any]:
    """The weights of step 1, whose asynchronous save is still under way while step 2 changes them."""
    slow_writer(0.5)
    kept: dict[str, torch.Tensor] = {}

    def change(trainer: Any) -> None:
        save = trainer.checkpointer.save

        def copying(step: int, last_step: bool = False) -> bool:
            if step == 1:
                kept.update(jobs.weights(trainer))
            return save(step, last_step)

        trainer.checkpointer.save = copying

    run_to_end(folder, args, change)
    return {"kept": kept}


def resumed_weights(folder: str, args: list[str]) -> dict[str, torch.Tensor]:
    trainer = jobs.build(folder, [*SMALL, *args])
    trainer.checkpointer.load(step=trainer.config.checkpoint.load_step)
    result = jobs.weights(trainer)
    trainer.close()
    jobs.leave_together(Path(folder))
    return result
