"""Run a generated program where it can do little harm.

The program is a child in a session of its own with limits on time, memory, processes and file
size, an empty environment, and an empty working folder that is removed. It lives in namespaces of its
own: no network, no signals to other processes, all files but its folder read-only (from Linux 5.12),
and when its first process ends, the kernel kills the rest. Started by root, it runs as nobody if
nobody may read Python. It is no virtual machine: what its user may read, it can read.

This file runs as a script in the child, before the program: it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "failed", "timeout", "memory", "refused"]

_NEWNS, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS
_DUMPABLE = 4  # PR_SET_DUMPABLE
_RECURSIVE, _SET_MOUNT_ATTRIBUTES, _READ_ONLY = 0x8000, 442, 1  # AT_RECURSIVE, mount_setattr
_BIND, _PRIVATE, _ALL_BELOW = 0x1000, 1 << 18, 0x4000  # MS_BIND, MS_PRIVATE, MS_REC
_NOBODY = 65534
_REFUSED = 97
"""Exit code of the child when it could not be isolated, before any of the program has run."""

_GRACE = 5.0
"""Seconds in which killed processes must be gone."""

MOST_OUTPUT = 64 * 1024
"""Bytes of output that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of a program."""

    status: Status
    """``ok``: exit code 0. ``refused``: the machine cannot isolate it, so it was not run."""

    exit_code: int | None
    """Negative: killed by that signal; None after a timeout or when refused."""

    finished: bool
    """Whether its last line was run; a program that exits before says nothing by exit code 0."""

    output: str
    """Standard output and error together, at most ``MOST_OUTPUT`` bytes."""

    seconds: float
    """Wall-clock time."""

    @property
    def ok(self) -> bool:
        """Whether the program ended without an error."""
        return self.status == "ok"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a program may use."""

    seconds: float = 10.0
    """Wall-clock time, and (rounded up) CPU time of each process."""

    memory_bytes: int = 1 << 30
    """Address space of each process."""

    processes: int = 16
    """Processes and threads of the program."""

    file_bytes: int = 1 << 20
    """Size of a file that it writes."""


def run(
    code: str,
    *,
    timeout_s: float = 10.0,
    memory_bytes: int = 1 << 30,
    network: Literal["refuse", "allow"] = "refuse",
    arguments: Sequence[str] = (),
) -> Result:
    """Run Python ``code`` and wait for it; no process of it is left afterwards.

    ``network="allow"``: run it where the machine permits no namespaces, with the network it has
    and, against processes that leave the session, only the limits.
    """
    limits = Limits(seconds=timeout_s, memory_bytes=memory_bytes)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        cwd, program, log, end = home / "cwd", home / "program.py", home / "output", home / "end"
        cwd.mkdir()
        program.write_text(code, encoding="utf-8")
        if _becomes_nobody():
            home.chmod(0o755)
            os.chown(cwd, _NOBODY, _NOBODY)
        settings = [repr(limits.seconds), limits.memory_bytes, limits.processes, limits.file_bytes, network]
        with log.open("wb") as output, end.open("wb") as told:
            settings.append(told.fileno())
            command = [sys.executable, "-I", "-B", __file__, *map(str, settings), str(program), *arguments]
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={"PATH": os.defpath, "HOME": str(cwd), "TMPDIR": str(cwd), "LC_ALL": "C.UTF-8"},
                start_new_session=True,
                pass_fds=[told.fileno()],
            )
            exit_code = _wait(child, seconds=timeout_s)
        with log.open("rb") as output:
            text = output.read(MOST_OUTPUT).decode("utf-8", errors="replace")
        finished = end.stat().st_size > 0
    seconds = time.monotonic() - begin
    if exit_code == _REFUSED and network == "refuse":
        return Result(status="refused", exit_code=None, finished=False, output=text, seconds=seconds)
    return _result(exit_code, text, finished=finished, seconds=seconds)


def _wait(child: subprocess.Popen[bytes], *, seconds: float) -> int | None:
    """The exit code, or None after a timeout; the program's processes are dead when it returns."""
    try:
        # A second for the interpreter to start on a busy machine; the CPU limit counts the program alone.
        return child.wait(timeout=seconds + 1.0)
    except subprocess.TimeoutExpired:
        child.terminate()  # the child then kills the namespace and waits until it is empty
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_GRACE)
        return None
    finally:
        deadline = time.monotonic() + _GRACE
        with contextlib.suppress(ProcessLookupError):  # until the session is empty
            while time.monotonic() < deadline:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                time.sleep(0.01)


def _result(exit_code: int | None, text: str, *, finished: bool, seconds: float) -> Result:
    status: Status = "ok" if exit_code == 0 else "failed"
    if exit_code is None or exit_code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        status, exit_code = "timeout", None
    elif exit_code != 0 and "MemoryError" in text[-2000:]:
        status = "memory"
    elif exit_code > 128:
        exit_code = 128 - exit_code  # the first process of the namespace reports a signal as a shell does
    return Result(status=status, exit_code=exit_code, finished=finished, output=text, seconds=seconds)


# --- in the child ----------------------------------------------------------------------


def _call(libc: ctypes.CDLL, name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _drop_root() -> None:
    """Let the limit on processes hold, which root does not have.

    Nobody where nobody can read Python; else the real user alone, whose processes are counted.
    """
    if os.getuid() != 0:
        return
    if _becomes_nobody():
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    else:
        os.setresuid(_NOBODY, 0, 0)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Those over the new namespaces, with which a program could undo what was set up."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _call(libc, "capset", header, (ctypes.c_uint32 * 6)())


def _becomes_nobody() -> bool:
    """Whether root starts the program, and nobody can read Python."""
    library = Path(os.__file__).resolve()
    folders = all(parent.stat().st_mode & 0o001 for parent in library.parents)
    return os.getuid() == 0 and folders and bool(library.stat().st_mode & 0o004)


def _isolate(libc: ctypes.CDLL) -> None:
    """Namespaces without a network and without other processes; the caller is not in the latter yet."""
    uid, gid = os.geteuid(), os.getegid()
    _call(libc, "unshare", _NEWUSER | _NEWNET | _NEWPID | _NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _make_read_only(libc: ctypes.CDLL, folder: str) -> None:
    """All files but those of ``folder``."""
    _call(libc, "mount", None, b"/", None, _ALL_BELOW | _PRIVATE, None)
    _call(libc, "mount", folder.encode(), folder.encode(), None, _BIND, None)
    for path, change in ((b"/", (_READ_ONLY, 0)), (folder.encode(), (0, _READ_ONLY))):
        attributes = (ctypes.c_uint64 * 4)(*change, 0, 0)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        recursive = _RECURSIVE if path == b"/" else 0
        _call(libc, "syscall", _SET_MOUNT_ATTRIBUTES, -100, path, recursive, attributes, size)
    os.chdir(folder)  # into the new mount


def _limit(limits: Limits) -> None:
    cpu = max(1, -int(-limits.seconds // 1))
    for what, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))


def _first_of_namespace(libc: ctypes.CDLL) -> None:
    """Fork into the new process namespace; return in its first process, pass its end on in the other.

    When that first process ends, the kernel kills all others of the namespace, and only then does
    the wait for it return. The other process, out of the program's reach, kills it when told to end.
    """
    first = 0

    def end(*_: object) -> None:
        if first:
            os.kill(first, signal.SIGKILL)
        else:
            os._exit(1)

    signal.signal(signal.SIGTERM, end)
    first = os.fork()
    if first == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(_KILL_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        return
    _, status = os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _fork_again() -> None:
    """The program must not be process 1, whom its own signals do not reach; 1 ends as it ends."""
    child = os.fork()
    if child == 0:
        return
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(1 if code == _REFUSED else code if code >= 0 else 128 - code)


def _child(settings: Sequence[str]) -> None:
    seconds, memory, processes, file_bytes, network, told, program, *arguments = settings
    limits = Limits(
        seconds=float(seconds),
        memory_bytes=int(memory),
        processes=int(processes),
        file_bytes=int(file_bytes),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_KILL_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    text = Path(program).read_text(encoding="utf-8")
    _drop_root()
    # What the last user change has cleared, so the file maps below can be written.
    libc.prctl(_DUMPABLE, 1, 0, 0, 0)
    try:
        _isolate(libc)
    except OSError as error:
        if network == "refuse":
            print(f"cannot isolate a program on this machine: {error}", file=sys.stderr, flush=True)
            os._exit(_REFUSED)
    else:
        with contextlib.suppress(OSError):  # older kernels
            _make_read_only(libc, os.getcwd())
        _first_of_namespace(libc)
        _fork_again()
        _drop_capabilities(libc)
    _limit(limits)
    code = compile(text, program, "exec", dont_inherit=True)  # nor the annotations import of this file
    sys.argv = [program, *arguments]
    exec(code, {"__name__": "__main__", "__builtins__": __builtins__})
    os.write(int(told), b"x")


if __name__ == "__main__":
    _child(sys.argv[1:])
