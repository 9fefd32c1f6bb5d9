"""The small files of a Hugging Face folder that travel with a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

FOLDER = "hf_assets"
"""Name of the folder inside a checkpoint."""

PATTERNS = (
    "config.json",
    "generation_config.json",
    "hf_keys.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*.tiktoken",
    "original/tokenizer.model",
    "*.py",  # custom model code of a folder, such as LLaDA and Dream have
)


def files(folder: Path) -> list[Path]:
    """The asset files of a folder, sorted by name."""
    found = {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def copy(source: str | Path, target: Path) -> None:
    """Copy the assets of ``source`` (if it is a folder that has any) into ``target``."""
    if not source or not Path(source).is_dir():
        return
    found = files(Path(source))
    if not found:
        return
    for path in found:
        copied = target / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copied)
