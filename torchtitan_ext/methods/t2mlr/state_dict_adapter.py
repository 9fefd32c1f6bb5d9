"""Names of a T2MLR model in a Hugging Face folder: the backbone's, and its own for the recurrence.

Folders of the paper's authors have other names: :mod:`torchtitan_ext.checkpoint.published`.
"""

from pathlib import Path
from typing import ClassVar

from torchtitan_ext.backbones import HFAdapter
from torchtitan_ext.checkpoint import hf_folder, published


class T2MLRAdapter(HFAdapter):
    """The backbone's adapter; the recurrent parameters keep their names and may be absent (retrofit)."""

    allow_missing: ClassVar[tuple[str, ...]] = ("core.fusion.*",)

    def check_folder(self, folder: str | Path) -> dict[str, hf_folder.TensorInfo]:
        """Refuse a folder that does not fit, or whose names are the authors'."""
        published.refuse(folder)
        return super().check_folder(folder)
