"""What the tests of the data room share."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from torchtitan_ext.data.loader import DataLoader
from torchtitan_ext.data.tokenizers import Tokenizer

IGNORE = -100
Rows = list[tuple[list[int], list[int], list[int]]]


def byte_tokenizer() -> Tokenizer:
    return Tokenizer.Config(kind="byte").build(tokenizer_path="")


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def loader(
    config: DataLoader.Config, *, world: int = 1, rank: int = 0, batch: int = 1, seq_len: int = 16, **kwargs
):
    tokenizer = kwargs.pop("tokenizer", None) or byte_tokenizer()
    return config.build(
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=tokenizer,
        seq_len=seq_len,
        local_batch_size=batch,
        **kwargs,
    )


def batch_rows(batch: Any) -> Rows:
    inputs, labels = batch
    return list(
        zip(inputs["input"].tolist(), inputs["positions"].tolist(), labels.tolist(), strict=True)  # type: ignore
    )


def run_ranks(
    config: DataLoader.Config,
    *,
    world: int,
    batch: int,
    steps: int,
    state: dict | None = None,
    seq_len: int = 16,
) -> tuple[Rows, dict[str, Any]]:
    """Rows of all ranks in global order, and the union of the ranks' states, as a checkpoint holds it."""
    loaders = [loader(config, world=world, rank=r, batch=batch, seq_len=seq_len) for r in range(world)]
    for one in loaders if state is not None else []:
        # A checkpoint is read under the keys that the fresh loader itself names.
        one.load_state_dict({key: state[key] for key in one.state_dict()})
    iterators = [iter(one) for one in loaders]
    rows: Rows = []
    for _ in range(steps):
        per_rank = [batch_rows(next(it)) for it in iterators]
        rows += [per_rank[r][j] for j in range(batch) for r in range(world)]
    union: dict[str, Any] = {}
    for one in loaders:
        for key, value in one.state_dict().items():
            assert union.setdefault(key, value) == value, f"ranks disagree on {key}"
    return rows, union


def finite_rows(config: DataLoader.Config, **kwargs: Any) -> Rows:
    return [row for batch in loader(config, **kwargs) for row in batch_rows(batch)]


def documents_of(rows: Rows) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of every run of positions 0, 1, 2, ... in every row."""
    found = []
    for tokens, positions, labels in rows:
        starts = [i for i, p in enumerate(positions) if p == 0] + [len(tokens)]
        assert starts[0] == 0
        for a, b in itertools.pairwise(starts):
            assert positions[a:b] == list(range(b - a))
            found.append((tokens[a:b], labels[a:b]))
    return found


def equal_batches(a: Any, b: Any) -> bool:
    same = all(torch.equal(a[0][key], b[0][key]) for key in ("input", "positions"))
    return same and torch.equal(a[1], b[1])
