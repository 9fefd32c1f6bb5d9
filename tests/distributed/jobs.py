"""What the processes of a distributed test do."""

from __future__ import annotations

import functools
import logging
import os
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.trainer as trainer_module
from torch.distributed.tensor import DTensor

import torchtitan_ext  # noqa: F401  (installs the CPU device before torchtitan is imported)
from torchtitan_ext import config as front
from torchtitan_ext.trainer import ExtTrainer, default_config

CONFIG = """
[model]
name = "ar"
flavor = "smollm2-debug"

[training]
local_batch_size = 8
seq_len = 64
steps = 5
mixed_precision_param = "float32"

[optimizer]
lr = 3e-3

[lr_scheduler]
warmup_steps = 2

[activation_checkpoint]
mode = "none"

[dataloader]
dataset = "stdlib"

[metrics]
log_freq = 1

[debug]
enable_structured_logging = false
"""


class Recorder:
    """Stands in for TensorBoard and keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None: ...

    def series(self, name: str) -> dict[int, float]:
        return {step: float(row[name]) for step, row in self.rows if name in row}


def written(folder: str, toml: str) -> Path:
    """The TOML as a file; every rank writes it, and none may read what another has just begun to write."""
    path = Path(folder) / "config.toml"
    own = path.with_name(f"config.{os.getpid()}.toml")
    own.write_text(toml)
    own.replace(path)
    return path


def build(folder: str, args: list[str], *, toml: str = CONFIG) -> ExtTrainer:
    """A trainer for the TOML and the arguments, with its dump folder inside ``folder``."""
    torch.set_num_threads(1)
    # The loop's closing sleep of two seconds is for ranks on other machines.
    trainer_module.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    logging.getLogger().setLevel(logging.WARNING)
    path = written(folder, toml)
    argv = ["--job.config_file", str(path), "--job.dump_folder", f"{folder}/out", *args]
    config = front.parse(argv, make_default=default_config)
    return config.build()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(trainer: ExtTrainer) -> dict[str, torch.Tensor]:
    """All parameters in full, by name."""
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): full(parameter)
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
    }


def finish(trainer: ExtTrainer) -> None:
    trainer.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def initial_weights(folder: str, args: list[str], toml: str = CONFIG) -> dict[str, torch.Tensor]:
    trainer = build(folder, args, toml=toml)
    result = weights(trainer)
    finish(trainer)
    return result


def train(
    folder: str,
    args: list[str],
    toml: str = CONFIG,
    with_weights: bool = False,
    objective: Any = None,
    change: Any = None,
) -> dict[str, Any]:
    """Losses and gradient norms by step (and the final weights); ``change`` is applied to the trainer."""
    trainer = build(folder, args, toml=toml)
    trainer.objective = objective or trainer.objective
    if change is not None:
        change(trainer)
    recorder = Recorder()
    trainer.metrics_processor.logger = recorder
    trainer.train()
    result: dict[str, Any] = {
        "loss": recorder.series("loss_metrics/global_avg_loss"),
        "grad_norm": recorder.series("grad_norm"),
        "rows": recorder.rows,
        "seen": getattr(trainer.objective, "seen", None),
    }
    if with_weights:
        result["weights"] = weights(trainer)
    finish(trainer)
    return result


def gradients(
    folder: str, args: list[str], toml: str = CONFIG, objective: Any = None, change: Any = None
) -> dict[str, torch.Tensor]:
    """Unclipped gradients of the first step, in full, by name."""
    trainer = build(folder, [*args, "--training.max_norm", "1e9"], toml=toml)
    trainer.objective = objective or trainer.objective
    trainer.checkpointer.load(step=-1)
    if change is not None:
        change(trainer)
    trainer.step = 1
    captured: dict[str, torch.Tensor] = {}

    def capture(*_: Any) -> None:
        for part in trainer.model_parts:
            for name, parameter in part.named_parameters():
                if parameter.grad is not None:
                    captured[name.replace("_checkpoint_wrapped_module.", "")] = full(parameter.grad)

    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(capture)
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    finish(trainer)
    return captured


def train_logged(folder: str, args: list[str]) -> dict[str, Any]:
    """:func:`train` with what was logged under "log"."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(level=logging.INFO)
    trainer = build(folder, args)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    recorder = Recorder()
    trainer.metrics_processor.logger = recorder
    trainer.train()
    finish(trainer)
    return {"loss": recorder.series("loss_metrics/global_avg_loss"), "log": "\n".join(lines)}


def first_optimizer_groups(folder: str, args: list[str]) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, without parameters, as the first step of this start uses them."""
    trainer = build(folder, args)
    seen: list[dict[str, Any]] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not seen:
            seen.extend({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)

    trainer.checkpointer.load(step=-1)  # which makes one step of zeros
    for optimizer in trainer.optimizers:
        optimizer.register_step_pre_hook(note)
    trainer.train()
    finish(trainer)
    return seen


def train_with_slow_save(folder: str, args: list[str]) -> None:
    """Data files are written, then the save sleeps before its metadata."""
    from torch.distributed.checkpoint import FileSystemWriter

    finish_save = FileSystemWriter.finish

    def slow(self: Any, *rest: Any, **kwargs: Any) -> Any:
        time.sleep(300)
        return finish_save(self, *rest, **kwargs)

    FileSystemWriter.finish = slow
    train(folder, args)


def train_on_full_disk(folder: str, args: list[str]) -> str:
    """The message with which a run ends whose disk is full at the next save."""
    import errno

    from torch.distributed.checkpoint import FileSystemWriter

    from torchtitan_ext.errors import UserError

    write = FileSystemWriter.write_data

    def full_disk(self: Any, plan: Any, planner: Any) -> Any:
        write(self, plan, planner).wait()
        raise OSError(errno.ENOSPC, "No space left on device")

    FileSystemWriter.write_data = full_disk
    trainer = build(folder, args)
    try:
        trainer.train()
    except UserError as error:
        return str(error)
    finally:
        finish(trainer)
    return "the save did not fail"


def refusal(folder: str, args: list[str], toml: str = CONFIG) -> dict[str, Any]:
    """The one-line error with which a run is refused, and what it left in its dump folder."""
    from torchtitan_ext import train as entry
    from torchtitan_ext.errors import UserError

    path = written(folder, toml)
    out = Path(folder) / "out"
    try:
        entry.run(["--job.config_file", str(path), "--job.dump_folder", str(out), *args])
    except UserError as error:
        left = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) if out.exists() else []
        leave_together(Path(folder))
        return {"error": str(error), "left": left}
    return {"error": None, "left": []}


def leave_together(folder: Path, seconds: float = 60) -> None:
    """Rank 0 holds the store, which under torchrun outlives every rank: it waits for slower ranks to come."""
    import os

    world, run = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_PORT"]
    (folder / f"left-{run}-{os.environ['RANK']}").touch()
    end = time.monotonic() + seconds
    while os.environ["RANK"] == "0" and time.monotonic() < end:
        if len(list(folder.glob(f"left-{run}-*"))) == world:
            return
        time.sleep(0.05)


def refusal_without_disk(folder: str, args: list[str]) -> dict[str, Any]:
    """:func:`refusal` on a machine whose disk has a kilobyte left."""
    import shutil

    usage = shutil.disk_usage(folder)
    shutil.disk_usage = lambda path: usage._replace(free=1024)
    return refusal(folder, args)


def refusal_where_notes_find_no_room(folder: str, args: list[str]) -> dict[str, Any]:
    """:func:`refusal` on a disk that is full when the resolved config is written."""
    import errno

    def full(config: Any, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    front.save = full
    return refusal(folder, args)


def validation_series(rows: list[tuple[int, dict[str, Any]]]) -> dict[int, tuple[float, float]]:
    """Validation loss and perplexity by step, from a recorder's rows."""
    losses = {s: r["validation_metrics/loss"] for s, r in rows if "validation_metrics/loss" in r}
    perplexities = {
        s: r["validation_metrics/perplexity"] for s, r in rows if "validation_metrics/perplexity" in r
    }
    return {step: (losses[step], perplexities[step]) for step in losses}


def packed_against_separate(folder: str, flavor: str) -> float:
    """Largest difference between a packed row's logits and its documents run one by one."""
    from torchtitan_ext import backbones, initialization

    model = backbones.build_config(backbones.lookup(flavor), attention="dense").build()
    initialization.key_initialisers(model, seed=0)
    model.init_weights()
    lengths = [11, 1, 29, 23]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    tokens = torch.randint(0, 256, positions.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        packed = model(tokens, positions, model.get_attention_masks(positions))
        separate = [
            model(piece, place, model.get_attention_masks(place))
            for piece, place in zip(tokens.split(lengths, 1), positions.split(lengths, 1), strict=True)
        ]
    return (packed - torch.cat(separate, 1)).abs().max().item()


def _train_with_labels(folder: str, args: list[str], unlabel: Any) -> dict[str, Any]:
    trainer = build(folder, [*args, "--training.steps", "2"])
    recorder = Recorder()
    trainer.metrics_processor.logger = recorder
    batches = iter(trainer.dataloader)

    def changed() -> Any:
        for index, (inputs, labels) in enumerate(batches):
            yield inputs, unlabel(index, labels)

    generator = trainer.batch_generator
    trainer.batch_generator = lambda _: generator(changed())
    trainer.train()
    finish(trainer)
    return {
        "loss": recorder.series("loss_metrics/global_avg_loss"),
        "grad_norm": recorder.series("grad_norm"),
        "rows": recorder.rows,
    }


def train_on_empty_batch(folder: str, args: list[str]) -> dict[str, Any]:
    """Two steps, the first without a supervised token."""
    return _train_with_labels(
        folder, args, lambda i, labels: torch.full_like(labels, -100) if i == 0 else labels
    )


def train_on_half_empty_batch(folder: str, args: list[str]) -> dict[str, Any]:
    """Two steps in which rank 1 has no supervised token."""
    import os

    rank = int(os.environ["RANK"])
    return _train_with_labels(
        folder, args, lambda i, labels: torch.full_like(labels, -100) if rank else labels
    )


class TwoTerms:
    """A made-up method: noise drops labels, two loss terms with counts and weights of their own."""

    terms = ("even", "odd")
    loss_inputs = ("loss_weights_BL",)
    perplexity = False

    def __init__(self, drop: float) -> None:
        self.drop = drop
        self.seen: list[tuple[int, ...]] = []

    def prepare(self, inputs: dict[str, torch.Tensor], labels: torch.Tensor, *, generator: Any):
        from torchtitan_ext.objective import Prepared, rand

        noise = rand(labels.shape, generator=generator)
        labels = labels.masked_fill(noise < self.drop, -100)
        even = (inputs["positions"] % 2 == 0) & (labels != -100)
        odd = (inputs["positions"] % 2 == 1) & (labels != -100)
        self.seen.append(tuple(labels.flatten()[:32].tolist()))
        inputs = {**inputs, "loss_weights_BL": 1.0 * even - 1.0 * odd}
        return Prepared(inputs, labels, {"even": float(even.sum()), "odd": float(odd.sum())})

    def loss(self, model, tokens, labels, *, model_inputs, loss_inputs, counts, loss_fn):
        side = loss_inputs["loss_weights_BL"]
        # The factors 1 and 2 make a mistake in either normaliser visible.
        weights = (side > 0) / counts["even"].clamp(min=1) + 2.0 * (side < 0) / counts["odd"].clamp(min=1)
        loss, _ = loss_fn(model(tokens, **model_inputs), labels, None, loss_weights_BL=weights)
        share = (side > 0).sum() / (counts["even"] + counts["odd"])
        return loss, {"two/even_share": share, "two/longest/max": model_inputs["positions"].max().float()}


def two_terms_gradients(folder: str, args: list[str]) -> dict[str, torch.Tensor]:
    return gradients(folder, args, objective=TwoTerms(drop=0.0))


def two_terms_training(folder: str, args: list[str]) -> dict[str, Any]:
    return train(folder, args, objective=TwoTerms(drop=0.3))


def open_gates(trainer: ExtTrainer, gate: float = 0.7) -> None:
    """Set a T2MLR model's gates away from 0, so that its recurrence matters."""
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            if name.endswith(("g_current", "g_recurrent")):
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.data.fill_(gate)


def t2mlr_gradients(folder: str, args: list[str]) -> dict[str, torch.Tensor]:
    return gradients(folder, args, change=open_gates)


def t2mlr_training(folder: str, args: list[str], gate: float = 0.7) -> dict[str, Any]:
    return train(folder, args, change=functools.partial(open_gates, gate=gate))


def count_collectives(folder: str, args: list[str]) -> dict[str, int]:
    """All-gathers and reduce-scatters of FSDP in one training step."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups

    counts = {"all_gather": 0, "reduce_scatter": 0}
    gather, scatter = groups.foreach_all_gather, groups.foreach_reduce

    def counted_gather(*a: Any, **k: Any) -> Any:
        counts["all_gather"] += 1
        return gather(*a, **k)

    def counted_scatter(*a: Any, **k: Any) -> Any:
        counts["reduce_scatter"] += 1
        return scatter(*a, **k)

    groups.foreach_all_gather, groups.foreach_reduce = counted_gather, counted_scatter
    trainer = build(folder, args)
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    finish(trainer)
    return counts
