"""What the tests of trajectories share: a tiny backbone, and sets that were made with it or made up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchtitan_ext import backbones, registry
from torchtitan_ext.checkpoint.load import LoadedModel, load_model
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.trajectories import make, shards
from torchtitan_ext.trajectories.fingerprint import tokenizer_fingerprint
from torchtitan_ext.trajectories.prompts import Prompts, open_prompts
from torchtitan_ext.trajectories.shards import Trajectory

TOML = """
[model]
name = "mdlm"
flavor = "llada-debug"

[mdlm]
block_size = 4

[dataloader]
dataset = "chain_sum"

[dataloader.task]
min_digits = 1
max_digits = 2
max_terms = 3
"""


def register() -> None:
    """The method of the backbone, in every process that loads it."""
    registry.METHODS.setdefault("mdlm", "torchtitan_ext.methods.mdlm")


@functools.cache
def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of a backbone whose greedy text varies."""
    config = backbones.build_config(backbones.lookup("llada-debug"), attention="dense", max_seq_len=8)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.25 + (tensor.ndim == 1)
        for name, tensor in config.build().state_dict().items()
    }


def write_checkpoint(folder: Path, *, seed: int = 0, extra: dict[str, Any] | None = None) -> Path:
    """A checkpoint as training writes it."""
    register()
    state = {**weights(seed), "optimizer.state.x": torch.ones(3), "train_state": {"step": 4}, **(extra or {})}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "config.toml").write_text(TOML)
    return folder


def load(folder: Path) -> LoadedModel:
    register()
    return load_model(folder)


def recipe_of(loaded: LoadedModel, **changes: Any) -> make.Recipe:
    denoiser = make.denoiser_of(loaded)
    given = {
        "response_length": 6,
        "block_size": denoiser.block_size,
        "mask_id": denoiser.mask_id,
        "prediction": denoiser.prediction,
        "stop_ids": sorted(loaded.stop_ids),
        "shard_size": 3,
        **changes,
    }
    return make.Recipe(**given)


def task_prompts(loaded: LoadedModel, *, count: int = 8, seed: int = 0) -> Prompts:
    return open_prompts(loaded, "chain_sum", count=count, seed=seed, longest=100)


def make_set(
    loaded: LoadedModel, folder: Path, *, prompts: Prompts | None = None, batch_size: int = 2, **changes: Any
) -> dict[str, Any]:
    """A whole set by one worker; its result."""
    prompts = prompts or task_prompts(loaded)
    identity = make.make(loaded, prompts, folder, recipe=recipe_of(loaded, **changes), batch_size=batch_size)
    return make.finish(folder, identity)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def trajectories_of(folder: Path) -> list[Trajectory]:
    return [one for path in sorted(folder.glob("shard-*")) for one in shards.read_shard(path)]


def made_up_set(
    folder: Path,
    trajectories: Sequence[Trajectory],
    *,
    tokenizer: Tokenizer,
    shard_size: int = 4,
    **backbone: Any,
) -> dict[str, Any]:
    """A complete set with these trajectories, which no model made; its identity."""
    size = backbones.lookup("llada-debug")
    made = {"family": size.family, "parameters": size.n_params, "fingerprint": "none", **backbone}
    recipe = make.Recipe(
        response_length=max(one.steps for one in trajectories),
        block_size=32,
        mask_id=263,
        prediction="own",
        stop_ids=[],
        shard_size=shard_size,
    )
    identity = {
        "backbone": made,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "prompts": {"source": "made up"},
        "count": len(trajectories),
        "recipe": {name: getattr(recipe, name) for name in recipe.__dataclass_fields__},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for number, indices in enumerate(shards.shard_ranges(len(trajectories), shard_size=shard_size)):
        path = shards.shard_path(folder, number)
        shards.write_shard(path, [trajectories[i] for i in indices], digest=shards.digest_of(identity))
    make.finish(folder, identity)
    return identity
