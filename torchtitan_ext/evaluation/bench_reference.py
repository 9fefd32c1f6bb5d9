"""Each method against the obvious way to write it, which the tests hold it to as well.

The obvious ways lie beside the tests (tests/reference), so a checkout is needed. They compute the
same, but for T2MLR's training, where the exact recurrence stands against truncated iterates.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from torchtitan_ext import registry
from torchtitan_ext.decoding.streaming import Rules
from torchtitan_ext.errors import UserError
from torchtitan_ext.evaluation import bench, bench_cases
from torchtitan_ext.losses import LossSection
from torchtitan_ext.objective import IGNORE_INDEX, Prepared, row_generators

SMALL = replace(bench.OURS, context=256)
QUICK = replace(SMALL, n_layers=3, dim=64, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=512)

ROUNDS = 2
"""The obvious ways are slow, and far enough from ours that few rounds tell."""


def reference(name: str) -> Any:
    """A file of tests/reference. Errors: UserError where there is none."""
    try:
        return importlib.import_module(f"tests.reference.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tests"):
            raise
        raise UserError(
            "the comparison with the obvious implementations needs tests/reference of a checkout, "
            "on the PYTHONPATH"
        ) from error


def rows(method: str, settings: bench.Settings) -> list[bench.Row]:
    """A loss with its gradient, and a decoding, against the obvious way."""
    size = QUICK if settings.quick else SMALL
    rounds = min(settings.rounds, ROUNDS)
    model = bench_cases.build(method, size)
    result = []
    for what, ours, twin, note in (training(method, model, settings), decoding(method, model, settings)):
        if twin is not None:
            found = bench.alternate(ours, twin, rounds=rounds)
            name = f"{what.format(f'{size.n_layers} x {size.dim}')}: {method} / the obvious way"
            result.append(bench.row_of(name, found, goal=0.0, note=note))
    return result


Compared = tuple[str, bench.Work, bench.Work | None, str]
"""What, ours, the obvious way (None: ours is already the obvious one), and a note."""


# --- decoding --------------------------------------------------------------------------


def decoding(method: str, model: Any, settings: bench.Settings) -> Compared:
    """A greedy decoding of one row."""
    prompt_tokens, new = (4, 4) if settings.quick else (16, 16)
    (prompt,) = bench.random_prompts(1, prompt_tokens, vocab_size=model.config.vocab_size - 1)
    given = {"prefill": "exact"} if method == "t2mlr" else {}
    run = bench_cases.decoding(method, model, [prompt], new_tokens=new, **given)
    twin = obvious_decoding(method, model, prompt, new=new)
    mine, theirs = run()[0].new_tokens, twin()
    agree = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    note = "both decode the same tokens" if agree is None else f"the tokens differ from the {agree + 1}. on"
    what = f"decode {{}}, 1 x {prompt_tokens}+{new}"
    return what, lambda: run().new_tokens, lambda: len(twin()), f"{note}; the other side keeps no cache"


def obvious_decoding(method: str, model: Any, prompt: list[int], *, new: int) -> Callable[[], list[int]]:
    """The new tokens, computed anew in every step."""
    mask_id, options = getattr(model.config, "mask_token_id", None), bench_cases.options(method)
    if method == "t2mlr":
        return lambda: reference("t2mlr").decode(model, prompt, new=new)
    if method == "looped":
        return lambda: reference("autoregressive").decode(model, prompt, new=new)
    if method == "tidar":
        decode = reference("tidar").decode
        return lambda: decode(model, prompt, new=new, mask_id=mask_id, draft_length=bench_cases.BLOCK)
    if method in ("wedlm", "alodlm"):
        twin = reference("streaming").Twin(model, mask_id=mask_id)
        config = model.config
        known = {name: options[name] for name in ("window", "tau", "q") if name in options}
        rules = Rules(position_penalty=config.position_penalty, **known)
        return lambda: twin.run(prompt, new=new, rules=rules).given[-1]
    if method == "block_diffusion":
        decode = reference("block_diffusion").decode
        given = {"policy": options["policy"], "count": options["tokens_per_forward"], "clean": "block"}
        return lambda: decode(model, prompt, new=new, size=bench_cases.BLOCK, mask_id=mask_id, **given)[0]
    decode = reference("masked_diffusion").decode
    given = {"size": bench_cases.BLOCK, "mask_id": mask_id, "policy": "one_token", "tau": 1.0}
    return lambda: decode(model, prompt, new=new, **given)[-1]


# --- training --------------------------------------------------------------------------


def training(method: str, model: Any, settings: bench.Settings) -> Compared:
    """The loss of one document and its gradient."""
    length = 16 if settings.quick else 64
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size - 1, (1, length), generator=generator)
    positions = torch.arange(length)[None]
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[:, :-1] = tokens[:, 1:]
    objective = objective_of(method, model)
    batch = {"input": tokens, "positions": positions}
    prepared = objective.prepare(batch, labels, generator=row_generators(seed=0, step=1, rows=range(1)))
    twin = obvious_loss(method, model, prepared, tokens)

    def work(loss: Callable[[], torch.Tensor]) -> bench.Work:
        def run() -> int:
            model.requires_grad_(True).zero_grad()
            loss().backward()
            model.requires_grad_(False)
            return length

        return run

    what, note = f"loss and gradient {{}}, 1 x {length}", "one document; no optimizer on either side"
    ours = work(lambda: loss_of(model, objective, prepared))
    return what, ours, work(twin) if twin is not None else None, note


def objective_of(method: str, model: Any) -> Any:
    """The objective with the bench's knobs."""
    from torchtitan_ext.trainer import default_config

    config: Any = default_config({"name": method})
    for name, value in bench_cases.knobs(method, n_layers=len(model.config.layers)).items():
        setattr(getattr(config, method), name, value)
    if hasattr(model.config, "mask_token_id"):
        getattr(config, method).mask_token_id = model.config.mask_token_id
    if hasattr(model.config, "prediction"):
        getattr(config, method).prediction = model.config.prediction
    config.tokenizer.kind = "byte"
    module = importlib.import_module(f"{registry.method(method).__name__}.objective")
    return module.build_objective(config)


def loss_of(model: Any, objective: Any, prepared: Prepared) -> torch.Tensor:
    """The loss as the trainer computes it, of one batch on one rank."""
    own = {name: prepared.inputs[name] for name in objective.loss_inputs}
    rest = {k: v for k, v in prepared.inputs.items() if k not in own and k != "input"}
    rest["attention_masks"] = model.get_attention_masks(prepared.inputs["positions"])
    loss, _ = objective.loss(
        model,
        prepared.inputs["input"],
        prepared.labels,
        model_inputs=rest,
        loss_inputs=own,
        counts={name: torch.tensor(value) for name, value in prepared.counts.items()},
        loss_fn=LossSection(global_vocab_size=model.config.vocab_size).build(),
    )
    return loss


def obvious_loss(
    method: str, model: Any, prepared: Prepared, tokens_BL: torch.Tensor
) -> Callable[[], torch.Tensor] | None:
    """The loss the obvious way: logits of every position, nothing shared between parts."""
    given = prepared.inputs
    if method == "t2mlr":
        return lambda: reference("t2mlr").loss(model, tokens_BL)
    if method == "alodlm":
        by_hand = reference("alodlm").by_hand

        def all_passes() -> torch.Tensor:
            masked_MK, hazards_MK, clean_AK, _ = by_hand(model, prepared, lambda *_: False)
            return masked_MK.mean() + clean_AK.mean() + hazards_MK.mean()

        return all_passes
    layouts = {
        "tidar": {"clean": "causal", "block": "both_ways"},
        "block_diffusion": {"clean": "block", "block": "both_ways"},
        "wedlm": {"clean": "causal", "block": "causal"},
    }
    if method in layouts:
        layout = {"block_size": bench_cases.BLOCK, **layouts[method]}
        return lambda: reference("doubled").loss(model, given["input"], given["positions"], **layout)
    return None
