"""Trajectories of a frozen masked diffusion model as a data set: one a row, never cut.

A document's *label* is the step that revealed the token (1 to T), and -100 where the token was
given. :func:`unpack` makes of a batch what a method needs; importing this module registers the
data set, so only methods that do so can choose it.

Shape suffixes: B = batch, L = sequence length.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan_ext import backbones
from torchtitan_ext.data.config import SourceFields
from torchtitan_ext.data.files import open_files
from torchtitan_ext.data.packing import Document
from torchtitan_ext.data.registry import Built, Context, DatasetEntry, register_dataset
from torchtitan_ext.data.sources import IndexedSource, Record, SubsetSource
from torchtitan_ext.errors import UserError
from torchtitan_ext.objective import IGNORE_INDEX
from torchtitan_ext.trajectories import shards
from torchtitan_ext.trajectories.fingerprint import backbone_fingerprint, tokenizer_fingerprint

NAME = "trajectories"
STEPS = "reveal_step_BL"
_COLUMNS = ["prompt", "response", "reveal_step"]
_UNUSED = ("subset",)


# --- batches ---------------------------------------------------------------------------


def unpack(
    inputs: dict[str, torch.Tensor], labels: torch.Tensor
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs with ``reveal_step_BL``, and the response's own tokens as labels.

    ``reveal_step_BL`` (int64) is a_p, 1 to T, on the response and 0 elsewhere, so T is its greatest
    value in a row; 0 for a row of padding. Padding becomes a document of its own: its positions
    restart at 0. ``labels``: as the loader gives them. All [B, L].
    """
    response_BL = labels != IGNORE_INDEX
    index_L = torch.arange(labels.shape[1], device=labels.device)
    # A trajectory ends with its response.
    end_B1 = ((index_L + 1) * response_BL).amax(dim=1, keepdim=True)
    new = {
        "positions": torch.where(index_L < end_B1, index_L, index_L - end_B1),
        STEPS: torch.where(response_BL, labels, 0),
    }
    return {**inputs, **new}, torch.where(response_BL, inputs["input"], IGNORE_INDEX)


# --- the data set ----------------------------------------------------------------------


def build(fields: SourceFields, context: Context) -> Built:
    """The trajectories of the folder ``dataset_path``.

    Errors: UserError for a set that is not complete, that another tokenizer was used for, or that
    does not fit ``seq_len``, and for keys that have no use here.
    """
    _check_keys(fields, where=context.where)
    folder = Path(fields.dataset_path or "").expanduser()
    manifest = complete_manifest(folder, where=context.where)
    _check_tokenizer(manifest["identity"], context.tokenizer, folder=folder)
    _check_lengths(manifest["result"], fields, seq_len=context.seq_len, where=context.where)
    source: IndexedSource = _open(folder, manifest)
    if fields.held_out:
        source = SubsetSource(source, split=fields.split, fraction=fields.held_out)
    return Built(source, _encoder(context))


def complete_manifest(folder: Path, *, where: str) -> dict[str, Any]:
    """The manifest of a complete set. Errors: UserError where there is none."""
    if not folder.is_dir():
        raise UserError(f"{where}: dataset_path {str(folder)!r} is no folder of trajectories")
    manifest = shards.read_manifest(folder)
    if manifest is None or manifest["result"] is None:
        what = "has no manifest.json" if manifest is None else "is not complete"
        raise UserError(f"{where}: {folder} {what}; tools/make_trajectories.py makes it and goes on with it")
    return manifest


def _check_keys(fields: SourceFields, *, where: str) -> None:
    if not fields.dataset_path:
        raise UserError(f"{where}: the data set {NAME!r} needs dataset_path, a folder of trajectories")
    for key in _UNUSED:
        if getattr(fields, key) is not None:
            raise UserError(f"{where}: the data set {NAME!r} takes no {key}, got {getattr(fields, key)!r}")
    # A part of a mixture does not have this key.
    if getattr(fields, "packing", "auto") == "concatenate":
        raise UserError(f"{where}: packing = 'concatenate' would cut trajectories (allowed: auto, whole)")
    if fields.split != "train" and not (fields.split == "validation" and fields.held_out):
        raise UserError(
            f"{where}: trajectories have no split {fields.split!r} of their own"
            " (split = 'validation' with held_out = 0.05 keeps some back, in both places)"
        )


def _check_lengths(result: dict[str, Any], fields: SourceFields, *, seq_len: int, where: str) -> None:
    if result["longest"] <= seq_len:
        return
    # The packer drops and counts them, where it is asked to.
    if getattr(fields, "long_documents", "split") == "drop" and result["shortest"] <= seq_len:
        return
    hint = ", or leave out the longer ones with long_documents = 'drop'"
    raise UserError(
        f"{where}: a trajectory has up to {result['longest']} tokens and is never cut, but training.seq_len "
        f"is {seq_len} (raise it{hint if hasattr(fields, 'long_documents') else ''}; "
        f"the shortest has {result['shortest']})"
    )


def _check_tokenizer(identity: dict[str, Any], tokenizer: Any, *, folder: Path) -> None:
    theirs, ours = identity["tokenizer"], tokenizer_fingerprint(tokenizer)
    if theirs != ours:
        raise UserError(
            f"{folder} was made with another tokenizer (fingerprint {theirs[:12]}) "
            f"than this run's ({ours[:12]})"
        )


def _open(folder: Path, manifest: dict[str, Any]) -> IndexedSource:
    """All shards, each of which must belong to the manifest."""
    identity = manifest["identity"]
    digest, size = shards.digest_of(identity), identity["recipe"]["shard_size"]
    paths = []
    for number, indices in enumerate(shards.shard_ranges(identity["count"], shard_size=size)):
        path = shards.shard_path(folder, number)
        if not shards.is_finished(path, rows=len(indices), digest=digest):
            raise UserError(f"{path} is missing; tools/make_trajectories.py makes it again")
        paths.append(path)
    return open_files(paths, name=NAME, txt_documents="file", columns=_COLUMNS, broken_lines="error")


def _encoder(context: Context) -> Any:
    ids = (getattr(context.tokenizer, "pad_id", None), getattr(context.tokenizer, "eos_id", None))
    pad_id = next((i for i in ids if i is not None), 0)

    def one(record: Any) -> Document:
        prompt, response, steps = (np.asarray(record[key], dtype=np.int64) for key in _COLUMNS)
        if len(steps) != len(response) or not len(steps) or steps.min() < 1:
            raise UserError(f"{context.where}: a damaged trajectory: {len(response)} tokens, steps {steps}")
        # Filled up to a row, so that the packer puts no other trajectory behind it.
        padding = max(context.seq_len - len(prompt) - len(response), 0)
        tokens = np.concatenate([prompt, response, np.full(padding, pad_id, dtype=np.int64)])
        labels = np.full(len(tokens), IGNORE_INDEX, dtype=np.int64)
        labels[len(prompt) : len(prompt) + len(response)] = steps
        return Document(tokens=tokens, labels=labels)

    def encode(records: Sequence[Record]) -> list[Document | None]:
        return [one(record) for record in records]

    return encode


ENTRY = DatasetEntry(build=build, keeps_whole=True)
register_dataset(NAME, ENTRY)


# --- does a run fit its trajectories? --------------------------------------------------


def folders(config: Any) -> list[Path]:
    """The folders of trajectories that a run reads, for training and validation.

    Errors: UserError for a run that also reads other data, or none.
    """
    loaders = [config.dataloader, *([config.validator.dataloader] if config.validator.enable else [])]
    found = []
    for loader in loaders:
        for source in loader.sources or [loader]:
            if source.dataset != NAME:
                raise UserError(
                    f"[model] name = {config.model.name!r} learns from trajectories alone: got dataset = "
                    f"{source.dataset!r} (allowed: {NAME!r}; tools/make_trajectories.py makes them)"
                )
            found.append(Path(source.dataset_path or "").expanduser())
    return list(dict.fromkeys(found))


def check(config: Any, folder: Path, *, mask_id: int) -> None:
    """Refuse trajectories of another backbone, tokenizer or mask token than a run's.

    The backbone is that of [model], and where ``checkpoint.initial_load_path`` is a local folder,
    its tensors; they are read by rank 0 alone.
    Errors: UserError that says which differs.
    """
    identity = complete_manifest(folder, where="dataloader")["identity"]
    tokenizer = config.tokenizer.build(tokenizer_path=config.model.hf_assets_path)
    _check_tokenizer(identity, tokenizer, folder=folder)
    theirs = identity["recipe"]["mask_id"]
    if theirs != mask_id:
        raise UserError(f"{folder} was made with mask token {theirs}, this run's is {mask_id}")
    size = backbones.size_for(config.model.flavor, hf_assets_path=config.model.hf_assets_path or None)
    made = identity["backbone"]
    if (made["family"], made["parameters"]) != (size.family, size.n_params):
        raise UserError(
            f"{folder} was made by a {made['family']} backbone of {made['parameters']:,} parameters, "
            f"[model] flavor = {config.model.flavor!r} is a {size.family} one of {size.n_params:,}"
        )
    initial = Path(config.checkpoint.initial_load_path or "")
    if not config.checkpoint.initial_load_path or not initial.is_dir() or os.environ.get("RANK", "0") != "0":
        return
    ours = backbone_fingerprint(initial, size=size)
    if ours != made["fingerprint"]:
        raise UserError(
            f"{folder} was made by another backbone (fingerprint {made['fingerprint'][:12]}) than "
            f"[checkpoint] initial_load_path = {str(initial)!r} ({ours[:12]})"
        )
