"""Which backbone and which tokenizer a set of trajectories belongs to."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchtitan_ext import backbones
from torchtitan_ext.backbones.adapter import EMBEDDING, HEAD, model_shapes
from torchtitan_ext.checkpoint import hf_folder, whole
from torchtitan_ext.data.tokenizers import Tokenizer
from torchtitan_ext.errors import UserError

_DIGITS = 32
_PROBE = "def f(x):\n    return 'Zoë' + str(x ** 2)  # 12345\n"


def backbone_fingerprint(folder: Path, *, size: backbones.BackboneSize) -> str:
    """A digest of the backbone's tensors in a checkpoint or a Hugging Face folder.

    Equal for both kinds of folder and for any dtype that holds the same values, and blind to what
    a method adds to the backbone. Tensors are read one at a time.
    Errors: UserError when the folder does not hold this backbone's tensors.
    """
    config = backbones.build_config(size, attention="dense", max_seq_len=1)
    shapes = model_shapes(config)
    native = (folder / ".metadata").is_file()
    tensors = _native_tensors(folder, shapes) if native else _hf_tensors(folder, shapes, config=config)
    total = hashlib.sha256(_arithmetic(size).encode())
    for name, tensor in tensors:
        total.update(f"{name} {list(tensor.shape)}".encode())
        # fp32 holds every value that weights are stored in.
        total.update(tensor.to(torch.float32).contiguous().flatten().numpy())  # pyrefly: ignore - a buffer
    return total.hexdigest()[:_DIGITS]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A digest of the vocabulary, of how a text is cut, and of the special tokens of the files.

    A mask token that [tokenizer] adds has no part in it.
    """
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"expected this package's tokenizer, got {type(tokenizer).__name__}")
    core = tokenizer.core
    names = [core.id_to_token(i) for i in range(core.vocab_size)]
    told = (names, sorted(core.roles.items()), core.encode(_PROBE, parse_special=True))
    return hashlib.sha256(repr(told).encode()).hexdigest()[:_DIGITS]


def _arithmetic(size: backbones.BackboneSize) -> str:
    """What changes the logits of the same tensors; a config.json may have rounded it."""
    return f"{size.n_heads} {size.n_kv_heads} {_round(size.rope_theta)} {_round(size.norm_eps)}"


def _round(value: float) -> str:
    assert math.isfinite(value)
    return f"{value:.4g}"


def _native_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    stored = whole.read_metadata(folder).state_dict_metadata
    for name in sorted(shapes):
        entry = stored.get(name)
        had = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        _require(folder, name, had=had, needed=shapes[name])
        assert isinstance(entry, TensorStorageMetadata)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            # One process without a process group is what is meant here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({name: tensor}, checkpoint_id=folder, no_dist=True)
        yield name, tensor


def _hf_tensors(
    folder: Path, shapes: dict[str, tuple[int, ...]], *, config: backbones.Backbone.Config
) -> Iterator[tuple[str, torch.Tensor]]:
    adapter = backbones.HFAdapter(config, None)
    found = hf_folder.read_tensors(folder)
    for name in sorted(shapes):
        theirs = adapter.names[EMBEDDING if name == HEAD and adapter.size.tied else name]
        had = tuple(found[theirs].shape) if theirs in found else None
        _require(folder, theirs, had=had, needed=shapes[name])
        yield name, hf_folder.load_tensor(found[theirs])


def _require(folder: Path, name: str, *, had: tuple[int, ...] | None, needed: tuple[int, ...]) -> None:
    if had != needed:
        what = "lacks it" if had is None else f"has {list(had)}"
        raise UserError(f"{folder} does not hold the backbone, whose {name} is {list(needed)}: it {what}")
