"""Progress of long work: a bar on stderr where that is a terminal, and nothing anywhere else.

The bar tells what is done of how much, the rate (tokens/s where there are tokens), the time it took
and the time left. It is gone when the work ends, however it ends, with the cursor back in its place.
Of a torchrun only rank 0 shows one. No other module asks whether it may draw on a terminal.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

BYTES = "bytes"
"""The unit that is shown as kB, MB and GB."""

REFRESHES_PER_SECOND = 2
"""Few: the work beside it may be measured."""


@dataclass(kw_only=True, slots=True)
class Bar:
    """What is done so far; advancing it draws nothing, so it may be called for every batch."""

    what: str
    unit: str
    total: float | None
    """None where it is not known."""

    polled: Callable[[], float] | None = None
    """Gives what is done, for work that cannot say so itself."""

    done: float = 0
    skipped: float = 0
    """Part of what is done that took no time, such as what an earlier run left."""

    tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    def advance(self, count: float = 1, *, tokens: int = 0) -> None:
        """``count`` more units are done, in which there were ``tokens``."""
        self.done += count
        self.tokens += tokens

    def skip(self, count: float) -> None:
        """``count`` units need not be done."""
        self.done += count
        self.skipped += count

    def turn_to(self, what: str, *, total: float | None = None, unit: str = "") -> None:
        """Go on with the next part of the work."""
        self.what, self.total, self.unit = what, total, unit
        self.polled, self.done, self.skipped, self.tokens = None, 0, 0, 0
        self.began = time.monotonic()

    def poll(self) -> None:
        """Ask for what is done, where that is how it is known."""
        if self.polled is not None:
            self.done = self.polled() if self.total is None else min(self.polled(), self.total)

    def counted(self) -> str:
        """Done and total."""
        if not self.unit:
            return ""
        if self.unit == BYTES:
            return decimal(int(self.done)) + ("" if self.total is None else f"/{decimal(int(self.total))}")
        total = "" if self.total is None else f"/{self.total:,.0f}"
        return f"{self.done:,.0f}{total} {self.unit}"

    def rate(self, now: float) -> str:
        """Tokens, else units, for each second; empty while nothing is known."""
        seconds, work = now - self.began, self.done - self.skipped
        if seconds <= 0 or work <= 0:
            return ""
        if self.tokens:
            return f"{_digits(self.tokens / seconds)} tokens/s"
        if self.unit == BYTES:
            return f"{decimal(int(work / seconds))}/s"
        return f"{_digits(work / seconds)} {self.unit}/s"

    def left(self, now: float) -> str:
        """The time left, if all goes on as it did; empty where that is not known."""
        work = self.done - self.skipped
        if self.total is None or work <= 0:
            return ""
        return f"{_clock((now - self.began) * max(self.total - self.done, 0) / work)} left"


@contextmanager
def bar(
    what: str, *, total: float | None, unit: str, polled: Callable[[], float] | None = None
) -> Generator[Bar]:
    """Show a bar while the block runs; one inside another stands under it.

    ``what``: a word or two; nothing is shown without. ``total``: in ``unit``, None if it is not known.
    ``polled``: see :class:`Bar`; it may raise OSError.
    """
    one = Bar(what=what, unit=unit, total=total, polled=polled)
    if not what or not can_show():
        yield one
        return
    with _display() as display:
        task = display.add_task(what, total=None, bar=one)
        try:
            yield one
        finally:
            display.remove_task(task)


def can_show() -> bool:
    """Whether bars are shown: by rank 0, where stderr is a terminal that can move its cursor."""
    if os.environ.get("RANK", "0") != "0" or os.environ.get("TERM") == "dumb":
        return False
    return sys.stderr is not None and sys.stderr.isatty()


def plain_line(text: str) -> None:
    """A line on stderr instead of a bar: where one is shown this does nothing."""
    if os.environ.get("RANK", "0") == "0" and not can_show():
        print(text, file=sys.stderr, flush=True)


def folder_bytes(folder: Path) -> float:
    """Bytes of all files in a folder. Errors: OSError while files come and go."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def own_bars_alone() -> Generator[None]:
    """Inside, the bars of libraries (tqdm) are off: they draw into files, and over ours.

    tqdm reads its environment variable when it is imported, and torch imports it.
    """
    from tqdm import tqdm

    plain: Any = tqdm.__init__

    def off(self: Any, *args: Any, **given: Any) -> None:
        plain(self, *args, **{**given, "disable": True})

    tqdm.__init__ = off
    try:
        yield
    finally:
        tqdm.__init__ = plain


# --- the terminal ----------------------------------------------------------------------

_open: list[Progress] = []
"""The display, while there is one: a terminal has room for one."""


@contextmanager
def _display() -> Generator[Progress]:
    """The display that is open, or a new one for the time of the block."""
    if _open:
        yield _open[0]
        return
    # Lines for a file must not go to the terminal; those for the same terminal go above the bar.
    redirect = sys.stdout is not None and sys.stdout.isatty()
    display = Progress(
        SpinnerColumn(),
        _Told(lambda one, now: Text(one.what)),
        _Told(_line, ratio=1),
        _Told(lambda one, now: Text(one.counted())),
        _Told(lambda one, now: Text(one.rate(now))),
        _Told(lambda one, now: Text(_clock(now - one.began))),
        _Told(lambda one, now: Text(one.left(now))),
        # Soft: a long line of a table is the terminal's to wrap.
        console=Console(stderr=True, force_terminal=True, soft_wrap=True),
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
        redirect_stdout=redirect,
        expand=True,
    )
    with ExitStack() as stack:
        stack.enter_context(_ended_by_sigterm())
        stack.enter_context(display)
        stack.enter_context(_logs_above())
        _open.append(display)
        stack.callback(_open.clear)
        yield display


class _Told(ProgressColumn):
    """A column that is drawn from a :class:`Bar`."""

    def __init__(self, draw: Callable[[Bar, float], RenderableType], *, ratio: int | None = None) -> None:
        super().__init__(table_column=Column(no_wrap=True, ratio=ratio))
        self.draw = draw

    def render(self, task: Task) -> RenderableType:
        one: Bar = task.fields["bar"]
        with suppress(OSError):  # files were renamed or removed meanwhile; it is asked again soon
            one.poll()
        return self.draw(one, time.monotonic())


def _line(one: Bar, now: float) -> RenderableType:
    total = None if not one.total else one.total
    return ProgressBar(total=total, completed=one.done, pulse=total is None, animation_time=now)


@contextmanager
def _logs_above() -> Generator[None]:
    """Handlers that write to the stderr or stdout from before write above the bar, as print does."""
    streams = {sys.__stderr__: sys.stderr, sys.__stdout__: sys.stdout}
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler and handler.stream in streams:
            moved.append((handler, handler.stream))
            handler.setStream(streams[handler.stream])
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


@contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """Inside, SIGTERM leaves through the blocks that are open, as Ctrl-C does, where nobody else takes it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
