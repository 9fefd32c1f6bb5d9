"""What a rank says when another hangs or went away."""

from __future__ import annotations

import logging
import time

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.config import CommConfig

from torchtitan_ext.faults import hang
from torchtitan_ext.faults.errors import LostContact

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv"
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def say(error: BaseException) -> str | None:
    return hang.explanation(error, hang.Place(7, 3.0), rank=1, world=4, where="traces there")


def test_a_time_out_and_a_lost_peer():
    late, gone = say(RuntimeError(GLOO)), say(dist.DistNetworkError(CLOSED))
    assert late and late.startswith("step 7, rank 1 of 4: a collective timed out after 3 s")
    assert gone and gone.startswith("step 7, rank 1 of 4: another rank went away")
    for line in (late, gone):
        assert line.endswith("traces there") and "\n" not in line
    # A save's collective failure carries the errors of its ranks.
    assert say(CheckpointException("save", {0: (RuntimeError(GLOO), None)})) == late  # pyrefly: ignore


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        RuntimeError("a worker of the data loader timed out after 5 seconds"),
        TimeoutError("the data server timed out"),
        ValueError(GLOO),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_keep_their_own_words(error):
    assert say(error) is None


def test_where_the_traces_are(tmp_path):
    comm = CommConfig()
    assert hang.traces(comm, "out", backend="nccl").startswith(
        "flight recorder traces: out/comm_traces/rank_*"
    )
    assert "gloo writes no" in hang.traces(comm, "out", backend="gloo")
    off = CommConfig(trace_buf_size=0)
    assert "trace_buf_size = 0" in hang.traces(off, "out", backend="cuda:nccl,cpu:gloo")


def test_explained_raises_one_line_or_the_error_itself(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    def run(error: BaseException) -> None:
        with hang.explained(lambda: hang.Place(2, 5.0), CommConfig(), "out"):
            raise error

    with pytest.raises(LostContact, match="a collective timed out") as late:
        run(RuntimeError(GLOO))
    assert late.value.exit_code == 4 and not slept
    with pytest.raises(LostContact, match="went away"):
        run(RuntimeError(CLOSED))
    assert slept == [hang.PEER_GRACE_S]
    with pytest.raises(KeyError):
        run(KeyError("x"))


def test_a_slow_step_is_told_once_where_the_backend_cannot(caplog):
    place = [hang.Place(1, 0.05)]
    with caplog.at_level(logging.ERROR):
        watch = hang.Watch(lambda: place[0], rank=0, world=2, where="traces there", interval_s=0.01)
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        place[0] = hang.Place(2, 1000.0)
        time.sleep(0.1)
        watch.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("step 1, rank 0 of 2: not finished after 0.05 s")
    assert record.getMessage().endswith("traces there")
