"""Whether a model, its cache and its scratch fit the memory that is really free.

Source: Linux Documentation/filesystems/proc.rst (MemAvailable), admin-guide/cgroup-v2.rst
(memory.max, memory.current).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pykv.errors import OutOfMemoryError
from pykv.models.base import Hparams

_MIB = 1 << 20
_STEP = 256  # tokens by which a suggested context is rounded down


def free_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not tell."""
    free = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        names = os.sysconf_names if hasattr(os, "sysconf") else {}
        if "SC_AVPHYS_PAGES" in names:
            free.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = _cgroup_free()
    if limit is not None:
        free.append(limit)
    return min(free) if free else None


def _cgroup_free() -> int | None:
    root = Path("/sys/fs/cgroup")
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, current = (root / most).read_text().strip(), (root / used).read_text().strip()
            if limit != "max":
                return max(int(limit) - int(current), 0)
        except (OSError, ValueError):
            continue
    return None


def batch_bytes(h: Hparams, ubatch: int, n_vocab: int) -> int:
    """About what a batch of `ubatch` tokens computes in, and the process itself."""
    row = 6 * h.n_embd + 3 * max(h.n_ff) + 3 * max(h.n_head) * h.d_k
    return ubatch * row * 4 + n_vocab * 8 + (64 << 20)


def check(
    file: str,
    weight_bytes: int,
    scratch_bytes: int,
    n_ctx: int,
    cache_bytes: Callable[[int], int],
    free: int | None,
    flags: Sequence[str] = ("--ctx-size", "--cache-type-k", "--cache-type-v"),
    what: str = "memory",
) -> None:
    """Raise OutOfMemoryError, with the numbers and what would fit, when it does not fit.

    `cache_bytes(n)` is what n tokens of one sequence take.
    """
    if free is None:
        return
    fixed = weight_bytes + scratch_bytes
    if fixed + cache_bytes(n_ctx) <= free:
        return
    sizes = (
        f"weights {weight_bytes / _MIB:,.0f} MiB, cache of {n_ctx:,} tokens "
        f"{cache_bytes(n_ctx) / _MIB:,.0f} MiB, scratch {scratch_bytes / _MIB:,.0f} MiB"
    )
    low, high = 0, n_ctx
    while low < high:  # the largest context that fits
        middle = (low + high + 1) // 2
        if fixed + cache_bytes(middle) <= free:
            low = middle
        else:
            high = middle - 1
    low = low // _STEP * _STEP or low
    advice = (
        f"{flags[0]} {low} would fit, and so may a smaller {flags[1]} and {flags[2]}"
        if low
        else "no context would fit: use a smaller model, or one with smaller weights"
    )
    raise OutOfMemoryError(
        f"{file} does not fit the {free / _MIB:,.0f} MiB of {what} that are free ({sizes}); "
        f"{advice}"
    )
