"""Generated programs in the sandbox: each bad one ends in time, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from torchtitan_ext.evaluation import sandbox

REFUSED = sandbox.run("pass").status == "refused"
isolated = pytest.mark.skipif(REFUSED, reason="this machine permits no namespaces")
NETWORK = "allow" if REFUSED else "refuse"
SLACK = 8.0
"""Seconds that a busy machine may need besides the limit."""


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    """Where the programs of a test lie, by which their processes are known."""
    home = tempfile.mkdtemp()
    os.chmod(home, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", home)
    yield home
    assert os.listdir(home) == [], "a folder is left"
    shutil.rmtree(home)


def run(code: str, **options) -> sandbox.Result:
    options = {"timeout_s": 5.0, "network": NETWORK, **options}
    begin = time.monotonic()
    result = sandbox.run(code, **options)
    assert time.monotonic() - begin < options["timeout_s"] + SLACK
    assert not left_processes(), "a process is left"
    return result


def left_processes() -> list[str]:
    """Command lines of this test's programs that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            if str(tempfile.tempdir) in line:
                found.append(line)
    return found


def test_right_and_wrong_programs():
    ok = run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
    assert ok.ok and ok.exit_code == 0 and "out" in ok.output and "err" in ok.output
    wrong = run("assert 1 == 2, 'no'")
    assert (wrong.status, wrong.exit_code) == ("failed", 1) and "AssertionError: no" in wrong.output
    assert run("import sys; sys.exit(3)").exit_code == 3
    assert run("import sys; sys.exit(97)").status == "failed"
    assert run("import os; os.kill(os.getpid(), 9)").exit_code == -9
    assert "SyntaxError" in run("def f(:").output
    assert len(run(f"print('x' * {10**6})").output) <= sandbox.MOST_OUTPUT


@pytest.mark.parametrize("way", ["raise SystemExit", "quit()", "import os; os._exit(0)"])
def test_an_early_exit_is_told_from_the_end(way):
    early, whole = run(f"{way}\nassert False"), run("print(1)")
    assert early.ok and not early.finished
    assert whole.ok and whole.finished
    assert not run("import atexit, os\natexit.register(os._exit, 0)\nassert False").finished


def test_a_program_is_python_without_future_statements_of_its_own():
    result = run("from typing import Union\ndef f(x: Union[int, None]): ...\nprint(f.__annotations__)")
    assert result.output == "{'x': typing.Optional[int]}\n"
    assert "SyntaxError" not in run("from __future__ import annotations\ndef f(x: NotThere): ...").output


def test_endless_loops_and_sleep():
    for code in ("while True: pass", "import time; time.sleep(600)"):
        result = run(code, timeout_s=0.5)
        assert (result.status, result.exit_code) == ("timeout", None)


def test_signals_that_a_program_may_ignore():
    code = (
        "import signal\n"
        "for s in range(1, 32):\n"
        "    if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass"
    )
    assert run(code, timeout_s=0.5).status == "timeout"


@pytest.mark.parametrize("code", ["x = bytearray(10**11)", "x = []\nwhile True: x.append(bytearray(10**7))"])
def test_memory(code):
    result = run(code, memory_bytes=150 << 20)
    assert result.status == "memory" and "MemoryError" in result.output


@isolated
def test_few_processes():
    code = (
        "import os, time\nforks = 0\ntry:\n    while forks < 50:\n"
        "        if os.fork() == 0: time.sleep(600)\n        forks += 1\n"
        "except OSError: pass\nprint('forks', forks)"
    )
    result = run(code)
    assert result.ok and 0 < int(result.output.split()[1]) < 20


@isolated
def test_what_was_set_up_cannot_be_undone():
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "attributes = (ctypes.c_uint64 * 4)(0, 1, 0, 0)\n"
        "print(libc.syscall(442, -100, b'/', 0x8000, attributes, ctypes.c_size_t(32)))\n"
        "print(libc.umount2(b'/proc', 2))"
    )
    assert run(code).output.split() == ["-1", "-1"]


@isolated
def test_fork_bomb():
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(bomb, timeout_s=0.5).status == "timeout"


@isolated
def test_processes_that_leave_the_session():
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('gone')"
    assert run(code).ok


@isolated
def test_no_network():
    for code in (
        "import socket; socket.create_connection(('127.0.0.1', 22), timeout=2)",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('10.0.0.1', 53))",
    ):
        result = run(code)
        assert result.status == "failed" and "unreachable" in result.output


def test_files_outside_its_folder(tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("as it was")
    code = (
        f"import os\nopen('inside', 'w').write('fine')\nprint(os.getcwd(), os.listdir())\n"
        f"open({str(victim)!r}, 'w').write('overwritten')"
    )
    result = run(code)
    assert "['inside']" in result.output
    if not REFUSED:
        assert result.status == "failed" and victim.read_text() == "as it was"
    assert not Path(result.output.split()[0]).parent.exists()


def test_large_files_and_the_environment(monkeypatch):
    assert run("open('big', 'wb').write(b'x' * 10**8)").status == "failed"
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "x")
    assert run("import os, sys; sys.exit('SECRET_OF_THE_PARENT' in os.environ)").ok


def test_refused_where_nothing_can_be_isolated(monkeypatch, tmp_path):
    # As on a machine that forbids namespaces: the call fails.
    source, call = Path(sandbox.__file__).read_text(), '_call(libc, "unshare", '
    assert call in source
    broken = tmp_path / "sandbox.py"
    broken.write_text(source.replace(call, f"{call}-1 | "))
    monkeypatch.setattr(sandbox, "__file__", str(broken))
    result = sandbox.run("print('ran')")
    assert (result.status, result.exit_code) == ("refused", None) and "ran" not in result.output
    assert sandbox.run("print('ran')", network="allow").output == "ran\n"
