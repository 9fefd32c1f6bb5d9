"""The CPU as a torchtitan device.

torchtitan 0.3.0 falls back to "cuda" when it finds no accelerator
(``torchtitan.tools.utils.get_device_info``) and its modules copy the device at
import. :func:`install` therefore runs when ``torchtitan_ext`` is imported and
also mends modules that were imported before.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import time
from typing import Any

import torch

from torchtitan_ext.errors import UserError


def process_memory_bytes() -> int:
    """Resident memory (RSS) of this process in bytes."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # not Linux: only the lifetime peak is known
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class _Properties:
    def __init__(self) -> None:
        self.name = platform.processor() or platform.machine() or "cpu"
        self.total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class CPUDevice:
    """The part of ``torch.cuda``'s interface that torchtitan calls, for the CPU.

    ``current_device`` is the integer 0: ``torch.cpu.current_device()`` returns a
    string, which ``barrier(device_ids=...)`` refuses. Memory is the process's
    resident memory, so the ``memory:`` of a log line is what the process holds.
    """

    def set_device(self, device: Any) -> None: ...

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...

    def get_device_name(self, device: Any = None) -> str:
        return f"cpu ({self.get_device_properties().name})"

    @functools.cache  # noqa: B019 - one instance for the life of the process
    def get_device_properties(self, device: Any = None) -> _Properties:
        return _Properties()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        rss = process_memory_bytes()
        return {
            "active_bytes.all.peak": rss,
            "reserved_bytes.all.peak": rss,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }


@functools.cache
def cpu_peak_flops() -> float:
    """FLOP/s of an fp32 matrix product on this process's threads, measured once.

    MFU on a CPU is relative to this rate; torchtitan would divide by an A100's.
    """
    n = 768
    a_NN, b_NN = torch.randn(n, n), torch.randn(n, n)
    a_NN @ b_NN
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        a_NN @ b_NN
        rounds.append(time.perf_counter() - start)
    return 2 * n**3 / min(rounds)


def default_device() -> str:
    """The accelerator's device type, or ``cpu``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def usable_device(name: str) -> str:
    """The name, refused when this machine or this torch does not have the device."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error
    return name


def install() -> None:
    """Make the CPU torchtitan's device if there is no accelerator. Idempotent."""
    if torch.accelerator.is_available():
        return
    from torchtitan.tools import utils

    if isinstance(utils.device_module, CPUDevice):
        return
    device = CPUDevice()
    replacements = {"device_type": "cpu", "device_module": device}
    # Modules that did `from torchtitan.tools.utils import device_type` hold copies.
    for name, module in list(sys.modules.items()):
        if name == "torchtitan" or name.startswith("torchtitan."):
            for attribute, value in replacements.items():
                if hasattr(module, attribute):
                    setattr(module, attribute, value)
    named_peak = utils.get_peak_flops

    def get_peak_flops(device_name: str) -> float:
        return cpu_peak_flops() if device_name.startswith("cpu") else named_peak(device_name)

    utils.get_peak_flops = get_peak_flops
