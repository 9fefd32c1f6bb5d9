"""What the processes of the launcher's tests do."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed import jobs
from torchtitan_ext import config as front
from torchtitan_ext import launch, startup, stopping
from torchtitan_ext.errors import UserError
from torchtitan_ext.trainer import default_config


def launched(argv: list[str], log: str, env: dict[str, str] | None = None) -> int:
    """The launcher in this process; its exit code. All output goes into ``log``."""
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(env or {})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    try:
        launch.main(argv)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("the launcher returned")


def _signal_at(trainer: Any, moment: str, number: int) -> None:
    """Signal this process inside step N ("step N"), or in the validation or the save after it."""
    kind, _, step = moment.partition(" ")

    def inside(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        sent: list[int] = []

        def signalled(*args: Any, **kwargs: Any) -> Any:
            if trainer.step == int(step) and not sent:
                sent.append(number)
                os.kill(os.getpid(), number)
            return real(*args, **kwargs)

        setattr(owner, name, signalled)

    if kind == "step":
        inside(trainer, "forward_backward_step")
    elif kind == "validation":
        inside(trainer.validator, "_loss")
    else:
        assert kind == "save"
        inside(trainer.checkpointer, "dcp_save")


def train_until_stopped(
    folder: str,
    args: list[str],
    *,
    moment: str = "",
    rank: int = 0,
    number: int = signal.SIGTERM,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Losses by step and the exit code, with a signal to one rank at a moment or after some seconds."""
    stopping.REQUEST.install()
    trainer = jobs.build(folder, args)
    recorder = jobs.Recorder()
    trainer.metrics_processor.logger = recorder
    lines: list[str] = []
    stopping.logger.info = lambda text, *args: lines.append(text % args if args else text)
    code = 0
    mine = int(os.environ["RANK"]) == rank
    if mine and moment == "before":
        os.kill(os.getpid(), number)
    elif mine and moment:
        _signal_at(trainer, moment, number)
    elif mine and seconds is not None:
        threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
    begin = time.perf_counter()
    try:
        trainer.train()
    except stopping.Stopped as stopped:
        code = int(stopped.code or 0)
    seconds = time.perf_counter() - begin
    jobs.finish(trainer)
    return {
        "loss": recorder.series("loss_metrics/global_avg_loss"),
        "code": code,
        "lines": [line for line in lines if line.startswith("Stop")],
        "given_up": [line for line in lines if line.startswith("Validation of step")],
        "validated": list(recorder.series("validation_metrics/loss")),
        "seconds": seconds,
        "left": sorted(p.name for p in Path(folder).glob("out/checkpoint/*")),
    }


def flag_cost(rounds: int = 300) -> float:
    """Microseconds that the question whether to stop takes between two steps."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    stopper = stopping.Stopper(stopping.StopRequest(), timeout_s=60)
    for _ in range(20):
        stopper.asked()
    begin = time.perf_counter()
    for _ in range(rounds):
        stopper.asked()
    cost = (time.perf_counter() - begin) / rounds * 1e6
    dist.barrier()
    dist.destroy_process_group()
    return cost


def meeting(
    folder: str, args: list[str], *, by_rank: dict[int, list[str]], torch_version: str = ""
) -> dict[str, str]:
    """The start checks; a rank may have other arguments, and the last one another torch."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    argv = ["--model.name", "ar", "--job.dump_folder", f"{folder}/out", *args, *by_rank.get(rank, [])]
    config = front.parse(argv, make_default=default_config)
    if torch_version and rank == world - 1:
        startup.torch.__version__ = torch_version  # type: ignore[misc]
    error = kind = ""
    with contextlib.suppress(SystemExit):
        try:
            startup.check(config)
        except UserError as refused:
            error, kind = str(refused), type(refused).__name__
    return {"error": error, "kind": kind}


def meeting_on_hosts(folder: str, args: list[str], *, hosts: list[str]) -> dict[str, str]:
    """The start checks where rank r is the only one of a host, which is in the folder ``hosts[r]``."""
    rank = int(os.environ["RANK"])
    os.chdir(os.path.join(folder, hosts[rank]))
    os.environ["LOCAL_RANK"] = "0"
    startup.socket.gethostname = lambda: f"node{rank}"  # type: ignore[assignment]
    startup.sees.__kwdefaults__["limit_s"] = 0.5  # type: ignore[index]
    return meeting(folder, ["--job.dump_folder", "./out", *args], by_rank={})


class SlowReader(dist.PrefixStore):
    """A store through which this rank reads a second later than the others."""

    def wait(self, *args: Any) -> None:
        time.sleep(1)
        super().wait(*args)


def meeting_slowly(folder: str, args: list[str]) -> dict[str, str]:
    """The start checks where all ranks but the first, which serves the store, read its verdict late."""
    dist.PrefixStore = SlowReader  # type: ignore[misc]
    return meeting(folder, args, by_rank={})


def meeting_alone(folder: str, args: list[str]) -> dict[str, str]:
    """The start checks of one rank of two, the other of which never starts."""
    os.environ["WORLD_SIZE"] = "2"
    return meeting(folder, args, by_rank={})
