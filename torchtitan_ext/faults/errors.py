"""Faults that end a run, each with an exit code of its own.

Like errors in the input they are one line without a traceback; the exit code
tells a scheduler whether starting again can help.
"""

from __future__ import annotations

from torchtitan_ext.errors import UserError


class RunFault(UserError):
    """A run that had begun well and cannot go on."""

    exit_code: int = 2


class NonFinite(RunFault):
    """A loss, a gradient or a weight that is NaN or infinite."""

    exit_code = 3


class LostContact(RunFault):
    """A collective that timed out, or another rank that went away."""

    exit_code = 4
