"""The store: every sequence's keys and values, in pages of 64 tokens of one KV head.

A head's cache is, in token order: the sinks (the first S tokens) in a short page, encoded pages,
and the tail, whose newest page may be partly filled. Table entry 0 is the sinks page, entry 1 + i
holds tokens S + 64 i onwards. New tokens go to the tail; while it holds residual + 64 tokens or
more, its oldest 64 are encoded. Layers of equal formats are a band: their pages have the same sizes
and are encoded at the same tokens.

A batch is one transaction: `begin` allocates whatever it will need and tells the backend where
things lie, `commit` makes it count, `abort` leaves the store as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykv.backends.base import (
    I32,
    I64,
    PAGE,
    RECORD,
    LayerShape,
    PageMemory,
    Part,
    Round,
    Segment,
    Step,
)
from pykv.cache.layout import Band, bands_of
from pykv.cache.pages import SLAB_BYTES, Held, HostMemory, PagePool, Undo
from pykv.config import CacheConfig
from pykv.errors import CacheFullError
from pykv.formats.coded import HeadNumbers


class Store:
    """Keys and values of all sequences of a model.

    `n_ctx` tokens fit a sequence. `memory` is where pages lie, the process's own by default;
    `numbers` is what a calibration file says of each layer, for the formats that want one.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        config: CacheConfig,
        n_ctx: int,
        memory: PageMemory | None = None,
        numbers: Sequence[Sequence[Sequence[HeadNumbers]]] = (),
    ) -> None:
        self.shapes, self.config, self.n_ctx = list(shapes), config, n_ctx
        self.sinks = config.sinks
        self._bands = bands_of(config, self.shapes)
        self._band_of = np.empty(len(self.shapes), np.int64)
        for number, band in enumerate(self._bands):
            self._band_of[band.layers] = number
        self.formats = [self._bands[n].formats for n in self._band_of]
        self.memory: PageMemory = HostMemory() if memory is None else memory
        self.numbers = numbers
        self._pools: dict[int, PagePool] = {}
        self._sequences: dict[int, Held] = {}
        self._next = 0
        self._open: list[Undo] = []
        self._heads = max(s.n_kv for s in shapes)
        self._uniform = all(s.n_kv == self._heads for s in shapes)
        # tokens that a query sees in each layer, [layers, 1]
        self._reach = np.array([[s.window or n_ctx] for s in shapes], np.int64)

    def _pool(self, page_bytes: int) -> PagePool:
        if page_bytes not in self._pools:
            self._pools[page_bytes] = PagePool(page_bytes, self.memory)
        return self._pools[page_bytes]

    # sequences

    def new_sequence(self) -> int:
        """An empty sequence's number."""
        tables = np.zeros((2, len(self.shapes), self._heads, 16), np.int64)
        return self._add(Held(tables, 0, [0] * len(self._bands), [0] * len(self.shapes)))

    def _add(self, sequence: Held) -> int:
        self._next += 1
        self._sequences[self._next] = sequence
        return self._next

    def length(self, sequence: int) -> int:
        """Tokens that a sequence holds."""
        return self._sequences[sequence].tokens

    def fork(self, sequence: int) -> int:
        """A new sequence that shares every page with this one."""
        old = self._sequences[sequence]
        for pool, addresses in self._pages_of(old):
            pool.hold(addresses)
        return self._add(Held(old.tables.copy(), old.tokens, list(old.encoded), list(old.first)))

    def free(self, sequence: int) -> None:
        """Give back a sequence's pages."""
        old = self._sequences.pop(sequence)
        for pool, addresses in self._pages_of(old):
            pool.drop(addresses)

    @staticmethod
    def _kind(sequence: Held, band: int, entry: int) -> str:
        if entry == 0:
            return "sinks"
        return "page" if entry <= sequence.encoded[band] else "tail"

    def _entries(self, tokens: int) -> int:
        """Table entries in use for that many tokens, the sinks' included."""
        return 1 + max(-(-(tokens - self.sinks) // PAGE), 0)

    def _pages_of(self, sequence: Held, low: int = 0) -> list[tuple[PagePool, I64]]:
        """All pages from table entry `low` on, by pool; entries that hold none are 0."""
        held = []
        high = self._entries(sequence.tokens)
        for band, encoded in zip(self._bands, sequence.encoded, strict=True):
            bounds = {
                "sinks": (low, min(1, high)),
                "page": (max(low, 1), min(encoded + 1, high)),
                "tail": (max(low, encoded + 1), high),
            }
            for (kind, side), n_bytes in band.sizes.items():
                start, stop = bounds[kind]
                if start < stop:
                    addresses = sequence.tables[side, band.layers, :, start:stop]
                    held.append((self._pool(n_bytes), addresses))
        return held

    def truncate(self, sequence: int, n: int) -> int:
        """Keep the largest m <= n tokens that leave exactly the state that reading m would have.

        Returns m; the caller reads tokens m to n again.
        """
        held = self._sequences[sequence]
        n = min(n, held.tokens)
        m = self._cut_point(held, n)
        keep = self._entries(m) if m > 0 else 0
        encoded = [min(n_pages, max(keep - 1, 0)) for n_pages in held.encoded]
        for pool, addresses in self._pages_of(held, keep):
            pool.drop(addresses)
        held.tables[:, :, :, keep:] = 0
        held.tokens, held.encoded = m, encoded
        if m == 0:
            held.first = [0] * len(self.shapes)
        return m

    def _cut_point(self, held: Held, n: int) -> int:
        if n >= held.tokens:
            return held.tokens
        m, before = n, n + 1
        while m < before:  # what one band allows may be too much for another
            before = m
            for band, encoded in zip(self._bands, held.encoded, strict=True):
                m = band.exact_point(self.sinks, encoded, m)
        for layer, shape in enumerate(self.shapes):
            # a page that a window let go of would be seen again
            lowest = max(m - shape.window + 1, 0) if shape.window else 0
            if held.first[layer] > self._entry(lowest):
                return 0
        return m

    def _entry(self, position: int) -> int:
        return 0 if position < self.sinks else 1 + (position - self.sinks) // PAGE

    # a batch

    def begin(self, batch: Sequence[tuple[int, I32]], outputs: I32) -> Step:
        """Make room for the tokens of some sequences; returns what the backend must know.

        Raises CacheFullError: a sequence would pass `n_ctx` tokens; nothing is changed then.
        """
        for sequence, tokens in batch:
            held = self._sequences[sequence]
            if held.tokens + len(tokens) > self.n_ctx:
                raise CacheFullError(
                    f"the context is full: {held.tokens} tokens are cached, {len(tokens)} more "
                    f"were to be added, and {self.n_ctx} fit; raise --ctx-size or start anew"
                )
        total = sum(len(tokens) for _, tokens in batch)
        step = Step(
            self.shapes,
            self.formats,
            np.concatenate([tokens for _, tokens in batch]).astype(np.int32),
            np.empty(total, np.int64),
            outputs,
            np.zeros((len(self.shapes), total, RECORD), np.int64),
            [],
            self.numbers,
            n_ctx=self.n_ctx,
            memory=self.memory,
        )
        try:
            row = 0
            for sequence, tokens in batch:
                self._make_room(sequence, len(tokens))
                self._describe(sequence, len(tokens), row, step)
                row += len(tokens)
        except BaseException:
            self.abort()
            raise
        for round_ in step.rounds:
            round_.join()
        return step

    def _make_room(self, sequence: int, count: int) -> None:
        """Pages for `count` more tokens, and the newest partly filled page for ourselves alone."""
        held = self._sequences[sequence]
        end = held.tokens + count
        low, high = self._entry(held.tokens), self._entries(end)
        if self.sinks and held.tokens == 0:
            low = 0
        while high > held.tables.shape[3]:
            held.tables = np.concatenate([held.tables, np.zeros_like(held.tables)], axis=3)
        # the oldest tail pages may be encoded by this batch
        for band, encoded in zip(self._bands, held.encoded, strict=True):
            low = low if band.exact else min(low, encoded + 1)
        undo = Undo(
            sequence, low, high, held.tables[:, :, :, low:high].copy(), [], [],
            held.tokens, list(held.encoded),
        )  # fmt: skip
        self._open.append(undo)
        self._own_partial_page(held, undo)
        fresh = self._entries(held.tokens) if held.tokens > 0 else 0
        for entry in range(fresh if self.sinks else max(fresh, 1), high):
            self._fill_entry(held, entry, "sinks" if entry == 0 else "tail", undo)

    def _fill_entry(self, held: Held, entry: int, kind: str, undo: Undo) -> None:
        for band in self._bands:
            for side in band.sides:
                pool, whole = self._pool(band.sizes[kind, side]), len(self._bands) == 1
                for layer in [slice(None)] if self._uniform and whole else band.layers:
                    target = held.tables[side, layer, :, entry]
                    heads = self._heads if isinstance(layer, slice) else self.shapes[layer].n_kv
                    target = target[..., :heads]
                    addresses = pool.take(target.size)
                    target[...] = addresses.reshape(target.shape)
                    undo.taken.append((pool, addresses))

    def _own_partial_page(self, held: Held, undo: Undo) -> None:
        """Copy the page that the next token goes into, where another sequence holds it too."""
        entry = self._entry(held.tokens)
        start = self.sinks + (entry - 1) * PAGE if entry else 0
        if held.tokens == start or not any(p.any_shared for p in self._pools.values()):
            return
        for number, band in enumerate(self._bands):
            for side in band.sides:
                n_bytes = band.sizes[self._kind(held, number, entry), side]
                pool = self._pool(n_bytes)
                for layer in band.layers:
                    for head in range(self.shapes[layer].n_kv):
                        old = int(held.tables[side, layer, head, entry])
                        if old and pool.shared(old):
                            new = pool.take(1)
                            self.memory.copy(old, int(new[0]), n_bytes)
                            held.tables[side, layer, head, entry] = new[0]
                            undo.taken.append((pool, new))
                            undo.replaced.append((pool, np.array([old], np.int64)))

    def _describe(self, sequence: int, count: int, row: int, step: Step) -> None:
        """Fill in the records of one sequence's rows, its rounds and what they encode."""
        held = self._sequences[sequence]
        rows = slice(row, row + count)
        positions = np.arange(held.tokens, held.tokens + count)
        step.positions[rows] = positions
        records, tables = step.records[:, rows], held.tables
        base, strides = tables.ctypes.data, tables.strides
        layers = np.arange(len(self.shapes))[:, None]
        records[:, :, 0] = base + layers * strides[1]
        records[:, :, 1] = base + strides[0] + layers * strides[1]
        records[:, :, 2], records[:, :, 3] = tables.shape[3], self.sinks
        records[:, :, 5] = positions
        records[:, :, 6] = np.maximum(positions - self._reach + 1, 0)
        undo = self._open[-1]
        step.parts.append(Part(row, count, held, undo.low, undo.high))
        self._rounds(held, count, row, step)

    def _rounds(self, held: Held, count: int, row: int, step: Step) -> None:
        done, number, encoded = 0, 0, list(held.encoded)
        undo = self._open[-1]
        while done < count:
            rooms = [
                self._room(band, pages, held.tokens + done)
                for band, pages in zip(self._bands, encoded, strict=True)
            ]
            take = min(count - done, *rooms)
            if number == len(step.rounds):
                step.rounds.append(Round([]))
            round_ = step.rounds[number]
            round_.segments.append(Segment(row + done, take))
            records = step.records[:, row + done : row + done + take, 4]
            records[...] = np.array(encoded)[self._band_of][:, None]
            full = [i for i, room in enumerate(rooms) if room == take]
            if full:
                for i in full:
                    encoded[i] += 1
                round_.parts.append(self._encode_entries(held, full, encoded, undo))
            done, number = done + take, number + 1
        held.tokens, held.encoded = held.tokens + count, encoded

    def _room(self, band: Band, encoded: int, tokens: int) -> int:
        """Tokens after which the tail reaches residual + 64, and is encoded."""
        if band.exact:
            return self.n_ctx + 1
        return self.sinks + band.residual + PAGE * (encoded + 1) - tokens

    def _encode_entries(
        self, held: Held, full: list[int], encoded: list[int], undo: Undo
    ) -> list[tuple[I64, I64]]:
        """New pages for a table entry of each full band: per layer and side, where from and to."""
        none = np.empty((0, 2), np.int64)
        moves = [[none, none] for _ in self.shapes]
        for number in full:
            band, entry = self._bands[number], encoded[number]
            formats = band.formats
            for side, exact in enumerate((formats.exact_k, formats.exact_v)):
                if exact or side not in band.sides:
                    continue
                fresh_pool = self._pool(band.sizes["page", side])
                tail_pool = self._pool(band.sizes["tail", side])
                for layer in band.layers:
                    if held.first[layer] > entry:
                        continue  # a window shorter than the residual has let go of it
                    n_kv = self.shapes[layer].n_kv
                    fresh = fresh_pool.take(n_kv)
                    undo.taken.append((fresh_pool, fresh))
                    entries = held.tables[side, layer, :n_kv, entry]
                    undo.replaced.append((tail_pool, entries.copy()))
                    first = entries.ctypes.data
                    places = first + np.arange(n_kv, dtype=np.int64) * entries.strides[0]
                    moves[layer][side] = np.stack([places, fresh], axis=1)
        return [(k, v) for k, v in moves]

    def commit(self) -> None:
        """Make the batch count: pages that it replaced, or that no query sees any more, go."""
        # first: an interrupt from here on may lose a page, but not give one back twice
        done, self._open = self._open, []
        for undo in done:
            for pool, addresses in undo.replaced:
                pool.drop(addresses)
            self._leave_window(self._sequences[undo.sequence])

    def abort(self) -> None:
        """Leave every sequence of the batch as it was before."""
        for undo in reversed(self._open):
            held = self._sequences[undo.sequence]
            held.tables[:, :, :, undo.low : undo.high] = undo.before
            held.tokens, held.encoded = undo.tokens, undo.encoded
            for pool, addresses in undo.taken:
                pool.drop(addresses)
        self._open = []

    def _leave_window(self, held: Held) -> None:
        for layer, shape in enumerate(self.shapes):
            if not shape.window:
                continue
            last = self._entry(max(held.tokens - shape.window + 1, 0))
            number = int(self._band_of[layer])
            band = self._bands[number]
            for entry in range(held.first[layer], last):
                kind = self._kind(held, number, entry)
                for side in (0, 1):
                    if (kind, side) in band.sizes:
                        pool = self._pool(band.sizes[kind, side])
                        pool.drop(held.tables[side, layer, :, entry])
                held.tables[:, layer, :, entry] = 0
            held.first[layer] = max(held.first[layer], last)

    # bytes

    @property
    def nbytes(self) -> int:
        """Bytes in use for cached tokens, tables and partly filled pages included."""
        pages = sum(p.in_use * p.page_bytes for p in self._pools.values())
        return pages + sum(s.tables.nbytes for s in self._sequences.values())

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of the slabs, and of the tables."""
        return self.memory.reserved_bytes + sum(s.tables.nbytes for s in self._sequences.values())

    @property
    def f16_nbytes(self) -> int:
        """What the cached tokens would take as bare f16 values, windows respected."""
        total = 0
        for held in self._sequences.values():
            for shape in self.shapes:
                kept = min(held.tokens, shape.window or held.tokens)
                total += kept * shape.n_kv * shape.kept * 2
        return total

    def estimate(self, n: int) -> int:
        """Bytes that one sequence of n tokens takes, and its slabs' last pages."""
        return sum(
            band.estimate(self.shapes[layer], n) for band in self._bands for layer in band.layers
        ) + SLAB_BYTES * sum(len(band.sizes) for band in self._bands)
