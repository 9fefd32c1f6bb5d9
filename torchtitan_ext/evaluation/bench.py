"""Speed next to other implementations, as ratios of one run.

On a shared machine an absolute time says little, so both sides do the same work in one
process, in alternating order (A B B A, then B A A B, ...), and what counts is the median
over the rounds of the ratio within a round.

A benchmark is a function from :class:`Settings` to rows; a new one is a line in
:data:`BENCHMARKS`.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from torchtitan_ext import attention, backbones, masks, models
from torchtitan_ext.errors import UserError, unknown
from torchtitan_ext.trainer import ExtTrainer, default_config

GOAL = 1.0
"""Ours should be at least as fast."""

Work = Callable[[], int]
"""Does a fixed amount of work, finished when it returns, and says how many tokens that was."""


@dataclass(kw_only=True, slots=True)
class Settings:
    """What a benchmark may be told."""

    rounds: int = 3
    """Rounds, in each of which every side is measured twice."""

    threads: int = 2
    """CPU threads of both sides."""

    quick: bool = False
    """Tiny sizes, to see that a benchmark runs; the numbers then mean nothing."""

    model_dir: Path | None = None
    """Hugging Face folder for the decoding benchmark; None: random weights of SmolLM2-135M's size."""

    t2mlr_run: Path | None = None
    """A trained T2MLR run on a task, or on text with [validation], to measure when its iterates settle."""

    def __post_init__(self) -> None:
        for name in ("rounds", "threads"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    """What was measured, and against whom."""

    ours: float
    """Median rate over the rounds."""

    peer: float
    """Median rate over the rounds."""

    unit: str
    """Of both rates; more is faster."""

    ratios: list[float]
    """Ours / peer within each round, > 1 is faster; for memory peer / ours, > 1 is less."""

    goal: float = GOAL
    """What the median ratio should reach; 0: nothing is asked."""

    note: str = ""
    """What else a reader must know; stands below the table."""

    values: list[tuple[float, float]] = field(default_factory=list)
    """Ours and the peer's value in every round."""

    @property
    def ratio(self) -> float:
        """Median over the rounds; not the ratio of the medians, which the machine's load may skew."""
        return statistics.median(self.ratios)

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None: nothing is asked."""
        return self.ratio >= self.goal if self.goal else None


# --- measuring -------------------------------------------------------------------------


class Round(NamedTuple):
    """Tokens a second of both sides in one round."""

    ours: float
    peer: float


def interleave(
    sides: Sequence[Work], *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Rates of every side in each round, [side][round], after one unmeasured turn of each.

    A round is A B C C B A, so that a load that rises or falls evenly cancels, and every second
    round C B A A B C, so that no side always follows another.
    """
    for side in sides:
        side()
    forth = list(range(len(sides)))
    rates: list[list[float]] = [[] for _ in sides]
    for index in range(rounds):
        order = forth if index % 2 == 0 else forth[::-1]
        done, seconds = [0] * len(sides), [0.0] * len(sides)
        for at in (*order, *order[::-1]):
            begin = clock()
            done[at] += sides[at]()
            seconds[at] += clock() - begin
        for at, rate in enumerate(rates):
            rate.append(done[at] / seconds[at])
    return rates


def alternate(
    ours: Work, peer: Work, *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[Round]:
    """Rates of two sides in each round, A B B A, then B A A B."""
    return pairs(*interleave((ours, peer), rounds=rounds, clock=clock))


def pairs(ours: Sequence[float], peer: Sequence[float]) -> list[Round]:
    """The rates of two of several interleaved sides."""
    return [Round(*both) for both in zip(ours, peer, strict=True)]


def row_of(
    what: str, rounds: Sequence[Round], *, unit: str = "tokens/s", goal: float = GOAL, note: str = ""
) -> Row:
    """The medians of some rounds."""
    return Row(
        what=what,
        ours=statistics.median(r.ours for r in rounds),
        peer=statistics.median(r.peer for r in rounds),
        unit=unit,
        ratios=[r.ours / r.peer for r in rounds],
        goal=goal,
        note=note,
        values=[tuple(r) for r in rounds],
    )


def row_of_once(
    what: str, ours: float, peer: float, *, unit: str, goal: float = 0.0, note: str = "", least: float = 1e-12
) -> Row:
    """A row of one measurement of each side in which less is better."""
    return Row(
        what=what,
        ours=ours,
        peer=peer,
        unit=unit,
        ratios=[peer / max(ours, least)],
        goal=goal,
        note=note,
        values=[(ours, peer)],
    )


def floor_row(
    what: str, done: Sequence[float], floor: Sequence[float], *, unit: str, note: str, scale: float = 1e9
) -> Row:
    """What a side does a second against what the machine does a second, in the rounds of one run."""
    rounds = pairs([rate / scale for rate in done], [rate / scale for rate in floor])
    return row_of(what, rounds, unit=unit, goal=0.0, note=note)


def product(*, quick: bool = False) -> Work:
    """fp32 matrix products; how many FLOPs they were."""
    size, times = (128, 1) if quick else (1024, 16)
    a_NN, b_NN = torch.randn(2, size, size, device=utils.device_type)

    def run() -> int:
        for _ in range(times):
            a_NN @ b_NN
        utils.device_module.synchronize()
        return times * 2 * size**3

    return run


def copying(*, quick: bool = False) -> Work:
    """Copies of memory that no cache holds; how many bytes they read and wrote."""
    count, times = (2**16, 1) if quick else (2**25, 8)
    source = torch.ones(count, device=utils.device_type)
    target = torch.empty_like(source)

    def run() -> int:
        for _ in range(times):
            target.copy_(source)
        utils.device_module.synchronize()
        return times * 2 * source.nbytes

    return run


@contextmanager
def cpu_threads(count: int) -> Generator[None]:
    """Compute with so many threads for the time of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Rates(NamedTuple):
    """What the machine itself does at the moment."""

    matmul_gflops: float
    copy_gbytes: float


def machine_rates(*, repeats: int = 5, size: int = 1024, copied_bytes: int = 2**27) -> Rates:
    """The fp32 matrix-product rate in GFLOP/s, and GB/s read plus written by a copy."""
    device = utils.device_type
    a_NN, b_NN = torch.randn(2, size, size, device=device)
    source = torch.ones(copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    product = _median_seconds(lambda: a_NN @ b_NN, repeats=repeats)
    copy = _median_seconds(lambda: target.copy_(source), repeats=repeats)
    return Rates(2 * size**3 / product / 1e9, 2 * copied_bytes / copy / 1e9)


def _median_seconds(run: Callable[[], Any], *, repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        utils.device_module.synchronize()
        begin = time.perf_counter()
        run()
        utils.device_module.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


# --- train -----------------------------------------------------------------------------

LLAMA3 = "debugmodel"
"""torchtitan's flavor of llama3 that both sides have the sizes of."""

OURS = replace(
    backbones.lookup("smollm2-debug"),
    n_layers=6,
    dim=256,
    n_heads=16,
    n_kv_heads=16,
    head_dim=16,
    ffn_dim=768,
    vocab_size=2048,
    rope_theta=5e5,
    tied=False,
)
"""The same sizes as a backbone."""


class TrainSize(NamedTuple):
    """The batch of one training step."""

    batch: int
    seq_len: int


TRAIN, TRAIN_QUICK = TrainSize(8, 256), TrainSize(2, 32)


class DenseLlamaTrainer(Trainer):
    """torchtitan's trainer as it is, but for one hook.

    torchtitan builds attention masks for its own two kernels alone, so this adds the mask
    of the dense attention that stands in for them.
    """

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        tokens, labels, kwargs = super().post_dataloading_process(input_dict, labels)
        mask = masks.causal_document(kwargs["positions"])
        kwargs["attention_masks"] = attention.build_mask(mask, "dense")
        return tokens, labels, kwargs


def bench_train(settings: Settings) -> list[Row]:
    """Training steps of ``ar`` against torchtitan's trainer and llama3, same sizes, rows and attention.

    Both run fp32 without recomputation in one process. llama3 is torchtitan's: fused
    query-key-value projection, complex rotary embedding, its cross-entropy and AdamW.
    """
    size = TRAIN_QUICK if settings.quick else TRAIN
    with tempfile.TemporaryDirectory() as folder, one_process_world():
        config = our_config(size, folder=Path(folder))
        ours, peer = ExtTrainer(config), DenseLlamaTrainer(peer_config(like=config))
        try:
            same("number of parameters", parameter_count(ours), parameter_count(peer))
            with cpu_threads(settings.threads):
                sides = training_step(ours), training_step(peer), product(quick=settings.quick)
                mine, theirs, floor = interleave(sides, rounds=settings.rounds)
            per_token = flops_per_token(ours)
            same("data", ours.dataloader.state_dict(), peer.dataloader.state_dict())
        finally:
            for trainer in (ours, peer):
                trainer.close()
    what = f"train {OURS.n_layers} x {OURS.dim}, batch {size.batch} x {size.seq_len}: ar / "
    return [
        row_of(what + "torchtitan llama3", pairs(mine, theirs)),
        floor_row(what + "FLOP floor", [per_token * x for x in mine], floor, unit="GFLOP/s", note=FLOP_NOTE),
    ]


FLOP_NOTE = "FLOPs as MFU counts them, against the machine's fp32 matrix product in the same rounds"


def flops_per_token(trainer: Trainer) -> int:
    """FLOPs of a data token in training, as MFU counts them."""
    spec: Any = trainer.model_config
    _, per_token = spec.get_nparams_and_flops(trainer.model_parts[0], trainer.config.training.seq_len)
    return per_token


def training_step(trainer: Trainer, *, through: Callable[[Any], Any] = iter) -> Work:
    """One turn of the loop of ``Trainer.train``, without checkpoints and validation.

    ``through``: put around the batches, to watch them.
    """
    data = through(trainer.batch_generator(trainer.dataloader))
    tokens = trainer.config.training.local_batch_size * trainer.config.training.seq_len

    def step() -> int:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(data)
        utils.device_module.synchronize()
        return tokens

    return step


def our_config(
    size: TrainSize, *, folder: Path, backbone: backbones.BackboneSize | None = None
) -> ExtTrainer.Config:
    """The method ``ar`` with a backbone of llama3's sizes, on bytes of the standard library."""
    assets = folder / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(backbones.hf_config(backbone or OURS)))
    config = default_config({"name": "ar"})
    config.model.flavor, config.model.hf_assets_path = "hf", str(assets)
    config.model.attention = "dense"
    config.tokenizer.kind = "byte"
    config.job.dump_folder = str(folder / "ours")
    config.training.local_batch_size, config.training.seq_len = size.batch, size.seq_len
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "none"
    config.debug.enable_structured_logging = False
    config.__post_init__()
    return config


def peer_config(*, like: ExtTrainer.Config) -> Trainer.Config:
    """torchtitan's config and llama3 with the data, batch and schedule of ours."""
    choice = default_config({"name": "llama3"})
    choice.model.flavor, choice.model.attention = LLAMA3, "dense"
    spec = models.build_spec(choice)
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path="",
        dump_folder=str(Path(like.dump_folder).with_name("peer")),
        tokenizer=like.tokenizer,
        dataloader=like.dataloader,
        optimizer=default_adamw(lr=like.optimizer.lr),
        lr_scheduler=like.lr_scheduler,
        training=like.training,
        # pyrefly: ignore[bad-argument-type] - torchtitan's way of saying no recomputation
        activation_checkpoint=None,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        debug=like.debug,
    )


def random_prompts(batch: int, length: int, *, vocab_size: int) -> list[list[int]]:
    """Prompts of equal length, so that no side spends time on padding."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(vocab_size, (batch, length), generator=generator).tolist()


@contextmanager
def one_process_world() -> Generator[None]:
    """A process group of one, which the first trainer makes; the process is left as it was."""
    environment, collecting = dict(os.environ), gc.isenabled()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        if collecting:  # torchtitan collects garbage at steps of its own choice
            gc.enable()


def parameter_count(trainer: Trainer) -> int:
    """Parameters of the model."""
    return sum(parameter.numel() for part in trainer.model_parts for parameter in part.parameters())


def same(what: str, ours: Any, peer: Any) -> None:
    """Raise unless both sides agree."""
    if ours != peer:
        raise RuntimeError(f"the two sides do not have the same {what}, so their times do not compare")


# --- all of them -----------------------------------------------------------------------

Benchmark = Callable[[Settings], list[Row]]

BENCHMARKS: dict[str, Benchmark] = {"train": bench_train}
"""Other rooms add theirs, such as :mod:`torchtitan_ext.evaluation.bench_methods`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The rows of one run and the machine they were measured on."""

    settings: Settings
    rows: list[Row]
    machine: list[Rates]
    """Before the first benchmark and after each."""

    device: str
    """Type of the device that both sides ran on."""

    load_average: tuple[float, float, float]
    """Of the machine before the run: 1, 5 and 15 minutes."""

    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """CPU cores that the run could use."""

    @property
    def rates(self) -> Rates:
        """Medians of the machine's rates."""
        return Rates(*(statistics.median(values) for values in zip(*self.machine, strict=True)))


def run(
    settings: Settings,
    *,
    only: Iterable[str] = (),
    benchmarks: Mapping[str, Benchmark] = BENCHMARKS,
    progress: Callable[[str], None] = print,
) -> Report:
    """Run the benchmarks named in ``only``, or all.

    Errors: an unknown name, a missing library, or two sides that do not do the same.
    """
    names = list(only) or list(benchmarks)
    for name in names:
        if name not in benchmarks:
            raise unknown("benchmark", name, benchmarks)
    load = os.getloadavg()
    rows: list[Row] = []
    with cpu_threads(settings.threads):
        machine = [machine_rates()]
        for name in names:
            progress(f"{name} ...")
            rows += benchmarks[name](settings)
            machine.append(machine_rates())
    return Report(settings=settings, rows=rows, machine=machine, device=utils.device_type, load_average=load)
