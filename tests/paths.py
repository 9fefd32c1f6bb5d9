"""Where optional test data lies."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def shared_data() -> Path | None:
    """Folder with optional real data (``TORCHTITAN_EXT_DATA`` or ``../shared/data``), or None."""
    candidate = Path(os.environ.get("TORCHTITAN_EXT_DATA", ROOT.parent / "shared" / "data"))
    return candidate if candidate.is_dir() else None
