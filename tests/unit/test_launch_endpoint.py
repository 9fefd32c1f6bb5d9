"""Who serves the rendezvous, and what of torchelastic the launcher rests on."""

from __future__ import annotations

import inspect
import socket

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher.api import LaunchConfig
from torchtitan.components.checkpointer import CheckpointManager

from torchtitan_ext import endpoint, launch
from torchtitan_ext.errors import UserError


def config(host: str, **conf: str) -> LaunchConfig:
    made = LaunchConfig(min_nodes=2, max_nodes=2, nproc_per_node=1, rdzv_endpoint=host, rdzv_backend="c10d")
    made.rdzv_configs.update(conf)
    return made


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_an_address_of_another_machine_is_not_served():
    assert endpoint._own_address("127.0.0.1") == "127.0.0.1"
    assert endpoint._own_address("192.0.2.1") is None  # reserved for documentation
    assert endpoint._own_address("no-such-host.invalid") is None


def test_the_owner_of_the_address_serves_unless_somebody_does(listener):
    free = config("127.0.0.1:1", join_timeout="5")
    endpoint.prepare(free)
    assert free.rdzv_configs["is_host"] == "true" and free.rdzv_configs["read_timeout"] == 5
    taken = config(f"127.0.0.1:{listener}", join_timeout="5")
    endpoint.prepare(taken)
    assert taken.rdzv_configs["is_host"] == "false"
    # 127.0.0.1 says nothing to other machines.
    assert free.local_addr is None and taken.local_addr is None


def test_one_machine_with_any_port_needs_nothing():
    made = config("localhost:0")
    before = dict(made.rdzv_configs)
    endpoint.prepare(made)
    assert made.rdzv_configs == before


def test_the_way_to_the_endpoint_is_this_nodes_address(listener):
    assert endpoint._reach("localhost", listener, limit_s=5) in ("127.0.0.1", "::1")


def test_an_endpoint_without_an_answer_is_an_error_in_time():
    with pytest.raises(
        UserError, match=r"endpoint 127\.0\.0\.1:1 cannot be reached .* within 0\.1 s \(.*refused"
    ):
        endpoint._reach("127.0.0.1", 1, limit_s=0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node is 0"),
        (["--nproc-per-node", "many"], "nproc_per_node value: many"),
        (["--nnodes", "0"], "min_nodes must be > 0"),
        (["--local-ranks-filter", "all"], "must be a comma-separated list"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:ssh"], "endpoint 'node0:ssh'"),
        (["--nnodes", "1", "--rdzv-conf", "join_timeout"], "'join_timeout' must have a value"),
        (["--log-dir", "/proc/nowhere"], "/proc/nowhere"),
    ],
)  # fmt: skip
def test_an_option_that_torchrun_refuses_is_an_error_in_the_input(options, said, monkeypatch):
    monkeypatch.setattr(launch.Signals, "install", lambda self: None)
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    with pytest.raises(UserError, match=said):
        launch.launch([*options, "-m", "no.such.module"])


def test_a_port_of_another_program_is_an_error_in_time(listener, monkeypatch):
    """It takes the connection and never answers: torch's store would wait for ever."""
    monkeypatch.setattr(launch, "BEYOND_S", 0.1)
    made = config(f"127.0.0.1:{listener}", join_timeout="1", is_host="false")
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{listener} did not do so .* within 1 s"):
        launch._handler(made)


def test_a_port_that_cannot_be_listened_on_is_one_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        made = config(address, join_timeout="1", read_timeout="1", is_host="true")
        with pytest.raises(UserError, match=rf"no rendezvous at {address}: .*address already in use"):
            launch._handler(made)


def test_what_the_launcher_overrides_and_sets_in_torchelastic():
    for name in ("_rendezvous", "_invoke_run"):
        assert name in vars(SimpleElasticAgent)
    for name in ("_monitor_workers", "_shutdown"):
        assert name in vars(LocalElasticAgent)
    assert list(inspect.signature(LocalElasticAgent._shutdown).parameters) == ["self", "death_sig", "timeout"]
    handler = inspect.getsource(DynamicRendezvousHandler)
    for name in ("_bootstrap_store_info", "_shared_tcp_store_server", "_state_holder"):
        assert f"self.{name}" in handler, name
    assert "self.subprocess_handlers" in inspect.getsource(SubprocessContext)


def test_what_a_stop_asks_of_torchtitans_checkpoints():
    assert list(inspect.signature(CheckpointManager._should_save).parameters) == [
        "self",
        "curr_step",
        "last_step",
    ]
    assert "self.interval" in inspect.getsource(CheckpointManager._should_save)
    assert list(inspect.signature(CheckpointManager._create_checkpoint_id).parameters)[:2] == ["self", "step"]
