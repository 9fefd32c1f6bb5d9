"""Folders as the authors of a method publish them: their names and their config fields, as data.

Each module beside this one knows one format and says what is known about it and from where.
What a folder has and this package cannot compute is refused in one line; nothing is dropped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtitan_ext.checkpoint.published import alodlm, t2mlr
from torchtitan_ext.checkpoint.published.facts import Published
from torchtitan_ext.errors import UserError


def recognise(folder: str | Path) -> Published | None:
    """What a published folder holds; None for any other.

    Only headers and small files are read.
    Errors: a folder of a known format with something that this package does not have.
    """
    method = method_of(folder)
    if method is None:
        return None
    module = {"alodlm": alodlm, "t2mlr": t2mlr}[method]
    return module.describe(Path(folder), _config(Path(folder)))


def method_of(folder: str | Path) -> str | None:
    """The method whose authors publish folders of this form; None for any other folder."""
    path = Path(folder)
    if alodlm.is_published(path):
        return "alodlm"
    return "t2mlr" if t2mlr.is_published(_config(path)) else None


def refuse(folder: str | Path) -> None:
    """Refuse a published folder where only this package's own names can be read."""
    method = method_of(folder)
    if method is not None:
        raise UserError(
            f"{folder} is a folder of {method}'s authors, with their names; "
            "convert it first (tools/convert_from_hf.py) and load the result"
        )


def _config(folder: Path) -> dict[str, Any]:
    """config.json, or nothing where there is none; who needs it says what is wrong with it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return config if isinstance(config, dict) else {}
