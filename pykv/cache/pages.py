"""Pools of pages, and who holds which: opaque runs of bytes of one size, handed out by address.

A pool grows in slabs that never move. A page may be held by several sequences; it is free again
when the last lets go.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32, PageMemory

if TYPE_CHECKING:
    from pykv.cache.kept import Kept

I64 = NDArray[np.int64]
SLAB_BYTES = 1 << 20  # of a pool's first slabs; later ones are a quarter of what is there
MOST_SLAB_BYTES = 1 << 25
ALIGN = 64


class HostMemory:
    """The process's own memory, by real addresses.  `fill` is what fresh bytes hold (tests)."""

    unit = 1

    def __init__(self, fill: int | None = None) -> None:
        self._fill = fill
        self._slabs: list[NDArray[np.uint8]] = []

    def reserve(self, n_bytes: int) -> None:
        """Nothing: memory is taken when it is needed."""

    def slab(self, n_bytes: int) -> int:
        """The first address of fresh bytes, a multiple of 64."""
        slab = np.empty(n_bytes + ALIGN, np.uint8)
        if self._fill is not None:
            slab[:] = self._fill
        self._slabs.append(slab)
        first = int(slab.ctypes.data)
        return first + -first % ALIGN

    def copy(self, old: int, new: int, n_bytes: int) -> None:
        """Copy a page's bytes."""
        ctypes.memmove(new, old, n_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the slabs."""
        return sum(s.nbytes for s in self._slabs)


class PagePool:
    """Pages of `page_bytes` (a multiple of 64) bytes in some memory."""

    def __init__(self, page_bytes: int, memory: PageMemory) -> None:
        self.page_bytes, self._memory = page_bytes, memory
        self._free: list[int] = []
        self._extra: dict[int, int] = {}  # holders beyond the first
        self._slab_bytes = 0
        self.in_use = 0  # pages

    def take(self, count: int) -> I64:
        """Addresses of `count` pages, each held once."""
        while len(self._free) < count:
            self._grow(count - len(self._free))
        cut = len(self._free) - count
        addresses, self._free = self._free[cut:], self._free[:cut]
        self.in_use += count
        return np.array(addresses, np.int64)

    def _grow(self, missing: int) -> None:
        # for 4 MiB and more NumPy asks for huge pages, which take a tenth off the time that
        # attention over a long q8_0 cache needs
        size = min(max(self._slab_bytes // 4, SLAB_BYTES), MOST_SLAB_BYTES)
        pages = max(size // self.page_bytes, 1)
        pages *= -(-missing // pages)
        first, step = self._memory.slab(pages * self.page_bytes), self.page_bytes
        step //= self._memory.unit
        self._slab_bytes += pages * self.page_bytes
        # the last in the list is handed out first: keep neighbours neighbours
        self._free[:0] = range(first + (pages - 1) * step, first - 1, -step)

    def hold(self, addresses: I64) -> None:
        """Add a holder to each page; address 0 is nobody's."""
        for address in addresses.ravel().tolist():
            if address:
                self._extra[address] = self._extra.get(address, 0) + 1

    @property
    def any_shared(self) -> bool:
        """Whether any page is held by more than one sequence."""
        return bool(self._extra)

    def shared(self, address: int) -> bool:
        """Whether more than one sequence holds the page."""
        return address in self._extra

    def drop(self, addresses: I64) -> None:
        """Let go of each page; address 0 is nobody's."""
        for address in addresses.ravel().tolist():
            if not address:
                continue
            more = self._extra.get(address)
            if more is None:
                self._free.append(address)
                self.in_use -= 1
            elif more == 1:
                del self._extra[address]
            else:
                self._extra[address] = more - 1


@dataclass(eq=False)
class Recent:
    """The last queries f32 [n, query heads, D] of each of a policy's layers, and all token ids.

    The query at position p is in slot p % n; `first` is the first position whose query counts.
    """

    queries: list[F32]
    tokens: list[int] = field(default_factory=list)
    first: int = 0
    _before: tuple[int, list[int], list[F32]] | None = None

    def begin(self, slots: list[int]) -> None:
        """From here on changes can be taken back; `slots` are those that will be written."""
        self._before = self.first, slots, [q[slots] for q in self.queries]

    def abort(self, n: int) -> None:
        """Take the changes back, to n tokens."""
        before, self._before = self._before, None
        del self.tokens[n:]
        if before is not None:
            self.first, slots, old = before
            for queries, values in zip(self.queries, old, strict=True):
                queries[slots] = values

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(q.nbytes for q in self.queries) + 4 * len(self.tokens)


@dataclass(eq=False)  # what a backend knows of a sequence is kept by it
class Held:
    """A sequence's tables, int64 [2 sides, layers, KV heads, capacity], and how far they reach."""

    tables: I64
    tokens: int = 0
    encoded: list[int] = field(default_factory=list)  # per band of layers: pages
    first: list[int] = field(default_factory=list)  # per layer: the first table entry still held
    kept: Kept | None = None  # what a policy has kept, in its layers, once it has acted
    recent: Recent | None = None  # for policies that act when a prompt ends


@dataclass
class Undo:
    """What a batch changed in one sequence."""

    sequence: int
    low: int  # table entries low .. high - 1 may have changed
    high: int
    before: I64
    taken: list[tuple[PagePool, I64]]
    replaced: list[tuple[PagePool, I64]]  # held until the batch counts
    tokens: int
    encoded: list[int]
