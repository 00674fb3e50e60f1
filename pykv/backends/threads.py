"""How many threads to use, and what they ask of the system and of the BLAS.

Source: Linux Documentation/admin-guide/cgroup-v2.rst (cpu.max).
"""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

_SYSTEM = Path("/sys")


def default_threads() -> int:
    """The smaller of the physical cores and of what affinity and the cgroup quota grant."""
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
    else:
        allowed = set(range(os.cpu_count() or 1))
    return max(1, int(min(_physical_cores(allowed), _cgroup_quota())))


def _physical_cores(logical: set[int]) -> int:
    """Cores behind these logical CPUs; their number itself where the system does not tell."""
    cores = set()
    for cpu in logical:
        topology = _SYSTEM / f"devices/system/cpu/cpu{cpu}/topology"
        try:
            core = (
                (topology / "core_id").read_text(),
                (topology / "physical_package_id").read_text(),
            )
        except OSError:
            return len(logical)
        cores.add(core)
    return len(cores)


def _cgroup_quota() -> float:
    """CPUs that the cgroup grants; infinity without a limit."""
    for quota_file, period_file in (
        ("fs/cgroup/cpu.max", None),
        ("fs/cgroup/cpu/cpu.cfs_quota_us", "fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = (_SYSTEM / quota_file).read_text().split()
            if period_file is not None:
                words += (_SYSTEM / period_file).read_text().split()
            quota, period = words[:2]
            if quota not in ("max", "-1"):
                return float(quota) / float(period)
        except (OSError, ValueError):
            continue
    return math.inf


def give_way_address() -> int:
    """The system's function that offers the core to another thread; 0 where there is none."""
    try:
        windows = os.name == "nt"
        library = ctypes.CDLL("kernel32" if windows else None)
        name = "SwitchToThread" if windows else "sched_yield"
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):
        return 0


class BlasThreads:
    """The BLAS's thread count, set while a call runs and put back."""

    def __init__(self) -> None:
        self._controller: Any = None

    def one(self) -> AbstractContextManager[Any]:
        """A context in which the BLAS uses one thread for each of ours."""
        if self._controller is None:
            from threadpoolctl import ThreadpoolController

            self._controller = ThreadpoolController().select(user_api="blas")
        if not self._controller.lib_controllers:
            return nullcontext()
        context: AbstractContextManager[Any] = self._controller.limit(limits=1)
        return context
