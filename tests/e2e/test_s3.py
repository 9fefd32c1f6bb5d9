"""The demonstration: T2MLR tracks the state of S3, in and beyond the trained length; its twin does not.

python -m pytest -m slow tests/e2e/test_s3.py
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow


def table(text: str) -> dict[str, dict[str, str]]:
    """The Markdown table that a tool printed, by the first column."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    header, _, *body = rows
    return {row[0]: dict(zip(header, row, strict=True)) for row in body}


def test_recurrence_tracks_the_state_and_the_twin_does_not(tmp_path):
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "OUT": str(tmp_path),
    }
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [str(ROOT / "launch" / "demo.sh")], capture_output=True, text=True, env=env, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = table(done.stdout)
    ours, twin = rows["s3_cpu"], rows["s3_cpu_transformer"]
    percent = lambda row, n: float(row[f"token accuracy at {n}"].rstrip("%"))  # noqa: E731
    assert percent(ours, 16) >= 99
    assert percent(ours, 32) >= 95
    assert percent(twin, 16) < 70
    assert ours["steps"] == twin["steps"]
    assert (tmp_path / "s3.png").stat().st_size > 10_000
    assert (tmp_path / "s3.csv").read_text().count("\n") == 1 + 2 * 32
