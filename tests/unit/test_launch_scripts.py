"""The launch scripts: what they print, refuse, pass on and requeue. Nothing here starts torch."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.paths import ROOT

MULTINODE = ROOT / "launch" / "run_multinode.sh"
SLURM = ROOT / "launch" / "train.slurm"

CLUSTER = {
    "NNODES": "2",
    "NGPU": "8",
    "MASTER_ADDR": "node0",
    "CONFIG_FILE": "a config.toml",
}
JOB = {"SLURM_JOB_ID": "1234", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b", "CONFIG_FILE": "x.toml"}

# Stands in for SLURM's commands: one notes its arguments, the other runs a line of the test's.
SCONTROL = '#!/bin/bash\nif [[ $1 == show ]]; then echo first; else echo "$@" >>"$NOTES"; fi\n'
SRUN = '#!/bin/bash\necho started >>"$NOTES"\neval "$FAKE_RUN"\n'


def clean(env: dict[str, str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | env


def script(path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(path), *args], env=clean(env), capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def options(line: str) -> dict[str, str]:
    """Options of a printed command, before the module it starts."""
    words = shlex.split(line)
    return {a: b for a, b in itertools.pairwise(words) if a.startswith("--")}


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "launch").iterdir()))
def test_scripts_parse_and_can_be_run(path):
    file = ROOT / "launch" / path
    assert os.access(file, os.X_OK)
    subprocess.run(["bash", "-n", str(file)], check=True)


def test_each_missing_variable_is_one_line():
    result = script(MULTINODE)
    assert result.returncode == 2 and result.stdout == ""
    names = [line.split()[1] for line in result.stderr.splitlines()]
    assert names == ["NNODES", "NGPU", "CONFIG_FILE", "MASTER_ADDR"]
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())
    assert script(SLURM).returncode == 2


def test_a_number_that_is_none():
    result = script(MULTINODE, **CLUSTER | {"NNODES": "two"})
    assert result.returncode == 2 and result.stderr == "error: NNODES = 'two': must be a whole number\n"


def test_dry_run_prints_the_command_and_its_environment():
    result = script(MULTINODE, "--dry-run", "--training.steps", "5", "--x.y", "a b", **CLUSTER)
    assert result.returncode == 0 and result.stderr == ""
    *exports, command = result.stdout.splitlines()
    assert "export OMP_NUM_THREADS=1" in exports and "export STOP_GRACE=240" in exports
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "torchtitan_ext.launch"]
    assert words[-6:] == ["--job.config_file", "a config.toml", "--training.steps", "5", "--x.y", "a b"]
    got = options(command)
    assert got["--nnodes"] == "2" and got["--nproc-per-node"] == "8"
    assert got["--rdzv-endpoint"] == "node0:29400" and got["--rdzv-id"] == "torchtitan_ext"
    assert got["--rdzv-conf"] == "join_timeout=300" and got["--max-restarts"] == "0"


def test_every_variable_reaches_the_command():
    env = {
        "RDZV_ENDPOINT": "h:1",
        "RDZV_ID": "job",
        "RDZV_TIMEOUT": "7",
        "MAX_RESTARTS": "3",
        "LOG_RANK": "0,1",
        "LOG_DIR": "logs",
        "LOCAL_ADDR": "10.0.0.2",
        "NUMA_BINDING": "node",
        "NPROC_PER_NODE": "4",
        "PYTHON": "/opt/python",
    }
    rest = {"NNODES": "2", "CONFIG_FILE": "x"}
    command = script(MULTINODE, "--dry-run", **env, **rest).stdout.splitlines()[-1]
    got = options(command)
    expected = {
        "--rdzv-endpoint": "h:1",
        "--rdzv-id": "job",
        "--rdzv-conf": "join_timeout=7",
        "--max-restarts": "3",
        "--local-ranks-filter": "0,1",
        "--log-dir": "logs",
        "--local-addr": "10.0.0.2",
        "--numa-binding": "node",
        "--nproc-per-node": "4",
    }
    assert {name: got[name] for name in expected} == expected
    assert command.startswith("/opt/python ")


def test_one_machine_needs_no_address():
    result = script(MULTINODE, "--dry-run", NNODES="1", NGPU="2", CONFIG_FILE="x")
    assert options(result.stdout.splitlines()[-1])["--rdzv-endpoint"] == "localhost:0"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        *[("a,b", "a"), ("gpu[03-05,7],b", "gpu03"), ("gpu[7]", "gpu7"), ("n1-2", "n1-2")],
        *[("a[3-5]-ib,b[1-2]", "a3-ib"), ("rack[1-2]n[08,10-12]", "rack1n08"), ("a,b[1-2]", "a")],
    ],
)
def test_the_first_node_serves_the_rendezvous(nodes, first):
    result = script(SLURM, "--dry-run", **JOB | {"SLURM_JOB_NODELIST": nodes, "PLATFORM": "h100"})
    assert f"export MASTER_ADDR={first}\n" in result.stdout
    assert f"--rdzv-endpoint {first}:21234 --rdzv-id 1234" in result.stdout
    assert "srun --ntasks 2 " in result.stdout and "--nnodes 2 --nproc-per-node 8 " in result.stdout


def test_gh200_nodes_have_four_bound_processes():
    result = script(SLURM, "--dry-run", **JOB, PLATFORM="gh200", NET_IFNAME="hsn0")
    for word in ("--nproc-per-node 4 ", "--numa-binding node", "NCCL_CROSS_NIC=1", "GLOO_SOCKET_IFNAME=hsn0"):
        assert word in result.stdout, word
    result = script(SLURM, "--dry-run", **JOB, PLATFORM="h100")
    assert "--numa-binding" not in result.stdout and "IFNAME" not in result.stdout
    assert script(SLURM, "--dry-run", **JOB, PLATFORM="tpu").returncode == 2


# --- stop and requeue --------------------------------------------------------------------


class Job:
    """train.slurm with false srun and scontrol."""

    def __init__(self, folder: Path, run: str, **env: str) -> None:
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.notes = folder / "notes"
        self.notes.write_text("")
        path = f"{folder}:{os.environ['PATH']}"
        own = {"PATH": path, "NOTES": str(self.notes), "FAKE_RUN": run, "PLATFORM": "h100"}
        self.process = subprocess.Popen(
            [str(SLURM)], env=clean(JOB | own | env), stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def signal(self, number: int) -> None:
        deadline = time.monotonic() + 30
        while "started" not in self.notes.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)  # until the false srun has its trap
        self.process.send_signal(number)

    def end(self) -> tuple[int, list[str], str]:
        """Exit code, scontrol's calls, what was printed."""
        _, printed = self.process.communicate(timeout=60)
        calls = [line for line in self.notes.read_text().splitlines() if line != "started"]
        return self.process.returncode, calls, printed


# Ends a while after the signal, as a run that saves does.
SAVES = "trap 'sleep 0.5; exit 75' USR1 TERM; for i in {1..200}; do sleep 0.1; done"


def test_the_signal_before_the_time_limit_stops_and_requeues(tmp_path):
    job = Job(tmp_path, SAVES)
    job.signal(signal.SIGUSR1)
    code, calls, printed = job.end()
    assert code == 75 and calls == ["requeue 1234"]
    assert "USR1: passed on to the run" in printed and "goes back into the queue" in printed


def test_a_run_that_ends_while_the_signal_is_passed_on_is_requeued(tmp_path):
    """Its code is 75, not that with which the signal interrupted the waiting for it."""
    slow = tmp_path / "slow.sh"
    slow.write_text('kill() { builtin kill "$@" && { [[ $1 != -s ]] || sleep 0.5; }; }\n')
    job = Job(tmp_path, "trap 'kill %1; exit 75' USR1; sleep 60 & wait", BASH_ENV=str(slow))
    job.signal(signal.SIGUSR1)
    assert job.end()[:2] == (75, ["requeue 1234"])


def test_a_cancelled_job_stops_and_is_not_requeued(tmp_path):
    job = Job(tmp_path, SAVES)
    job.signal(signal.SIGTERM)
    assert job.end()[:2] == (75, [])


@pytest.mark.parametrize("code", [0, 1, 2, 76, 143])
def test_only_the_exit_code_of_a_stop_is_requeued(code, tmp_path):
    assert Job(tmp_path, f"exit {code}").end()[:2] == (code, [])


def test_a_task_of_a_job_array_requeues_itself_alone(tmp_path):
    """The number of the whole array is that of one of its tasks too."""
    array = {"SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "7"}
    assert Job(tmp_path, "exit 75", **array).end()[:2] == (75, ["requeue 1234_7"])


def test_requeues_are_bounded(tmp_path):
    job = Job(tmp_path, "exit 75", SLURM_RESTART_COUNT="3", MAX_REQUEUES="3")
    code, calls, printed = job.end()
    assert code == 75 and calls == [] and "MAX_REQUEUES" in printed
