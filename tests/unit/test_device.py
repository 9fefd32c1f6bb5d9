"""The CPU as a torchtitan device."""

from __future__ import annotations

import os

import pytest
import torch

import torchtitan_ext  # noqa: F401
from torchtitan_ext import device

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="the machine has an accelerator")


def test_torchtitan_runs_on_the_cpu():
    from torchtitan.components import metrics
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.tools import utils

    for module in (utils, metrics, dist_utils):
        assert module.device_type == "cpu"
        assert isinstance(module.device_module, device.CPUDevice)


def test_memory_is_what_the_process_holds(monkeypatch):
    from torchtitan.components.metrics import build_device_memory_monitor

    monitor = build_device_memory_monitor()
    before = monitor.get_peak_stats().max_reserved_gib
    ballast = torch.ones(64, 2**20)  # 256 MiB, touched
    after = monitor.get_peak_stats().max_reserved_gib
    assert 0.2 < after - before < 0.4
    assert ballast.sum() > 0
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert device.process_memory_bytes() == pytest.approx(resident * 1024, rel=0.05)


def test_current_device_is_a_number():
    """torch.cpu.current_device() is a string, which barrier(device_ids=...) refuses."""
    assert device.CPUDevice().current_device() == 0


def test_peak_flops_are_this_machines():
    from torchtitan.tools import utils

    name = device.CPUDevice().get_device_name()
    assert 1e8 < utils.get_peak_flops(name) < 1e14  # an A100's 3.12e14 is torchtitan's fallback


def test_install_twice_changes_nothing():
    from torchtitan.tools import utils

    first = utils.device_module
    device.install()
    assert utils.device_module is first
    assert os.sysconf("SC_PHYS_PAGES") > 0
