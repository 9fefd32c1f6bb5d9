"""What TDLM's attention over time costs next to the frozen backbone that it is added to.

Both sides are the same weights in one process: with the temporal modules, and without.

Shape suffixes: B = trajectories, K = states of each, N = B * K rows, S = K + 1, L = tokens of a row,
M = positions that are read out.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torchtitan.tools import utils

from torchtitan_ext import backbones, registry
from torchtitan_ext.decoding import decoder_for
from torchtitan_ext.evaluation import bench, bench_reference

DECODE_GOAL = 1 / 1.1
"""A forward may take a tenth longer than the backbone's at any history."""

TRAIN_GOAL = 1 / 1.3
"""A step of K states may take 1.3 times as long as K rows of the backbone, backward included."""

HEADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A backbone, its temporal modules, and what is decoded and trained."""

    backbone: backbones.BackboneSize
    head_dim: int
    prompt: int
    """Tokens before the response."""

    response: int
    """Masked tokens in a decoding forward."""

    histories: tuple[int, ...]
    """Remembered forwards, T."""

    trained: int
    """Tokens of a training response; half as many stand before it."""

    states: int
    """K."""

    wide: bool
    """Whether the width is such that the goals apply: the modules do not become wider with a backbone."""

    @property
    def name(self) -> str:
        return f"{self.backbone.n_layers} x {self.backbone.dim}"


TINY = Sizes(
    backbone=backbones.lookup("llada-tiny"),
    head_dim=32,
    prompt=64,
    response=128,
    histories=(16, 64),
    trained=64,
    states=8,
    wide=False,
)
WIDE = replace(
    TINY,
    backbone=replace(
        TINY.backbone, dim=1024, n_heads=8, n_kv_heads=8, head_dim=128, ffn_dim=3072, vocab_size=2048
    ),
    head_dim=64,
    trained=32,
    wide=True,
)
"""A quarter of LLaDA-8B's width, with the paper's modules of 4 x 64."""

QUICK = replace(
    TINY,
    backbone=backbones.lookup("llada-debug"),
    head_dim=8,
    prompt=4,
    response=8,
    histories=(2, 3),
    trained=6,
    states=3,
)


def bench_tdlm(settings: bench.Settings) -> list[bench.Row]:
    """Decoding forwards, a whole decoding, training steps and the memory's bytes."""
    rows: list[bench.Row] = []
    with bench.cpu_threads(settings.threads):
        for sizes in (QUICK,) if settings.quick else (TINY, WIDE):
            model = build(sizes)
            rows += decode_forwards(model, sizes, rounds=settings.rounds)
            if not sizes.wide:
                rows.append(whole_decoding(model, sizes, rounds=settings.rounds))
            rows += training_steps(model, sizes, rounds=settings.rounds)
            rows += memory_bytes(model, sizes)
            if not sizes.wide:
                rows += obvious(model, sizes, rounds=min(settings.rounds, bench_reference.ROUNDS))
    return rows


def build(sizes: Sizes) -> Any:
    """The model with dispersed temporal modules that retrieve something, from a file of its sizes."""
    tdlm: Any = registry.method("tdlm")
    section = tdlm.Section(
        mask_token_id=sizes.backbone.vocab_size - 1,
        heads=HEADS,
        head_dim=sizes.head_dim,
        states=sizes.states,
        block_size=sizes.response,
    )
    with tempfile.TemporaryDirectory() as folder:
        fields = backbones.hf_config(sizes.backbone)
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        spec = tdlm.model_registry("hf", attention="dense", hf_assets_path=folder, section=section)
        torch.manual_seed(0)
        model = spec.model.build().to(utils.device_type)
        model.init_weights()
    return model.eval()


def part(name: str) -> ModuleType:
    """A file of the method."""
    return importlib.import_module(f"{registry.method('tdlm').__name__}.{name}")


# --- decoding --------------------------------------------------------------------------


class Filled(NamedTuple):
    """A forward over a response whose positions remember so many forwards."""

    forward: Callable[..., Any]
    memory: Any


def filled(model: Any, sizes: Sizes, *, history: int) -> Filled:
    """``forward(temporal)``, and a memory of a window that is full: no further forward makes it longer."""
    length = sizes.prompt + sizes.response
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens_1L = torch.randint(sizes.backbone.vocab_size - 1, (1, length), generator=generator).to(device)
    tokens_1L[:, sizes.prompt :] = model.config.mask_token_id
    positions_1L = torch.arange(length, device=device)[None]
    masks = model.get_attention_masks(positions_1L)
    readout_M = positions_1L[0, sizes.prompt :]

    @torch.inference_mode()
    def forward(temporal: Any) -> Any:
        return model(tokens_1L, positions_1L, masks, readout_M=readout_M, temporal=temporal)

    memory = part("decode").memory_of(model, window=history)
    memory.begin(tokens_1L == model.config.mask_token_id)
    for layer_id in model.config.temporal:  # without the backbone's forwards: what it holds changes no time
        with torch.inference_mode():
            shape = (len(memory.places_P), 1, HEADS, sizes.head_dim)
            for _ in range(history):
                memory.recall(layer_id, *torch.randn(2, *shape, device=device))
    return Filled(forward, memory)


def decode_forwards(model: Any, sizes: Sizes, *, rounds: int) -> list[bench.Row]:
    """A decoding forward that retrieves from T earlier ones against the frozen backbone's."""
    rows = []
    for history in sizes.histories:
        forward, memory = filled(model, sizes, history=history)

        def work(temporal: Any, forward: Callable[..., Any] = forward) -> bench.Work:
            return lambda: finished(forward(temporal), sizes.response)

        found = bench.alternate(work(memory), work(None), rounds=rounds)
        masked = f"{sizes.response} of {sizes.prompt + sizes.response} masked"
        rows.append(
            bench.row_of(
                f"decoding forward {sizes.name}, {masked}, history {history}: tdlm / window off",
                found,
                goal=DECODE_GOAL if sizes.wide else 0.0,
                note=f"{len(model.config.temporal)} modules of {HEADS} x {sizes.head_dim}; a window that is "
                "full, nothing revealed between the forwards",
            )
        )
    return rows


def whole_decoding(model: Any, sizes: Sizes, *, rounds: int) -> bench.Row:
    """A response revealed one token a forward: the history grows, and what is revealed is dropped."""
    decode: Any = decoder_for("tdlm")
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(sizes.backbone.vocab_size - 1, (sizes.prompt,), generator=generator).tolist()
    new = sizes.response // 2

    def work(window: str) -> bench.Work:
        options = {"max_new_tokens": new, "policy": "one_token", "window": window}
        return lambda: decode(model, [prompt], **options).new_tokens

    return bench.row_of(
        f"decode {sizes.name}, {sizes.prompt}+{new}, one token a forward: tdlm full history / off",
        bench.alternate(work("full"), work("off"), rounds=rounds),
        goal=0.0,
        note="forwards that remember 0, 1, ... forwards; W_O is 0, so both sides reveal the same tokens",
    )


def obvious(model: Any, sizes: Sizes, *, rounds: int) -> list[bench.Row]:
    """A decoding and a loss against the way that computes all earlier states again in every step."""
    reference, decode = bench_reference.reference("tdlm"), decoder_for("tdlm")
    generator = torch.Generator().manual_seed(0)
    short, new = sizes.prompt // 4, sizes.response // 8
    prompt = torch.randint(sizes.backbone.vocab_size - 1, (short,), generator=generator).tolist()
    options = {"size": sizes.response, "mask_id": model.config.mask_token_id, "tau": 1.0, "window": "full"}

    def ours() -> int:
        given: Any = {"policy": "one_token", "window": "full"}
        return decode(model, [prompt], max_new_tokens=new, **given).new_tokens

    def twin() -> int:
        return len(reference.decode(model, prompt, new=new, **options)[0])

    step, again = training_works(model, sizes)[0], training_inputs(model, sizes)

    def twin_step() -> int:
        model.zero_grad()
        reference.loss(model, *again).backward()
        return finished(None, sizes.trained // 2 + sizes.trained)

    return [
        bench.row_of(
            f"decode {sizes.name}, {short}+{new}, one token a forward: tdlm / the obvious way",
            bench.alternate(ours, twin, rounds=rounds),
            goal=0.0,
        ),
        bench.row_of(
            f"train {sizes.name}, K = {sizes.states}: tdlm / the obvious way",
            bench.alternate(step, twin_step, rounds=rounds),
            goal=0.0,
        ),
    ]


def finished(result: Any, tokens: int) -> int:
    """The tokens, once the device has done the work."""
    del result
    utils.device_module.synchronize()
    return tokens


# --- training --------------------------------------------------------------------------


def training_steps(model: Any, sizes: Sizes, *, rounds: int) -> list[bench.Row]:
    """A step of K states against K rows of the frozen backbone, with and without a backward."""
    step, plain_step, plain_forward = training_works(model, sizes)
    what = (
        f"train {sizes.name}, K = {sizes.states}, {sizes.trained // 2}+{sizes.trained} tokens: tdlm step / "
    )
    return [
        bench.row_of(
            what + "K plain forwards and backwards",
            bench.alternate(step, plain_step, rounds=rounds),
            goal=TRAIN_GOAL if sizes.wide else 0.0,
            note="both: K rows, the same readout and cross-entropy, and a backward as deep as the first "
            "temporal module; the plain side has no temporal modules, hence no weight gradients",
        ),
        bench.row_of(
            what + "K plain forwards",
            bench.alternate(step, plain_forward, rounds=rounds),
            goal=0.0,
            note="the plain side is forwards without a graph, loss and backward: about 1/2 by arithmetic, "
            "since a backward for inputs alone costs what a forward does",
        ),
    ]


def training_inputs(model: Any, sizes: Sizes) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor]:
    """K states of one trajectory: rows [N, L], what they mask, and where and what they predict, [M] each."""
    temporal: Any = part("temporal")
    device, length = next(model.parameters()).device, sizes.trained // 2 + sizes.trained
    generator = torch.Generator().manual_seed(0)
    tokens_1L = torch.randint(sizes.backbone.vocab_size - 1, (1, length), generator=generator)
    reveal_step_1L = torch.zeros(1, length, dtype=torch.long)
    reveal_step_1L[0, -sizes.trained :] = torch.randperm(sizes.trained, generator=generator) + 1
    steps_1S = temporal.sample_steps([sizes.trained], states=sizes.states, generator=generator)
    masked_1SL = temporal.masked_states(reveal_step_1L, steps_1S)
    masked_NL = masked_1SL[:, :-1].flatten(0, 1)
    readout_M = temporal.targets(masked_1SL).flatten().nonzero()[:, 0]
    labels_M = tokens_1L.expand(sizes.states, -1).flatten()[readout_M].to(device)
    revealed_N = temporal.revealed_counts(reveal_step_1L, masked_1SL[:, :-1]).flatten()
    states = temporal.States(masked_NL.to(device), revealed_N.to(device), sizes.states)
    rows_NL = torch.where(masked_NL, model.config.mask_token_id, tokens_1L).to(device)
    return rows_NL, states, readout_M.to(device), labels_M


def training_works(model: Any, sizes: Sizes) -> tuple[bench.Work, bench.Work, bench.Work]:
    """(a step of K states, the same without temporal modules, K forwards of the backbone)."""
    rows_NL, states, readout_M, labels_M = training_inputs(model, sizes)
    length = rows_NL.shape[1]
    positions_NL = torch.arange(length, device=rows_NL.device).expand(sizes.states, -1)
    masks = model.get_attention_masks(positions_NL)
    given = {"readout_M": readout_M}
    first = model.layers[str(model.config.temporal[0])].attention

    def run(**options: Any) -> torch.Tensor:
        logits_1MV = model(rows_NL, positions_NL, masks, **given, **options)
        return torch.nn.functional.cross_entropy(logits_1MV[0], labels_M)

    def step() -> int:
        model.zero_grad()
        run(temporal=states).backward()
        return finished(None, length)

    def plain_step() -> int:
        # What stands before the first module needs no gradient on either side.
        hook = first.register_forward_hook(lambda _module, _given, out: out.detach().requires_grad_())
        run().backward()
        hook.remove()
        return finished(None, length)

    @torch.no_grad()
    def plain_forward() -> int:
        return finished(model(rows_NL, positions_NL, masks, **given), length)

    return step, plain_step, plain_forward


# --- memory ----------------------------------------------------------------------------


def memory_bytes(model: Any, sizes: Sizes) -> list[bench.Row]:
    """Bytes of the remembered keys and values, and of their buffers, against the formula."""
    history = sizes.histories[-1]
    memory = filled(model, sizes, history=history).memory
    layers, element = len(model.config.temporal), next(model.parameters()).element_size()
    formula = layers * sizes.response * history * 2 * HEADS * sizes.head_dim * element
    what = f"temporal cache {sizes.name}, {sizes.response} masked, {history} forwards"
    note = f"formula: {layers} layers x {sizes.response} positions x {history} forwards x 2 x {HEADS} x "
    note += f"{sizes.head_dim} x {element} bytes = {formula:,}"

    def row(name: str, measured: int, *, goal: float, note: str) -> bench.Row:
        return bench.Row(
            what=f"{what}: {name} / formula",
            ours=measured / 2**20,
            peer=formula / 2**20,
            unit="MiB",
            ratios=[formula / measured],
            goal=goal,
            note=note,
        )

    return [
        row("keys and values held", memory.nbytes, goal=bench.GOAL, note=note),
        row("buffers", memory.allocated, goal=0.0, note="with the room for the forwards that follow"),
    ]


BENCHMARKS: dict[str, bench.Benchmark] = {"tdlm": bench_tdlm}
