"""Progress bars: on a pseudo-terminal, on a pipe, and however the work ends."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import pty
import re
import signal
import sys
import threading
import time

import pytest
from tqdm import tqdm

from tests.paths import ROOT
from tests.unit.test_evaluate_tasks import S3, oracle
from tests.unit.test_trajectories_common import load, make_set, write_checkpoint
from torchtitan_ext import progress
from torchtitan_ext.checkpoint import hf_folder
from torchtitan_ext.data.tasks.group_retrieval import GroupRetrieval
from torchtitan_ext.evaluation import tasks

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """The near end of a pseudo-terminal, read all the time so that a writer never waits."""

    def __init__(self) -> None:
        self.near, far = pty.openpty()
        self.far = os.fdopen(far, "w", buffering=1)
        self.seen = b""
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        while True:
            try:
                found = os.read(self.near, 65536)
            except OSError:  # the far end is closed
                found = b""
            if not found:
                return
            self.seen += found

    def close(self) -> str:
        """Everything that was written."""
        self.far.close()
        self.thread.join()
        os.close(self.near)
        return self.seen.decode()


@pytest.fixture
def attach(monkeypatch):
    """Makes stderr a terminal of 100 columns, but not stdout; in a test, since pytest sets both before it."""
    made = []

    def attached() -> Terminal:
        made.append(Terminal())
        monkeypatch.setattr(sys, "stderr", made[0].far)
        for name, value in {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}.items():
            monkeypatch.setenv(name, value)
        for name in ("RANK", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        return made[0]

    yield attached
    for one in made:
        if not one.far.closed:
            one.close()


def visible(text: str) -> str:
    """What stays on the screen: a line that was erased or gone back over is not there."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[2K|\x1b\[1A|\x1b\[\?25[lh]|\r|\n)", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part not in ("\r", HIDE, SHOW):
            lines[row] += part
    return "\n".join(lines).strip()


# --- on a terminal ---------------------------------------------------------------------


def test_a_bar_appears_with_what_is_done_and_disappears(attach, capsys):
    terminal = attach()
    with progress.bar("chain_sum", total=8, unit="samples") as bar:
        bar.advance(2, tokens=50)
        progress._open[0].refresh()  # comes by itself in half a second
        print("a line for a file")
        progress.plain_line("2 of 8")  # only where there is no bar
    print("done", file=sys.stderr)
    seen = terminal.close()
    assert "chain_sum" in seen and "━" in seen and "2/8 samples" in seen and "tokens/s" in seen
    assert seen.startswith(HIDE) and seen.count(SHOW) == 1 and visible(seen) == "done"
    assert capsys.readouterr().out == "a line for a file\n"


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(1)], ids=type)
def test_an_error_leaves_the_terminal_as_it_was(attach, error):
    terminal = attach()
    before = threading.active_count(), sys.stderr, signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(type(error)),
        progress.bar("outer", total=8, unit="samples"),
        progress.bar("inner", total=None, unit="documents"),
    ):
        raise error
    print("error: bad", file=sys.stderr)
    for _ in range(100):  # the thread that draws ends within its interval
        if threading.active_count() == before[0]:
            break
        time.sleep(0.05)
    assert (threading.active_count(), sys.stderr, signal.getsignal(signal.SIGTERM)) == before
    seen = terminal.close()
    assert seen.rindex(HIDE) < seen.rindex(SHOW) < seen.rindex("error: bad")
    assert visible(seen) == "error: bad"
    assert not progress._open  # the terminal is free for the next


def test_sigterm_leaves_through_the_bar(attach):
    terminal = attach()
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread alone")
    assert progress.can_show()  # else nothing takes the signal
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as error, progress.bar("long", total=1, unit="samples"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert error.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert terminal.close().rstrip().endswith(SHOW)


def test_lines_for_the_same_terminal_stay_above_the_bar(attach, monkeypatch):
    terminal = attach()
    monkeypatch.setattr(sys, "stdout", terminal.far)
    handler = logging.StreamHandler(terminal.far)
    monkeypatch.setattr(sys, "__stderr__", terminal.far)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    long = "row" + " x y" * 40
    with progress.bar("chain_sum", total=8, unit="samples"):
        print(long)
        logging.getLogger().warning("careful")
    assert handler.stream is terminal.far
    assert visible(terminal.close()).split("\n") == [long, "careful"]


def test_one_bar_inside_another_stands_under_it(attach):
    terminal = attach()
    with progress.bar("outer", total=8, unit="samples"):
        with progress.bar("inner", total=4, unit="settings") as inner:
            inner.advance(3)
            progress._open[0].refresh()
        progress._open[0].refresh()
        assert [task.description for task in progress._open[0].tasks] == ["outer"]
    seen = terminal.close()
    assert re.search(r"outer.*\n.*inner.*3/4 settings", seen) and visible(seen) == ""


# --- elsewhere -------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["pipe", "rank 1", "dumb", "no name"])
def test_nothing_at_all_where_there_is_no_terminal(attach, monkeypatch, where):
    terminal = attach()
    stream = terminal.far
    if where == "pipe":
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich would take it for a terminal
    monkeypatch.setenv("RANK", "1" if where == "rank 1" else "0")
    monkeypatch.setenv("TERM", "dumb" if where == "dumb" else "xterm")
    with progress.bar("" if where == "no name" else "a", total=2, unit="samples") as bar:
        bar.advance()
        progress.plain_line("1 of 2")
    written = stream.getvalue() if where == "pipe" else terminal.close().replace("\r\n", "\n")
    assert written == ("1 of 2\n" if where in ("pipe", "dumb") else "")
    assert bar.done == 1


def test_bars_of_libraries_are_off_inside():
    def drawn() -> str:
        file = io.StringIO()
        list(tqdm(range(3), file=file, disable=False))
        return file.getvalue()

    assert drawn()
    with pytest.raises(KeyError), progress.own_bars_alone():
        assert drawn() == ""
        raise KeyError
    assert drawn()


# --- numbers ---------------------------------------------------------------------------


def test_rates_and_times():
    bar = progress.Bar(what="a", unit="prompts", total=1200, began=100.0)
    assert (bar.counted(), bar.rate(101.0), bar.left(101.0)) == ("0/1,200 prompts", "", "")
    bar.skip(400)  # took no time, so it says nothing about the rest
    assert (bar.rate(110.0), bar.left(110.0)) == ("", "")
    bar.advance(20)
    assert (bar.counted(), bar.rate(110.0)) == ("420/1,200 prompts", "2 prompts/s")
    assert bar.left(110.0) == "0:06:30 left"  # 780 more at 2 a second
    bar.advance(20, tokens=25_000)
    assert bar.rate(110.0) == "2,500 tokens/s"
    bar.turn_to("b")
    assert (bar.counted(), bar.what, bar.total, bar.done, bar.tokens) == ("", "b", None, 0, 0)


def test_bytes_are_asked_for(tmp_path):
    (tmp_path / "deep").mkdir()
    grown = lambda: progress.folder_bytes(tmp_path)  # noqa: E731
    bar = progress.Bar(what="a", unit=progress.BYTES, total=2_500_000, polled=grown, began=0.0)
    (tmp_path / "deep" / "a").write_bytes(bytes(500_000))
    bar.poll()
    assert (bar.counted(), bar.rate(2.0), bar.left(2.0)) == (
        "500.0 kB/2.5 MB", "250.0 kB/s", "0:00:08 left",
    )  # fmt: skip
    (tmp_path / "b").write_bytes(bytes(2_100_000))  # a little more than was expected
    bar.poll()
    assert bar.done == 2_500_000 and bar.left(2.0) == "0:00:00 left"


def test_a_file_that_goes_away_meanwhile_ends_nothing(attach):
    terminal = attach()

    def gone() -> float:
        raise FileNotFoundError

    with progress.bar("a", total=5, unit=progress.BYTES, polled=gone):
        progress._open[0].refresh()
    assert "0 bytes/5 bytes" in terminal.close()


# --- where it is used ------------------------------------------------------------------


@pytest.fixture
def bars(monkeypatch):
    """The bars that were shown."""
    found, real = [], progress.Bar
    monkeypatch.setattr(progress, "Bar", lambda **given: found.append(real(**given)) or found[-1])
    return found


def test_evaluation_counts_samples_and_tokens(bars):
    task = GroupRetrieval(S3)
    tasks.evaluate_lengths(oracle(3, 0), task, [1, 3], samples=5, batch_size=2, what="retrieval")
    (bar,) = bars
    tokens = 5 * sum(task.at_length(length).tokens_of_length(length) for length in (1, 3))
    assert (bar.what, bar.done, bar.total, bar.unit, bar.tokens) == ("retrieval", 10, 10, "samples", tokens)


def test_trajectories_left_by_an_earlier_run_do_not_count_for_the_rate(bars, tmp_path):
    loaded = load(write_checkpoint(tmp_path / "step-1"))
    folder = tmp_path / "set"
    make_set(loaded, folder)
    (bar,) = bars
    assert (bar.done, bar.total, bar.skipped, bar.tokens) == (8, 8, 0, 8 * 6)
    sorted(folder.glob("shard-*"))[0].unlink()
    make_set(loaded, folder)
    assert (bars[1].done, bars[1].total, bars[1].skipped, bars[1].tokens) == (8, 8, 5, 3 * 6)


def test_written_weights_are_watched(bars, tmp_path):
    import torch

    (tmp_path / "config.json").write_text("x" * 10_000)  # was there before
    tensors = {name: torch.zeros(1000) for name in "ab"}
    hf_folder.write_weights(
        tmp_path, dict.fromkeys(tensors, 4000), load=lambda names: {n: tensors[n] for n in names}
    )
    (bar,) = bars
    assert (bar.total, bar.unit, bar.done) == (8000, progress.BYTES, 0)
    bar.poll()
    assert bar.done == 8000


def test_a_tool_shows_its_bar_and_writes_the_same(attach, tmp_path, capsys):
    terminal = attach()
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "train_tokenizer.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    (tmp_path / "text.txt").write_text("one two three\n" * 50)
    given = ["--dataset", "text", "--dataset_path", str(tmp_path / "text.txt"), "--vocab_size", "270"]
    tool.main([*given, "--out", str(tmp_path / "a")])
    seen = terminal.close()
    assert "reading" in seen and visible(seen) == "" and seen.count(SHOW) == 1
    assert "\x1b" not in capsys.readouterr().out
