"""The launch scripts with real training: random stops, killed ranks, two nodes, a job that requeues."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.harness import free_port
from tests.paths import ROOT
from torchtitan_ext.stopping import STOPPED

pytestmark = pytest.mark.slow

CONFIG = ROOT / "train_configs" / "ar" / "debug.toml"
STEPS = 40


def arguments(folder: Path, *, ranks: int, steps: int = STEPS) -> list[str]:
    """8 rows a step on any number of ranks; checkpoints every 10 steps."""
    return [
        *("--job.dump_folder", str(folder), "--training.steps", str(steps)),
        *("--training.local_batch_size", str(8 // ranks), "--training.seq_len", "64"),
        *("--checkpoint.interval", "10", "--checkpoint.keep_latest_k", "0", "--metrics.log_freq", "1"),
        *("--validation.freq", "20", "--metrics.disable_color_printing"),
        *("--metrics.enable_tensorboard", "false"),
    ]  # fmt: skip


class Run:
    """A launch script whose lines are read as they come."""

    def __init__(self, command: list[str], **env: str) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CONFIG_FILE": str(CONFIG)} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in iter(self._one, ""))

    def _one(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def losses(self) -> dict[int, str]:
        """The loss as printed, by step; a repeated step must print the same."""
        found: dict[int, str] = {}
        for step, loss in re.findall(r" - step: +(\d+)  loss: +(\S+)", self.text):
            assert found.setdefault(int(step), loss) == loss, f"step {step} changed"
        return found

    def until(self, step: int) -> Run:
        deadline = time.monotonic() + 300
        while max(self.losses(), default=0) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.02)
        return self

    def end(self, *, traceback: bool = False) -> int:
        try:
            code = self.process.wait(400)
        finally:
            self.process.kill()
        self._reader.join(10)
        assert traceback or "Traceback" not in self.text, self.text
        return code


def train(folder: Path, *, ranks: int = 2, restarts: int = 0, steps: int = STEPS) -> Run:
    return Run(
        [str(ROOT / "launch" / "run_multinode.sh"), *arguments(folder, ranks=ranks, steps=steps)],
        NNODES="1",
        NGPU=str(ranks),
        MAX_RESTARTS=str(restarts),
    )


def workers(launcher: int) -> list[int]:
    """Process ids of the launcher's processes, in the order of their ranks."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True)
    commands = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in found.stdout.split()}
    return sorted(pid for pid, path in commands.items() if b"torchtitan_ext.train" in path.read_bytes())


def final_state(folder: Path, tmp_path: Path, *, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint, with the optimizer's, by its path."""
    file = tmp_path / f"{folder.name}.pt"
    dcp_to_torch_save(folder / "checkpoint" / f"step-{steps}", file)
    flat: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}")
        elif isinstance(value, torch.Tensor):
            flat[path] = value

    walk(torch.load(file, weights_only=False), "")
    return flat


def assert_same(a: Path, b: Path, tmp_path: Path) -> None:
    first, second = (final_state(folder, tmp_path) for folder in (a, b))
    assert first.keys() == second.keys() and len(first) > 38 * 2
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict[int, str]]:
    folder = tmp_path_factory.mktemp("undisturbed") / "whole"
    run = train(folder)
    assert run.end() == 0
    assert list(run.losses()) == list(range(1, STEPS + 1))
    return folder, run.losses()


@pytest.mark.parametrize("seed", [0, 1])
def test_sigterm_at_a_random_time_loses_no_step(seed, whole, tmp_path):
    folder, rng = tmp_path / "run", random.Random(seed)
    first = train(folder).until(rng.randrange(1, STEPS - 10))
    time.sleep(rng.random() * 0.3)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == STOPPED
    last = max(first.losses())
    assert f"Stopped after step {last}: " in first.text and (folder / "checkpoint" / f"step-{last}").is_dir()
    second = train(folder)
    assert second.end() == 0
    assert min(second.losses()) == last + 1
    assert first.losses() | second.losses() == whole[1]
    assert_same(whole[0], folder, tmp_path)


def test_a_killed_rank_of_four_restarts_by_itself(tmp_path):
    rng = random.Random(time.time_ns())
    undisturbed, folder, step = tmp_path / "whole", tmp_path / "run", rng.randrange(2, STEPS - 2)
    victim = rng.randrange(4)
    first = train(undisturbed, ranks=4)
    assert first.end() == 0
    second = train(folder, ranks=4, restarts=1).until(step)
    os.kill(workers(second.process.pid)[victim], signal.SIGKILL)
    told = f"rank {victim} killed at step {step}\n"
    assert second.end(traceback=True) == 0, told + second.text
    assert re.search(rf"launch: rank {victim} .*ended by SIGKILL; restart 1 of 1", second.text), (
        told + second.text
    )
    assert "Restart 1 of 1: going on from the newest whole checkpoint" in second.text
    assert second.losses() == first.losses(), told
    assert_same(undisturbed, folder, tmp_path)


def test_degrees_that_do_not_fit_four_ranks_are_refused_once(tmp_path):
    run = Run(
        [
            str(ROOT / "launch" / "run_multinode.sh"),
            *arguments(tmp_path / "run", ranks=4),
            *("--parallelism.tensor_parallel_degree", "3"),
        ],
        NNODES="1",
        NGPU="4",
        MAX_RESTARTS="3",
    )
    assert run.end() == 2
    errors = [line for line in run.lines if "error: " in line]
    assert len(errors) == 1 and "degrees do not multiply to the world size" in errors[0]
    assert "got 4 processes" in errors[0] and "restart" not in run.text


def test_a_slurm_job_stops_requeues_and_goes_on(whole, tmp_path):
    """train.slurm as sbatch starts it, with an srun that runs the command here and a scontrol that notes."""
    notes, folder = tmp_path / "notes", tmp_path / "run"
    # srun passes signals on to its tasks; exec does so too.
    commands = {"srun": 'while [[ $1 != */run_multinode.sh ]]; do shift; done\nexec "$@"', "scontrol": ""}
    for name, text in commands.items():
        show = f'if [[ $1 == show ]]; then echo localhost; else echo "{name} $@" >>{notes}; fi\n'
        (tmp_path / name).write_text(f"#!/bin/bash\n{text or show}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "PLATFORM": "h100",
        "NGPU": "2",
    }
    command = [str(ROOT / "launch" / "train.slurm"), *arguments(folder, ranks=2)]
    first = Run(command, **env).until(7)
    first.process.send_signal(signal.SIGUSR1)
    assert first.end() == STOPPED, first.text
    assert notes.read_text() == "scontrol requeue 77\n"
    second = Run(command, **env, SLURM_RESTART_COUNT="1")
    assert second.end() == 0, second.text
    assert first.losses() | second.losses() == whole[1]
    assert notes.read_text().count("requeue") == 1


# --- two nodes -----------------------------------------------------------------------------

NAMES = ("titan_a", "titan_b")
ADDRESSES = ("10.231.7.1", "10.231.7.2")


@pytest.fixture
def nodes() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by a cable: a command's prefix for each."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.skip("needs root and ip(8)")

    def do(*words: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([ip, *words], check=check, capture_output=True)

    try:
        if do("netns", "add", NAMES[0], check=False).returncode:
            pytest.skip("network namespaces are not allowed here")
        do("netns", "add", NAMES[1])
        do("link", "add", "cable0", "netns", NAMES[0], "type", "veth", "peer", "cable0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            do("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
            for device in ("lo", "cable0"):
                do("-n", name, "link", "set", device, "up")
        yield [[ip, "netns", "exec", name] for name in NAMES]
    finally:
        for name in NAMES:
            do("netns", "delete", name, check=False)


def two_nodes(
    nodes: list[list[str]],
    folder: Path,
    *,
    restarts: int = 0,
    later_s: float = 0,
    change: tuple[str, ...] = (),
) -> list[Run]:
    """run_multinode.sh on both, one process each; the first node comes later, the second with ``change``."""
    script, port = str(ROOT / "launch" / "run_multinode.sh"), str(free_port())
    started: list[Run] = []
    for node in (1, 0):
        started.insert(
            0,
            Run(
                [*nodes[node], script, *arguments(folder, ranks=2), *(change if node else ())],
                NNODES="2",
                NGPU="1",
                MASTER_ADDR=ADDRESSES[0],
                MASTER_PORT=port,
                RDZV_TIMEOUT="90",
                MAX_RESTARTS=str(restarts),
                GLOO_SOCKET_IFNAME="cable0",
            ),
        )
        if node:
            time.sleep(later_s)
    return started


def launcher_of(run: Run) -> int:
    """ip-netns-exec and the script replace themselves by the launcher."""
    return run.process.pid


def test_two_nodes_train_stop_and_survive_a_killed_rank(nodes, whole, tmp_path):
    folder = tmp_path / "run"
    first = two_nodes(nodes, folder, later_s=3)
    first[0].until(12)
    first[1].process.send_signal(signal.SIGTERM)  # one node is told, both stop
    assert [run.end() for run in first] == [STOPPED, STOPPED], first[0].text + first[1].text
    last = max(first[0].losses())
    second = two_nodes(nodes, folder, restarts=1)
    second[0].until(last + 5)
    os.kill(workers(launcher_of(second[1]))[0], signal.SIGKILL)
    codes = [run.end(traceback=True) for run in second]
    told = "\n".join(run.text for run in second)
    assert codes == [0, 0], told
    assert "ended by SIGKILL; restart 1 of 1" in second[1].text, told
    assert first[0].losses() | second[0].losses() == whole[1]
    assert_same(whole[0], folder, tmp_path)


def test_a_node_with_another_config_is_refused(nodes, tmp_path):
    runs = two_nodes(nodes, tmp_path / "run", change=("--training.steps", "41"))
    assert [run.end() for run in runs] == [2, 2]
    errors = [line for line in runs[0].lines if "error: " in line]
    assert len(errors) == 1 and "[training] steps is 40 on rank 0 (" in errors[0]
    assert "41 on rank 1 (" in errors[0]
    assert any("a line above or rank 0's log says why" in line for line in runs[1].lines)


def test_a_node_that_nobody_joins_gives_up_in_one_line(nodes, tmp_path):
    run = Run(
        [*nodes[0], str(ROOT / "launch" / "run_multinode.sh"), *arguments(tmp_path / "run", ranks=2)],
        NNODES="2",
        NGPU="1",
        MASTER_ADDR=ADDRESSES[0],
        RDZV_TIMEOUT="3",
    )
    assert run.end() == 2
    # Nobody knows the addresses' names there, of which torch's store warns.
    lines = [line for line in run.lines if not line.startswith("[W")]
    assert len(lines) == 1 and "1 of 2 nodes joined within 3 s" in lines[0]
