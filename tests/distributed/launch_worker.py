"""A process for launcher tests that does as it is told, without torch.

``launch_worker.py LOG TASK``: TASK is Python that sees ``rank``, ``restart`` and ``note``.
A worker notes SIGUSR1 and SIGTERM; ``wait(code)`` exits with ``code`` after the first of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

got: list[str] = []
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def note(text: str) -> None:
    with Path(sys.argv[1]).open("a") as file:
        file.write(f"{rank} {text}\n")


def wait(code: int, *, ignore: bool = False) -> None:
    deadline = time.monotonic() + 60
    while (ignore or not got) and time.monotonic() < deadline:
        time.sleep(0.02)
    note(f"got {' '.join(got)}")
    os._exit(code)


def die(number: int) -> None:
    # Once all are up: another that is still starting would be ended before it has noted anything.
    deadline, world = time.monotonic() + 60, int(os.environ["WORLD_SIZE"])
    while Path(sys.argv[1]).read_text().count(f"up restart={restart} ") < world:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(os.getpid(), number)
    time.sleep(60)


for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, lambda number, frame: got.append(signal.Signals(number).name))
note(f"up restart={restart} store={os.environ['MASTER_PORT']} world={os.environ['WORLD_SIZE']}")
exec(sys.argv[2])
