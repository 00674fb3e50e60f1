"""Device memory for pages, tables and what changes from batch to batch.

A page's address is its place, in units of 64 bytes, relative to the store's first slab; slabs that
come later may lie on either side of it. Tables are kept twice: the store's own, and a copy on the
device that is brought up to date where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from pykv.backends.base import I64, PAGE, LayerShape, PageTables, Step
from pykv.errors import OutOfMemoryError

UNIT = 64  # bytes
LEAST_SLAB_BYTES = 1 << 22  # once the memory that was reserved is used up
MOST_TABLES, FEW_TABLES = 16, 4  # copies that are kept, and that memory is planned for

TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class DeviceMemory:
    """A store's pages.  `fill` is what fresh bytes hold (tests)."""

    unit = UNIT

    def __init__(self, device: torch.device, fill: int | None = None) -> None:
        self._device, self._fill = device, fill
        self._slabs: list[torch.Tensor] = []
        self._next = self._left = 0  # place of the newest slab's first free byte, and bytes

    def reserve(self, n_bytes: int) -> None:
        """Take memory for so many bytes at once.  Raises OutOfMemoryError."""
        try:
            slab = torch.empty(n_bytes + 2 * UNIT, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the GPU has no {n_bytes / 2**20:,.0f} MiB left for the cache; use a smaller "
                "--ctx-size, or smaller --cache-type-k and --cache-type-v"
            ) from error
        if self._fill is not None:
            slab.fill_(self._fill)
        start = slab.data_ptr() + -slab.data_ptr() % UNIT
        self._slabs.append(slab)
        # place 0 is nobody's
        first = UNIT if len(self._slabs) == 1 else 0
        self._next = (start - self.base + first) // UNIT
        self._left = slab.data_ptr() + slab.numel() - start - first

    @property
    def base(self) -> int:
        """The address of place 0."""
        start = self._slabs[0].data_ptr()
        return start + -start % UNIT

    @property
    def pool(self) -> torch.Tensor:
        """The bytes from place 0 on."""
        first = self._slabs[0]
        return first[self.base - first.data_ptr() :]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the slabs."""
        return sum(s.numel() for s in self._slabs)

    def slab(self, n_bytes: int) -> int:
        """The first place of fresh bytes.  Raises OutOfMemoryError."""
        if n_bytes > self._left:
            self.reserve(max(n_bytes + UNIT, LEAST_SLAB_BYTES))
        first, units = self._next, -(-n_bytes // UNIT)
        self._next += units
        self._left -= units * UNIT
        return first

    def copy(self, old: int, new: int, n_bytes: int) -> None:
        """Copy a page's bytes."""
        self._bytes(new, n_bytes).copy_(self._bytes(old, n_bytes))

    def _bytes(self, place: int, n_bytes: int) -> torch.Tensor:
        address = self.base + place * UNIT
        for slab in self._slabs:
            offset = address - slab.data_ptr()
            if 0 <= offset < slab.numel():
                return slab[offset : offset + n_bytes]
        raise IndexError(f"no page lies at place {place}")


class Changing:
    """Arrays that change from batch to batch, side by side, so that one copy takes them across."""

    def __init__(self, device: torch.device, arrays: Mapping[str, NDArray[Any]]) -> None:
        places, size = {}, 0
        for name, array in arrays.items():
            places[name] = size
            size += -(-array.nbytes // UNIT) * UNIT
        # memory that stays where it is, so that the copy need not wait for the system
        pinned = device.type == "cuda"
        self._host = torch.empty(
            max(size, UNIT), dtype=torch.uint8, device="cpu", pin_memory=pinned
        )
        self._far = torch.empty(max(size, UNIT), dtype=torch.uint8, device=device)
        whole = self._host.numpy()
        self.host: dict[str, NDArray[Any]] = {}
        self.far: dict[str, torch.Tensor] = {}
        for name, array in arrays.items():
            part = slice(places[name], places[name] + array.nbytes)
            self.host[name] = whole[part].view(array.dtype).reshape(array.shape)
            self.host[name][...] = array
            self.far[name] = self._far[part].view(TYPES[array.dtype]).reshape(array.shape)

    def send(self) -> None:
        """Copy all of it to the device, after what runs there."""
        self._far.copy_(self._host, non_blocking=True)


class _Copy:
    """A sequence's tables on the device, i64 [2, layers, KV heads, capacity]."""

    def __init__(self, tables: I64, capacity: int, device: torch.device) -> None:
        shape = (*tables.shape[:3], capacity)
        self.known = np.zeros(shape, np.int64)  # what the device has
        self.far = torch.zeros(shape, dtype=torch.int64, device=device)

    def update(self, tables: I64, low: int, high: int) -> None:
        """Bring entries low .. high - 1 up to date."""
        new, known = tables[..., low:high], self.known[..., low:high]
        if not np.array_equal(new, known):
            known[...] = new
            self.far[..., low:high] = torch.from_numpy(known.copy()).to(self.far.device)


def capacity_for(n_ctx: int) -> int:
    """Table entries for so many tokens, sinks and tail included."""
    return 2 + -(-n_ctx // PAGE)


def tables_bytes(shapes: Sequence[LayerShape], n_ctx: int) -> int:
    """Of the copies of a few sequences' tables."""
    return FEW_TABLES * 2 * 8 * capacity_for(n_ctx) * len(shapes) * max(s.n_kv for s in shapes)


class Tables:
    """Copies of sequences' tables, and a batch's addresses in terms of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: WeakKeyDictionary[PageTables, _Copy] = WeakKeyDictionary()

    def forget(self) -> None:
        """Copy all tables anew when they are next used."""
        self._copies.clear()

    def update(self, step: Step) -> None:
        """Bring the batch's tables up to date."""
        for part in step.parts:
            tables = part.sequence.tables
            capacity = capacity_for(step.n_ctx)
            if part.high > capacity:  # a policy lets the text pass the context
                capacity = tables.shape[3]
            copy, low = self._copies.get(part.sequence), part.low
            if copy is None or copy.known.shape[3] < capacity:
                copy, low = _Copy(tables, capacity, self._device), 0
            # the newest use comes last
            self._copies.pop(part.sequence, None)
            self._copies[part.sequence] = copy
            copy.update(tables, low, part.high)
        for sequence in list(self._copies)[: max(0, len(self._copies) - MOST_TABLES)]:
            if all(sequence is not part.sequence for part in step.parts):
                del self._copies[sequence]

    def records(self, step: Step, out: I64) -> None:
        """The batch's records int64 [layers, T, RECORD] with the copies' addresses."""
        out[...] = step.records
        for part in step.parts:
            far, rows = self._copies[part.sequence].far, slice(part.first, part.first + part.count)
            layers = np.arange(len(out))[:, None] * far.stride(1)
            for side in (0, 1):
                out[:, rows, side] = far.data_ptr() + (side * far.stride(0) + layers) * 8
            out[:, rows, 2] = far.shape[3]

    def moves(self, step: Step, moves: I64) -> I64:
        """Moves int64 [n, 2] with addresses of the copies' entries; both tables count as changed.

        The store's tables and what is known of the copies take the new pages at once.
        """
        out = moves.copy()
        for part in step.parts:
            tables, copy = part.sequence.tables, self._copies[part.sequence]
            offsets = moves[:, 0] - tables.ctypes.data
            mine = (offsets >= 0) & (offsets < tables.nbytes)
            places = np.unravel_index(offsets[mine] // 8, tables.shape)
            tables[places] = copy.known[places] = moves[mine, 1]
            far = np.ravel_multi_index(places, copy.known.shape)
            out[mine, 0] = copy.far.data_ptr() + 8 * far
        return out
