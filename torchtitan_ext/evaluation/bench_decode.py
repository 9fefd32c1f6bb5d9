"""Decoding: the plain model next to transformers, and each method next to the plain model.

Floors: what a forward must at least read, next to the machine's copy bandwidth in the same rounds.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchtitan.tools import utils

from torchtitan_ext import backbones
from torchtitan_ext.checkpoint.load import load_model
from torchtitan_ext.decoding import KVCache, autoregressive, decoder_for
from torchtitan_ext.decoding.autoregressive import headless
from torchtitan_ext.decoding.rotary import step_rotary
from torchtitan_ext.decoding.sampling import row_generators
from torchtitan_ext.decoding.self_speculative import Drafting, Session
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import bench, bench_cases
from torchtitan_ext.evaluation.bench import Row, Settings, Work, cpu_threads, row_of

DECODE_GOAL = 1.3
"""Plain decoding should be at least this much faster than transformers."""

TIDAR_FORWARD_GOAL = 1 / 1.15
"""A forward of drafts and masks may take this much of a causal forward over as many tokens."""

BYTE_NOTE = (
    "bytes of the weights that each forward must read, against the bytes that a copy reads and writes in "
    "the same rounds; keys and values are not counted"
)

Tokens = Callable[[], list[list[int]]]
"""Decodes and gives the new tokens of each row."""

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
            prompts = bench.random_prompts(batch, size.prompt_tokens, vocab_size=reference.config.vocab_size)
            ours = our_decoding(loaded.model, prompts, new_tokens=size.new_tokens)
            peer = transformers_decoding(reference, prompts, new_tokens=size.new_tokens)
            check_equal_tokens(ours(), peer())
            sides = counted(ours), counted(peer), bench.copying(quick=settings.quick)
            mine, theirs, floor = bench.interleave(sides, rounds=settings.rounds)
            what = f"decode {name}, {batch} x {size.prompt_tokens}+{size.new_tokens}: ar / "
            rows.append(row_of(what + "transformers", bench.pairs(mine, theirs), goal=DECODE_GOAL))
            # Every new token of every row takes one forward of the batch.
            read = [rate / batch * weight_bytes(loaded.model) for rate in mine]
            rows.append(bench.floor_row(what + "byte floor", read, floor, unit="GB/s", note=BYTE_NOTE))
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


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a forward reads: all but an embedding that is no head as well."""
    looked_up = model.tok_embeddings.weight is not model.lm_head.weight
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total - looked_up * model.tok_embeddings.weight.nbytes


# --- methods ---------------------------------------------------------------------------

METHOD = replace(
    backbones.lookup("smollm2-135M"), n_layers=6, vocab_size=8192, context=512, bos_token_id=0, eos_token_id=0
)
"""SmolLM2-135M's blocks, few enough of them that all methods are measured in minutes."""

METHOD_QUICK = replace(backbones.lookup("smollm2-debug"), n_layers=3)


def method_rows(method: str, settings: Settings) -> list[Row]:
    """A decoding of a method with random weights against the plain model's and the byte floor.

    Random weights agree with nothing: drafts fail, thresholds are not reached. So this is the time
    of a forward and what surrounds it, not the method's speed on text.
    """
    size = METHOD_QUICK if settings.quick else METHOD
    prompt, new = (4, 4) if settings.quick else (64, 32)
    prompts = bench.random_prompts(1, prompt, vocab_size=size.vocab_size - 1)
    model = bench_cases.build(method, size)
    run = bench_cases.decoding(method, model, prompts, new_tokens=new)
    plain = bench_cases.decoding("ar", bench_cases.build("ar", size), prompts, new_tokens=new)
    sides = [lambda: run().new_tokens, lambda: plain().new_tokens, bench.copying(quick=settings.quick)]
    mine, theirs, floor = bench.interleave(sides, rounds=settings.rounds)
    generation = run()
    read = forward_bytes(method, model, generation) / generation.new_tokens
    what = f"decode {size.n_layers} x {size.dim}, 1 x {prompt}+{new}: {method} / "
    note = f"random weights: {generation.new_tokens} tokens in {generation.forwards} forwards"
    return [
        row_of(what + "ar", bench.pairs(mine, theirs), goal=0.0, note=note),
        bench.floor_row(what + "byte floor", [read * x for x in mine], floor, unit="GB/s", note=BYTE_NOTE),
    ]


def forward_bytes(method: str, model: Any, generation: Any) -> int:
    """Bytes of weights that a whole decoding reads, where passes read what they repeat each time."""
    once = weight_bytes(model)
    if method == "alodlm":  # a pass runs core, coda and head
        before = sum(p.nbytes for i in range(model.start) for p in model.layers[str(i)].parameters())
        passes = model.config.passes + sum(sum(row) for row in generation.extra["passes"])
        return generation.forwards * before + passes * (once - before)
    if method == "looped":
        again = sum(p.nbytes for p in model.core.layers.parameters())
        return generation.forwards * (once + again * (model.config.core.loops - 1))
    if method == "t2mlr":  # the prompt alone is iterated
        again = sum(p.nbytes for p in model.core.parameters())
        return generation.forwards * once + again * model.core.depth
    return generation.forwards * once


def tidar_forward(settings: Settings) -> list[Row]:
    """TiDAR's decoding forward, drafts and a block of masks for each outcome, against a causal forward.

    Both take the same number of tokens over the same cached prompt and give hidden states. The second
    row is the whole step, with heads, verification and drafting; the plain side reads out as many.
    """
    size = METHOD_QUICK if settings.quick else backbones.lookup("smollm2-135M")
    length, cached = (3, 8) if settings.quick else (bench_cases.BLOCK, 256)
    model, plain = bench_cases.build("tidar", size), bench_cases.build("ar", size)
    (prompt,) = bench.random_prompts(1, cached, vocab_size=size.vocab_size - 1)
    drafting = Drafting(mask_id=size.vocab_size - 1, draft_length=length)
    queries = length + length**2
    (tokens,) = bench.random_prompts(1, queries, vocab_size=size.vocab_size - 1)
    tokens_1Q = torch.tensor([tokens], device=utils.device_type)

    def work(run: Callable[[], Any]) -> Work:
        def finished() -> int:
            run()
            utils.device_module.synchronize()
            return queries

        return finished

    with torch.inference_mode(), headless(model), headless(plain), step_rotary(model), step_rotary(plain):
        session = Session(model, drafting, row_generators([0]), longest=cached + 4 * length)
        session.prefill([prompt])
        cache = KVCache(1, capacity=cached + queries, device=utils.device_type)
        autoregressive.prefill(plain, cache, [prompt])

        def step() -> None:
            session.step()
            session.cache.truncate([cached])  # the next step sees the same prompt

        def plain_step() -> None:
            hidden_1QD = autoregressive.forward(plain, cache, tokens_1Q)
            plain.lm_head(hidden_1QD[:, : 2 * length - 1]).argmax(-1)

        causal = work(lambda: autoregressive.forward(plain, cache, tokens_1Q))
        sides = work(session._step_hidden), causal, work(step), work(plain_step)
        mine, theirs, whole, whole_plain = bench.interleave(sides, rounds=settings.rounds)
    what = f"{size.n_layers} x {size.dim}, {queries} tokens after {cached}: tidar / ar"
    return [
        row_of(
            f"decoding forward {what}",
            bench.pairs(mine, theirs),
            goal=TIDAR_FORWARD_GOAL,
            note=f"draft length {length}; hidden states on both sides",
        ),
        row_of(
            f"decoding step {what}",
            bench.pairs(whole, whole_plain),
            goal=0.0,
            note=f"with heads, verification and drafting; both read out {2 * length - 1} positions",
        ),
    ]


BENCHMARKS: dict[str, bench.Benchmark] = {"decode": bench_decode}
