"""Trajectories from a frozen masked diffusion model: the loop of one worker.

The model answers every prompt with one token a forward, greedily, block by block. A shard holds a
fixed range of prompts, which one worker decodes in batches that depend on the shard alone, so the
number of workers, and where they were stopped, changes nothing. Source: TDLM section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchtitan.tools.logging import logger

from torchtitan_ext import progress
from torchtitan_ext.backbones import Backbone
from torchtitan_ext.checkpoint.load import LoadedModel
from torchtitan_ext.decoding.masked_diffusion import Prediction, generate
from torchtitan_ext.decoding.trace import Trace
from torchtitan_ext.errors import UserError
from torchtitan_ext.trajectories import shards
from torchtitan_ext.trajectories.fingerprint import backbone_fingerprint, tokenizer_fingerprint
from torchtitan_ext.trajectories.prompts import Prompts
from torchtitan_ext.trajectories.shards import Trajectory

OnBatch = Callable[[int], None]
"""Called with the number of prompts that are done now."""

BLOCK_SIZE = 32
"""Positions of a block for a model that was trained without."""


class Denoiser(NamedTuple):
    """What decoding needs to know of a model."""

    mask_id: int
    prediction: Prediction
    block_size: int
    """Unless another is asked for."""

    context: int
    """Tokens of a prompt and its response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How responses are decoded and stored."""

    response_length: int
    """Tokens of every response, and so its number of steps T."""

    block_size: int
    """Positions of a block, counted from the start of the response."""

    mask_id: int
    """Id of the mask token."""

    prediction: Prediction
    """Whether token i is read from its own position or from the one before."""

    stop_ids: list[int]
    """Tokens that end an answer; the response goes on behind them."""

    shard_size: int = 256
    """Prompts of a shard."""

    dtype: str = "float32"
    """Of the weights while decoding."""

    def __post_init__(self) -> None:
        for name in ("response_length", "block_size", "shard_size"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


def denoiser_of(loaded: LoadedModel) -> Denoiser:
    """Errors: UserError for a model that does not denoise, or of which no mask token is known."""
    config: Any = loaded.model.config
    if not isinstance(loaded.model, Backbone) or config.size.attention != "bidirectional":
        raise UserError(
            f"{loaded.path} holds a model of method {loaded.method!r}; "
            "trajectories need a bidirectional one that fills masks"
        )
    known = (getattr(config, "mask_token_id", None), config.size.mask_token_id, loaded.tokenizer.mask_id)
    mask_id = next((i for i in known if i is not None), None)
    if mask_id is None:
        raise UserError(f"{loaded.path}: neither its config nor its tokenizer names a mask token")
    return Denoiser(
        mask_id=mask_id,
        prediction=getattr(config, "prediction", "shifted" if config.size.family == "dream" else "own"),
        block_size=getattr(config, "block_size", BLOCK_SIZE),
        context=config.max_seq_len,
    )


def identity_of(loaded: LoadedModel, prompts: Prompts, *, recipe: Recipe) -> dict[str, Any]:
    """Everything that decides which trajectories come out; plain data."""
    config: Any = loaded.model.config
    size = config.size
    return {
        "backbone": {
            "family": size.family,
            "parameters": size.n_params,
            "fingerprint": backbone_fingerprint(loaded.path, size=size),
        },
        "tokenizer": tokenizer_fingerprint(loaded.tokenizer),
        "prompts": prompts.description,
        "count": len(prompts.tokens),
        "recipe": asdict(recipe),
    }


def make(
    loaded: LoadedModel,
    prompts: Prompts,
    folder: Path,
    *,
    recipe: Recipe,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    on_batch: OnBatch | None = None,
) -> dict[str, Any]:
    """Write the shards of one worker that are not there yet; the identity of the set.

    Worker ``rank`` of ``world`` makes every world-th shard.
    Errors: UserError for a folder with other trajectories, and for prompts that do not fit.
    """
    if batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {batch_size}")
    starts = checked(prompts.tokens, recipe=recipe, bos_id=loaded.tokenizer.bos_id)
    identity = identity_of(loaded, prompts, recipe=recipe)
    digest = shards.digest_of(identity)
    shards.check_identity(folder, identity)
    if rank == 0 and shards.read_manifest(folder) is None:
        _make_folder(folder)
        shards.write_manifest(folder, identity=identity, result=None)
    ranges = shards.shard_ranges(len(starts), shard_size=recipe.shard_size)
    total = sum(len(indices) for indices in ranges[rank::world])
    about = f" (worker 0 of {world})" if world > 1 else ""
    with progress.bar(f"trajectories{about}", total=total, unit="prompts") as bar:

        def tell(count: int, *, tokens: int) -> None:
            """Without tokens they were decoded earlier."""
            if tokens:
                bar.advance(count, tokens=tokens)
            else:
                bar.skip(count)
            if on_batch is not None:
                on_batch(count)

        for number in range(rank, len(ranges), world):
            path, indices = shards.shard_path(folder, number), ranges[number]
            if shards.is_finished(path, rows=len(indices), digest=digest):
                tell(len(indices), tokens=0)
                continue
            found = decode_shard(
                loaded,
                starts,
                indices,
                recipe=recipe,
                batch_size=batch_size,
                judge=prompts.judge,
                on_batch=lambda count: tell(count, tokens=count * recipe.response_length),
            )
            _make_folder(folder)
            shards.write_shard(path, found, digest=digest)
            logger.info(
                f"Trajectories: {path.name} is written ({number + 1} of {len(ranges)}, worker {rank})"
            )
    return identity


def checked(tokens: Sequence[Sequence[int]], *, recipe: Recipe, bos_id: int | None) -> list[list[int]]:
    """The prompts, an empty one replaced by BOS. Errors: UserError for one that holds the mask token."""
    starts = []
    for i, prompt in enumerate(tokens):
        start = list(prompt) or ([] if bos_id is None else [bos_id])
        if not start:
            raise UserError(f"prompt {i} is empty, and the tokenizer has no BOS token to start from")
        if recipe.mask_id in start:
            raise UserError(
                f"prompt {i} holds the mask token {recipe.mask_id}; only the response is denoised"
            )
        starts.append(start)
    return starts


def decode_shard(
    loaded: LoadedModel,
    starts: Sequence[Sequence[int]],
    indices: Sequence[int],
    *,
    recipe: Recipe,
    batch_size: int,
    judge: Callable[[int, Sequence[int]], bool] | None = None,
    on_batch: OnBatch | None = None,
) -> list[Trajectory]:
    """The trajectories of some prompts, in their order."""
    # Prompts of like length share a batch, which saves padding.
    by_length = sorted(indices, key=lambda i: (len(starts[i]), i))
    found: dict[int, Trajectory] = {}
    for begin in range(0, len(by_length), batch_size):
        batch = by_length[begin : begin + batch_size]
        generation = generate(
            loaded.model,
            [starts[i] for i in batch],
            max_new_tokens=recipe.response_length,
            mask_id=recipe.mask_id,
            block_size=recipe.block_size,
            prediction=recipe.prediction,
            policy="one_token",
        )
        for i, trace in zip(batch, generation.extra["traces"], strict=True):
            found[i] = _trajectory(i, starts[i], trace, recipe=recipe, judge=judge)
        if on_batch is not None:
            on_batch(len(batch))
    return [found[i] for i in indices]


def _trajectory(
    index: int,
    prompt: Sequence[int],
    trace: Trace,
    *,
    recipe: Recipe,
    judge: Callable[[int, Sequence[int]], bool] | None,
) -> Trajectory:
    response = [token for token in trace["tokens"] if token is not None]
    steps = [step for step in trace["steps"] if step is not None]
    # Without a stop token in the decoder every mask is revealed, one in each forward.
    assert sorted(steps) == list(range(1, recipe.response_length + 1))
    length = next((i + 1 for i, t in enumerate(response) if t in recipe.stop_ids), len(response))
    right = None if judge is None else judge(index, response[:length])
    return Trajectory(index, list(prompt), response, steps, length, right)


def finish(folder: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Put what came out into the manifest of a complete set, and return it.

    Errors: UserError when a shard is missing.
    """
    digest, count, recipe = shards.digest_of(identity), identity["count"], identity["recipe"]
    stop_ids = set(recipe["stop_ids"])
    longest = shortest = answers = right = ended = tokens = 0
    ranges = shards.shard_ranges(count, shard_size=recipe["shard_size"])
    for number, indices in enumerate(ranges):
        path = shards.shard_path(folder, number)
        if not shards.is_finished(path, rows=len(indices), digest=digest):
            raise UserError(f"{path} is missing; run the same command again to make it")
        for one in shards.read_shard(path):
            total = len(one.prompt) + len(one.response)
            longest, shortest = max(longest, total), min(shortest or total, total)
            ended += one.response[one.length - 1] in stop_ids
            tokens += one.length
            answers += one.right is not None
            right += one.right is True
    result = {
        "trajectories": count,
        "shards": len(ranges),
        "steps": recipe["response_length"],
        "shortest": shortest,
        "longest": longest,
        "ended": ended,
        "mean_answer_tokens": round(tokens / count, 6),
        "right": right if answers else None,
        "accuracy": round(right / answers, 6) if answers else None,
    }
    shards.write_manifest(folder, identity=identity, result=result)
    return result


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror or error}") from error


def fix_threads(device: str) -> None:
    """One thread on a CPU, so that sums are added up the same way for any number of workers."""
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)
