"""Does a checkpoint's data state belong to this data?"""

from __future__ import annotations

from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan_ext.data.order import derive_seed
from torchtitan_ext.errors import UserError

_PROBE = "def f(x):\n    return 'Zoë' + str(x ** 2)  # 12345\n"


def tokenizer_probe(tokenizer: BaseTokenizer) -> str:
    """A short text that differs between tokenizers that encode differently."""
    ids = list(tokenizer.encode(_PROBE))
    special = [getattr(tokenizer, f"{role}_id", None) for role in ("bos", "eos", "pad")]
    return f"{tokenizer.get_vocab_size()} tokens, {derive_seed(str(ids), str(special)):016x}"


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
