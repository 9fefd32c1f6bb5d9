"""Errors whose cause is in what the user gave.

They are printed as one line, without a traceback, and end the process with a
non-zero exit code (:func:`torchtitan_ext.train.main` and every tool do so).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """Something the user can mend: a config, a path, a data set, a checkpoint.

    The message is one line that says what, where, what was got and what is
    allowed.
    """


def nearest(name: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest choice, or an empty string."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """A uniform error for a name that is not in a registry."""
    choices = sorted(choices)
    return UserError(f"unknown {kind} {name!r}{nearest(name, choices)} (allowed: {', '.join(choices)})")


def run_cli(main: Callable[[], int | None]) -> None:
    """Run a tool's ``main`` and turn a :class:`UserError` into one line and exit code 2."""
    try:
        code = main()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code or 0)
