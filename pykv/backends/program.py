"""Programs of CPU kernels, and the memory that they compute in.

A verb notes down its kernel's launch as a line; lines run later, in order, in one call that holds
no Python lock. A buffer goes back to its arena when Python drops it, and may then serve a later
line: by the time that line runs, every earlier one has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pykv.backends.base import I64, U8
from pykv.backends.crew import Crew

SLACK = 64  # bytes after each buffer, for the last vector of a row
SLICE_BYTES = 128 << 20  # memory traffic after which a program lets Python look at its signals


class Memory:
    """One block of an arena."""

    __slots__ = ("address", "arena", "block", "derived")

    def __init__(self, arena: Arena, block: U8) -> None:
        self.arena, self.block = arena, block
        self.derived: dict[str, Memory] = {}  # the same values in other forms, by kernel
        self.address = int(block.ctypes.data)

    def __del__(self) -> None:
        self.arena.free.setdefault(self.block.nbytes, []).append(self.block)


class Arena:
    """Memory that is handed out again by size."""

    def __init__(self) -> None:
        self.free: dict[int, list[U8]] = {}

    def take(self, n_bytes: int) -> Memory:
        """A block of at least that size, not cleared."""
        size = (n_bytes + SLACK + 4095) // 4096 * 4096
        waiting = self.free.get(size)
        if waiting:
            return Memory(self, waiting.pop())
        # aligned to a cache line, so that no vector load straddles two
        raw = np.empty(size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return Memory(self, raw[start : start + size])


class Buffer:
    """A float32 array of the CPU backend; a graph may ask for `shape` and `reshape` it."""

    __slots__ = ("memory", "shape")

    def __init__(self, memory: Memory, shape: tuple[int, ...]) -> None:
        self.memory, self.shape = memory, shape

    @property
    def address(self) -> int:
        """Where it lies."""
        return self.memory.address

    @property
    def array(self) -> Any:
        """The same memory as f32 of this shape."""
        count = int(np.prod(self.shape))
        return self.memory.block[: count * 4].view(np.float32).reshape(self.shape)

    def reshape(self, *shape: int) -> Buffer:
        """The same memory with another shape; one size may be -1."""
        count = int(np.prod(self.shape))
        if -1 in shape:
            known = -int(np.prod(shape))
            shape = tuple(count // known if n == -1 else n for n in shape)
        return Buffer(self.memory, shape)


def word(value: Any) -> int:
    """A kernel parameter as an int64: an integer, a float32's bits, or an array's address."""
    if isinstance(value, float | np.floating):
        return int(np.float32(value).view(np.int32))
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, Buffer):
        return value.address
    return int(value)


class Program:
    """Lines of kernels with their parameters, ready to run and to run again."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._lines: list[list[int]] = []  # as driver_numba.py has them
        self._costs: list[int] = []
        self._leader = 0  # the first line of the last group
        self._group: object = None
        self._keep: list[Any] = []  # parameters, and arrays that they point to
        self._table: I64 | None = None
        self._slices: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._lines)

    def add(
        self, kernel: int, tasks: int, *params: Any,
        cost: int = 0, share: int = 1, group: object = None,
    ) -> I64:  # fmt: skip
        """Note down a launch; returns its parameters, which may be changed between runs.

        share: tasks that a thread takes at a time. Launches of one group that follow each other run
        at the same time: none may write what another of them reads or writes.
        """
        ctx = np.array([word(p) for p in params], np.int64)
        if group is not None and group is self._group:
            self._lines[self._leader][5] += 1
        else:
            self._leader, self._group = len(self._lines), group
        self._lines.append([kernel, int(ctx.ctypes.data), tasks, 0, 0, 0, share, 0])
        self._costs.append(cost)
        self._keep.append(ctx)
        self._keep.extend(p for p in params if isinstance(p, np.ndarray))
        return ctx

    def keep(self, *things: Any) -> None:
        """Keep memory alive that a line points to."""
        self._keep.extend(things)

    def set_tasks(self, line: int, tasks: int, share: int = 1) -> None:
        """Change a line's number of tasks, and of those in a share, before another run."""
        self._lines[line][2], self._lines[line][6] = tasks, share
        if self._table is not None:
            self._table[line] = self._lines[line]

    def run(self, check: Callable[[], None]) -> None:
        """Run all lines; before each slice `check` is called, and may raise."""
        if self._table is None:
            raw = np.zeros(len(self._lines) * 8 + 8, np.int64)
            start = -raw.ctypes.data % 64 // 8
            self._table = raw[start : start + len(self._lines) * 8].reshape(-1, 8)
            if self._lines:
                self._table[:] = self._lines
            self._slices = self._cut()
        address = int(self._table.ctypes.data)
        for first, last in self._slices:
            check()
            self._crew.run(address, first, last)

    def _cut(self) -> list[tuple[int, int]]:
        slices, first, cost, end = [], 0, 0, 0
        while end < len(self._lines):
            start, end = end, end + 1 + self._lines[end][5]
            cost += sum(self._costs[start:end])
            if cost >= SLICE_BYTES:
                slices.append((first, end))
                first, cost = end, 0
        if first < len(self._lines):
            slices.append((first, len(self._lines)))
        return slices
