"""The launcher: signals, restarts, exit codes and a rendezvous that fails. Its processes are tiny scripts."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import config_from_args

from tests.distributed import launch_jobs
from tests.distributed.harness import free_port, start
from tests.paths import ROOT
from torchtitan_ext import launch
from torchtitan_ext.stopping import STOPPED, STOPPED_UNSAVED

WORKER = str(ROOT / "tests" / "distributed" / "launch_worker.py")
LOCAL = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


class Launcher:
    """A launcher in a process of its own, whose workers run ``task``."""

    def __init__(self, folder: Path, task: str, *args: str, name: str = "log", **env: str) -> None:
        self.log, self.notes = folder / name, folder / "notes"
        self.log.touch()
        self.notes.touch()
        argv = [*(args or ("--nproc-per-node", "2", *LOCAL)), WORKER, str(self.notes), task]
        env = {"OMP_NUM_THREADS": "1", **env}  # without it torchrun prints a warning
        processes, self._results = start(launch_jobs.launched, world=1, argv=argv, log=str(self.log), env=env)
        self.process = processes[0]

    def noted(self, text: str, *, count: int = 1) -> list[str]:
        """The workers' notes, once ``count`` of them hold ``text``."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            lines = self.notes.read_text().splitlines()
            if sum(text in line for line in lines) >= count:
                return lines
            time.sleep(0.02)
        raise AssertionError(f"no {count} x {text!r} in {lines}; log:\n{self.log.read_text()}")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """Exit code and everything printed."""
        _, value, error = self._results.get(timeout=60)
        self.process.join(20)
        assert error is None, error
        printed = self.log.read_text()
        assert "Traceback" not in printed, printed
        return pickle.loads(value), printed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, STOPPED), (signal.SIGUSR1, STOPPED_UNSAVED)])
def test_a_stop_is_passed_on_and_waited_for(number, code, tmp_path):
    launcher = Launcher(tmp_path, f"wait({code})", "--nproc-per-node", "2", "--max-restarts", "3", *LOCAL)
    launcher.noted("up", count=2)
    launcher.signal(number)
    got, printed = launcher.end()
    assert got == code
    assert f"launch: {number.name}: 2 processes finish their step and save" in printed
    assert f"launch: stopped (exit code {code})" in printed
    notes = launcher.noted("got SIGUSR1", count=2)
    assert sum("up" in line for line in notes) == 2  # and nothing was restarted


@pytest.mark.parametrize("alone", [(), ("--standalone",)])
def test_without_a_rendezvous_the_processes_of_one_node_meet(alone, tmp_path):
    """As torchrun does, of which scripts name no more than the number of processes."""
    launcher = Launcher(tmp_path, "pass", "--nproc-per-node", "2", *alone)
    assert launcher.end()[0] == 0


def test_the_address_of_several_nodes_has_torchruns_port():
    config, _, _ = config_from_args(launch._arguments(["--nnodes", "2", "--master-addr", "node0", WORKER]))
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "node0:29500")


def test_a_second_signal_ends_everything_at_once(tmp_path):
    launcher = Launcher(tmp_path, "wait(0, ignore=True)")
    launcher.noted("up", count=2)
    launcher.signal(signal.SIGTERM)
    launcher.signal(signal.SIGTERM)  # of the same request, as a scheduler sends it
    time.sleep(1.3)
    assert launcher.process.is_alive()
    begin = time.monotonic()
    launcher.signal(signal.SIGTERM)
    got, printed = launcher.end()
    assert got == 128 + signal.SIGTERM and time.monotonic() - begin < 60
    assert "ending all processes at once" in printed


def test_interrupt_ends_everything_at_once(tmp_path):
    launcher = Launcher(tmp_path, "wait(0, ignore=True)")
    launcher.noted("up", count=2)
    launcher.signal(signal.SIGINT)
    assert launcher.end()[0] == 128 + signal.SIGINT


def test_the_grace_is_bounded(tmp_path):
    launcher = Launcher(tmp_path, "wait(0, ignore=True)", STOP_GRACE="1")
    launcher.noted("up", count=2)
    launcher.signal(signal.SIGUSR1)
    got, printed = launcher.end()
    assert got == STOPPED and "not stopped within 1 s (STOP_GRACE): killed" in printed


def test_a_signal_before_the_processes_can_handle_it(tmp_path):
    """They die of it by default; nothing had begun, so nothing is lost."""
    unhandled = "signal.signal(signal.SIGUSR1, signal.SIG_DFL); note('bare'); wait(0, ignore=True)"
    launcher = Launcher(tmp_path, unhandled, "--nproc-per-node", "2", "--max-restarts", "1", *LOCAL)
    launcher.noted("bare", count=2)
    launcher.signal(signal.SIGTERM)
    got, printed = launcher.end()
    assert got == STOPPED and "stopped before the first step" in printed


def test_a_killed_process_restarts_all_with_a_store_of_their_own(tmp_path):
    task = "die(9) if (rank, restart) == (1, 0) else wait(0) if restart == 0 else None"
    launcher = Launcher(tmp_path, task, "--nproc-per-node", "2", "--max-restarts", "2", *LOCAL)
    got, printed = launcher.end()
    assert got == 0
    assert "rank 1 (process" in printed and "was ended by SIGKILL; restart 1 of 2" in printed
    ups = [line.split() for line in launcher.noted("up", count=4)]
    stores = {restart: {u[3] for u in ups if u[2] == f"restart={restart}"} for restart in (0, 1)}
    # A store that is kept holds the addresses of the dead processes.
    assert len(stores[0]) == len(stores[1]) == 1 and stores[0] != stores[1]


def test_a_survivor_in_a_collective_does_not_delay_the_restart(tmp_path):
    """It notes SIGTERM as a stop and stays; torchelastic would wait half a minute for it."""
    task = "die(9) if (rank, restart) == (0, 0) else wait(0, ignore=True) if restart == 0 else None"
    begin = time.monotonic()
    launcher = Launcher(tmp_path, task, "--nproc-per-node", "2", "--max-restarts", "1", *LOCAL)
    assert launcher.end()[0] == 0 and time.monotonic() - begin < 30


def test_without_restarts_left_the_failed_rank_is_named(tmp_path):
    task = "os._exit(7) if rank == 1 else wait(0)"
    launcher = Launcher(tmp_path, task, "--nproc-per-node", "2", "--max-restarts", "1", *LOCAL)
    got, printed = launcher.end()
    assert got == 1
    assert "failed with exit code 7; restart 1 of 1" in printed
    assert "failed with exit code 7; no restarts left of 1 (--max-restarts)" in printed


@pytest.mark.parametrize(
    ("code", "rank", "expected"),
    [
        (2, 0, ""),  # the rank itself says why
        (2, 1, "error: rank 1 refused its input; LOG_RANK=1 shows why\n"),
        (3, 1, "error: rank 1 ended the run (exit code 3); LOG_RANK=1 shows why\n"),
    ],
)
def test_an_error_that_would_come_again_is_not_tried_again(code, rank, expected, tmp_path):
    task = f"os._exit({code}) if rank == {rank} else wait(0)"
    launcher = Launcher(tmp_path, task, "--nproc-per-node", "2", "--max-restarts", "3", *LOCAL)
    assert launcher.end() == (code, expected)
    # A rank that had no time to come up before the other one left is no restart.
    assert "restart=0" in (notes := launcher.notes.read_text()) and "restart=1" not in notes


def test_a_rank_that_lost_contact_is_restarted_and_its_exit_code_kept(tmp_path):
    launcher = Launcher(tmp_path, "os._exit(4)", "--nproc-per-node", "1", "--max-restarts", "1", *LOCAL)
    got, printed = launcher.end()
    assert got == 4 and "restart 1 of 1" in printed and printed.count("\n") == 2


def test_a_grace_that_is_no_number(tmp_path):
    got, printed = Launcher(tmp_path, "pass", STOP_GRACE="soon").end()
    assert (
        got == 2
        and printed == "error: STOP_GRACE = 'soon' (environment): must be a positive number of seconds\n"
    )


# --- the rendezvous ------------------------------------------------------------------------


def node(port: int, *, host: str = "127.0.0.1", timeout: int = 30, nodes: int = 2) -> list[str]:
    return [
        *("--nnodes", str(nodes), "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"),
        *("--rdzv-endpoint", f"{host}:{port}", "--rdzv-conf", f"join_timeout={timeout}"),
    ]


def test_fewer_nodes_than_asked_is_one_line(tmp_path):
    port = free_port()
    got, printed = Launcher(tmp_path, "pass", *node(port, timeout=2)).end()
    assert got == 2
    assert printed.startswith(f"error: rendezvous at 127.0.0.1:{port}: 1 of 2 nodes joined within 2 s")
    assert printed.count("\n") == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-node.invalid"])
def test_an_endpoint_that_cannot_be_reached_is_one_line(host, tmp_path):
    got, printed = Launcher(tmp_path, "pass", *node(29400, host=host, timeout=1)).end()
    assert got == 2
    assert printed.startswith(f"error: rendezvous endpoint {host}:29400 cannot be reached from")
    assert "within 1 s" in printed and printed.count("\n") == 1


def test_a_stop_while_nodes_are_waited_for(tmp_path):
    launcher = Launcher(tmp_path, "pass", *node(free_port()))
    time.sleep(2)
    begin = time.monotonic()
    launcher.signal(signal.SIGTERM)
    got, printed = launcher.end()
    assert got == STOPPED and "stopped before any process ran" in printed
    assert time.monotonic() - begin < 15


def test_two_nodes_meet_end_and_stop_together(tmp_path):
    """One of them serves the rendezvous, whichever starts first; the stop code waits for both."""
    port = free_port()
    task = f"wait({STOPPED})"
    pair: list[Any] = [Launcher(tmp_path, task, *node(port), name=name) for name in ("log0", "log1")]
    notes = pair[0].noted("world=2", count=2)
    assert sorted(line.split()[0] for line in notes) == ["0", "1"]
    for launcher in pair:
        launcher.signal(signal.SIGUSR1)
    assert [launcher.end()[0] for launcher in pair] == [STOPPED, STOPPED]
