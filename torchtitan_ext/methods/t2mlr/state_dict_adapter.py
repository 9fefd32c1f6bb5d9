"""Names of a T2MLR model in a Hugging Face folder: the backbone's, and its own for the recurrence."""

from typing import ClassVar

from torchtitan_ext.backbones import HFAdapter


class T2MLRAdapter(HFAdapter):
    """The backbone's adapter; the recurrent parameters keep their names and may be absent (retrofit)."""

    allow_missing: ClassVar[tuple[str, ...]] = ("core.fusion.*",)
