"""Speed next to other implementations, as ratios of one run.

On a shared machine an absolute time says little, so both sides do the same work in one
process, in alternating order (A B B A, then B A A B, ...), and what counts is the median
over the rounds of the ratio within a round.

A benchmark is a function from :class:`Settings` to rows; a new one is a line in
:data:`BENCHMARKS`.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from torchtitan_ext import attention, backbones, masks, models
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.decoding import decoder_for
from torchtitan_ext.errors import UserError, unknown
from torchtitan_ext.trainer import ExtTrainer, default_config

GOAL = 1.0
"""Ours should be at least as fast."""

Work = Callable[[], int]
"""Does a fixed amount of work, finished when it returns, and says how many tokens that was."""

Tokens = Callable[[], list[list[int]]]
"""Decodes and gives the new tokens of each row."""


@dataclass(kw_only=True, slots=True)
class Settings:
    """What a benchmark may be told."""

    rounds: int = 5
    """Rounds of four measurements, two for each side."""

    threads: int = 2
    """CPU threads of both sides."""

    quick: bool = False
    """Tiny sizes, to see that a benchmark runs; the numbers then mean nothing."""

    model_dir: Path | None = None
    """Hugging Face folder for the decoding benchmark; None: random weights of SmolLM2-135M's size."""

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

    @property
    def ratio(self) -> float:
        """Median over the rounds; not the ratio of the medians, which the machine's load may skew."""
        return statistics.median(self.ratios)


# --- measuring -------------------------------------------------------------------------


class Round(NamedTuple):
    """Tokens a second of both sides in one round."""

    ours: float
    peer: float


def alternate(
    ours: Work, peer: Work, *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[Round]:
    """Rates of both sides in each round, after one unmeasured turn of each.

    A round is A B B A, so that a load that rises or falls evenly cancels, and every second
    round B A A B, so that neither side always follows the other.
    """
    for side in (ours, peer):
        side()
    result = []
    for index in range(rounds):
        order = (ours, peer, peer, ours) if index % 2 == 0 else (peer, ours, ours, peer)
        tokens, seconds = {ours: 0, peer: 0}, {ours: 0.0, peer: 0.0}
        for side in order:
            begin = clock()
            tokens[side] += side()
            seconds[side] += clock() - begin
        result.append(Round(tokens[ours] / seconds[ours], tokens[peer] / seconds[peer]))
    return result


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
    )


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
                rounds = alternate(training_step(ours), training_step(peer), rounds=settings.rounds)
            same("data", ours.dataloader.state_dict(), peer.dataloader.state_dict())
        finally:
            for trainer in (ours, peer):
                trainer.close()
    what = f"train {OURS.n_layers} x {OURS.dim}, batch {size.batch} x {size.seq_len}: ar / torchtitan llama3"
    return [row_of(what, rounds)]


def training_step(trainer: Trainer) -> Work:
    """One turn of the loop of ``Trainer.train``, without checkpoints and validation."""
    data = trainer.batch_generator(trainer.dataloader)
    tokens = trainer.config.training.local_batch_size * trainer.config.training.seq_len

    def step() -> int:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(data)
        utils.device_module.synchronize()
        return tokens

    return step


def our_config(size: TrainSize, *, folder: Path) -> ExtTrainer.Config:
    """The method ``ar`` with a backbone of llama3's sizes, on bytes of the standard library."""
    assets = folder / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(backbones.hf_config(OURS)))
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


# --- decode ----------------------------------------------------------------------------


class DecodeSize(NamedTuple):
    """One decoding workload."""

    flavor: str
    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int


DECODE = DecodeSize(flavor="smollm2-135M", batches=(1, 4), prompt_tokens=16, new_tokens=64)
DECODE_QUICK = DecodeSize(flavor="smollm2-debug", batches=(1, 2), prompt_tokens=4, new_tokens=8)


def bench_decode(settings: Settings) -> list[Row]:
    """Greedy decoding with a KV cache against ``transformers``' generate, fp32, the same weights.

    Both must give the same tokens.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UserError('the benchmark "decode" needs transformers: pip install "torchtitan-ext[hf]"')
    size = DECODE_QUICK if settings.quick else DECODE
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    with hf_folder(settings.model_dir, flavor=size.flavor) as folder, cpu_threads(settings.threads):
        loaded = load_model(folder, device=utils.device_type)
        reference = transformers_model(folder)
        name = size.flavor if settings.model_dir is None else settings.model_dir.name
        rows = []
        for batch in size.batches:
            prompts = random_prompts(batch, size.prompt_tokens, vocab_size=reference.config.vocab_size)
            ours = our_decoding(loaded.model, prompts, new_tokens=size.new_tokens)
            peer = transformers_decoding(reference, prompts, new_tokens=size.new_tokens)
            check_equal_tokens(ours(), peer())
            rounds = alternate(counted(ours), counted(peer), rounds=settings.rounds)
            what = f"decode {name}, {batch} x {size.prompt_tokens}+{size.new_tokens}: ar / transformers"
            rows.append(row_of(what, rounds))
    return rows


@contextmanager
def hf_folder(given: Path | None, *, flavor: str) -> Generator[Path]:
    """A Hugging Face folder: the given one, or random weights of a flavor's size."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise UserError(f"--model-dir {given} has no config.json; it must be a Hugging Face folder")
        yield given
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = backbones.hf_config(backbones.lookup(flavor))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        yield Path(folder)


def transformers_model(folder: Path) -> Any:
    """The reference, with nothing in its generation config that would change greedy decoding."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model.to(utils.device_type).eval()


def random_prompts(batch: int, length: int, *, vocab_size: int) -> list[list[int]]:
    """Prompts of equal length, so that no side spends time on padding."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(vocab_size, (batch, length), generator=generator).tolist()


def our_decoding(model: nn.Module, prompts: list[list[int]], *, new_tokens: int) -> Tokens:
    """Greedy decoding of this project."""
    decode = decoder_for("ar")
    return lambda: [row.new_tokens for row in decode(model, prompts, max_new_tokens=new_tokens)]


def transformers_decoding(model: Any, prompts: list[list[int]], *, new_tokens: int) -> Tokens:
    """Greedy decoding of transformers."""

    def run() -> list[list[int]]:
        tokens_BL = torch.tensor(prompts, device=model.device)
        mask_BL = torch.ones_like(tokens_BL)
        all_BL = model.generate(tokens_BL, attention_mask=mask_BL, max_new_tokens=new_tokens)
        return all_BL[:, tokens_BL.shape[1] :].tolist()

    return run


def counted(run: Tokens) -> Work:
    """A decoding as work: the number of its new tokens."""
    return lambda: sum(len(row) for row in run())


def check_equal_tokens(ours: list[list[int]], peer: list[list[int]]) -> None:
    """Raise where the two decodings first differ."""
    for row, (a, b) in enumerate(zip(ours, peer, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            raise RuntimeError(
                f"decodings differ in row {row} from new token {at}: {a[at:][:3]} and {b[at:][:3]}"
            )


# --- all of them -----------------------------------------------------------------------

Benchmark = Callable[[Settings], list[Row]]

BENCHMARKS: dict[str, Benchmark] = {
    "train": bench_train,
    "decode": bench_decode,
}
"""Other rooms add theirs (:mod:`torchtitan_ext.evaluation.bench_methods`)."""


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
