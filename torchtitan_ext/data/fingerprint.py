"""Does a checkpoint's data state belong to this data?"""

from __future__ import annotations

import copy
import glob
import hashlib
import os
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.config import SourceFields
from torchtitan_ext.data.files import format_of, split_of
from torchtitan_ext.data.order import derive_seed
from torchtitan_ext.errors import UserError

SAMPLED_FILES = 16
"""Files whose beginning and end are read to know them again; of the others the size must do."""

SAMPLED_BYTES = 1 << 16

_PROBE = "def f(x):\n    return 'Zoë' + str(x ** 2)  # 12345\n"


def tokenizer_probe(tokenizer: BaseTokenizer) -> str:
    """A short text that differs between tokenizers that encode differently."""
    ids = list(tokenizer.encode(_PROBE))
    special = [getattr(tokenizer, f"{role}_id", None) for role in ("bos", "eos", "pad")]
    return f"{tokenizer.get_vocab_size()} tokens, {derive_seed(str(ids), str(special)):016x}"


def template_probe(tokenizer: BaseTokenizer) -> str:
    """A short text that differs between chat templates."""
    return f"{derive_seed(str(getattr(tokenizer, 'chat_template', None))):016x}"


def content_of(fields: SourceFields) -> dict[str, Any]:
    """What tells the data at ``dataset_path`` from other data, wherever it lies and whatever it is called.

    ``content`` is a digest of the files' sizes, in the order of their names, and of the first and last
    64 KiB of up to 16 of them; of a hub data set it is the name.
    """
    path = fields.dataset_path
    if not path:
        return {"path": None, "content": "the data set's own"}
    files = _files_at(path, split=fields.split)
    if not files:
        return {"path": path, "content": path}
    digest, total = hashlib.sha256(), 0
    for i, file in enumerate(files):
        size = file.stat().st_size
        total += size
        digest.update(f"{size}:".encode())
        if i < SAMPLED_FILES:
            with file.open("rb") as opened:
                digest.update(opened.read(SAMPLED_BYTES))
                opened.seek(max(0, size - SAMPLED_BYTES))
                digest.update(opened.read(SAMPLED_BYTES))
    count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    return {"path": path, "content": f"{count} of {total:,} bytes, {digest.hexdigest()[:12]}"}


def _files_at(path: str, *, split: str) -> list[Path]:
    """Files that a file, a folder or a glob names; in a folder those of the split, if any name one."""
    place = Path(path).expanduser()
    if not place.is_dir():
        found = [Path(p) for p in sorted(glob.glob(str(place), recursive=True))] or [place]
        return [p for p in found if p.is_file()]
    hidden = (".", "_")
    inside = [p for p in sorted(place.rglob("*")) if p.is_file() and not p.name.startswith(hidden)]
    inside = [p for p in inside if format_of(p)] or inside
    return [p for p in inside if split_of(p) == split] or inside


def comparable(saved: dict[str, Any], current: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both fingerprints with each source's data as one text, equal where the data was only moved.

    Checkpoints of earlier versions say nothing of it, nor of the chat template; then neither side does.
    """
    saved, current = copy.deepcopy(saved), copy.deepcopy(current)
    for old, new in zip(saved["sources"], current["sources"], strict=False):
        if "template" not in old:
            new.pop("template", None)
        before, now = old.pop("data", None), new.pop("data", None)
        if before and now and before["content"] != now["content"]:
            old["data"], new["data"] = (
                f"{os.fspath(d['path'])}: {d['content']}" if d["path"] else d["content"]
                for d in (before, now)
            )
    return saved, current


def _differences(saved: Any, current: Any, *, path: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(current, dict):
        out = []
        for key in sorted({*saved, *current}):
            out += _differences(saved.get(key), current.get(key), path=f"{path}.{key}" if path else key)
        return out
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        pairs = enumerate(zip(saved, current, strict=True))
        return [d for i, (a, b) in pairs for d in _differences(a, b, path=f"{path}[{i}]")]
    if isinstance(saved, list) and isinstance(current, list):
        return [f"{path}: {len(saved)} in the checkpoint, {len(current)} now"]
    return [] if saved == current else [f"{path}: {saved!r} in the checkpoint, {current!r} now"]


def check_fingerprint(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse to go on with other data, another order or another packing than the checkpoint's.

    Errors: UserError that lists every difference.
    """
    differences = _differences(saved, current)
    if differences:
        raise UserError(
            f"the data is not that of the checkpoint, so it cannot be resumed: {'; '.join(differences)}"
            " (restore these settings, or keep the data state out of the resume with"
            " checkpoint.exclude_from_loading = ['dataloader'])"
        )
