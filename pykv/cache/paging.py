"""Tables of sequences that keep every token: entries, fresh pages, full tails that are encoded.

Table entry 0 is the sinks page, entry 1 + i holds tokens S + 64 i onwards. Layers of equal formats
are a band: their pages have the same sizes and are encoded at the same tokens. Layers whose heads
a policy has taken over (see kept.py) are passed over here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pykv.backends.base import I64, PAGE, LayerShape, PageMemory, Part, Round, Segment, Step
from pykv.cache.layout import Band
from pykv.cache.pages import Held, PagePool, Undo


class Paging:
    """Fills and empties the tables of a store's sequences."""

    def __init__(
        self, shapes: list[LayerShape], bands: list[Band], sinks: int, n_ctx: int,
        memory: PageMemory,
    ) -> None:  # fmt: skip
        self.shapes, self.bands, self.sinks, self.n_ctx = shapes, bands, sinks, n_ctx
        self.memory = memory
        self.pools: dict[int, PagePool] = {}
        self.band_of = np.empty(len(shapes), np.int64)
        for number, band in enumerate(bands):
            self.band_of[band.layers] = number
        self.heads = max(s.n_kv for s in shapes)
        self._uniform = all(s.n_kv == self.heads for s in shapes)
        # tokens that a query sees in each layer, [layers, 1]; 2**62: all
        self._reach = np.array([[s.window or 1 << 62] for s in shapes], np.int64)

    @property
    def policy_layers(self) -> list[int]:
        """Layers that a policy acts on."""
        return [layer for band in self.bands if band.policy for layer in band.layers]

    def pool(self, page_bytes: int) -> PagePool:
        """The pool of pages of that size."""
        if page_bytes not in self.pools:
            self.pools[page_bytes] = PagePool(page_bytes, self.memory)
        return self.pools[page_bytes]

    def bands_in(self, held: Held) -> Iterator[tuple[int, Band]]:
        """The bands whose tables are the sequence's own, by number."""
        for number, band in enumerate(self.bands):
            if held.kept is None or not band.policy:
                yield number, band

    def empty(self) -> Held:
        """A sequence without tokens."""
        tables = np.zeros((2, len(self.shapes), self.heads, 16), np.int64)
        return Held(tables, 0, [0] * len(self.bands), [0] * len(self.shapes))

    @staticmethod
    def kind(sequence: Held, band: int, entry: int) -> str:
        """What a band's table entry holds: sinks, page or tail."""
        if entry == 0:
            return "sinks"
        return "page" if entry <= sequence.encoded[band] else "tail"

    def entries(self, tokens: int) -> int:
        """Table entries in use for that many tokens, the sinks' included."""
        return 1 + max(-(-(tokens - self.sinks) // PAGE), 0)

    def entry(self, position: int) -> int:
        """The table entry of a position."""
        return 0 if position < self.sinks else 1 + (position - self.sinks) // PAGE

    def pages_of(self, sequence: Held, low: int = 0) -> list[tuple[PagePool, I64]]:
        """All pages from table entry `low` on, by pool; entries that hold none are 0."""
        held = []
        high = self.entries(sequence.tokens)
        for number, band in self.bands_in(sequence):
            encoded = sequence.encoded[number]
            bounds = {
                "sinks": (low, min(1, high)),
                "page": (max(low, 1), min(encoded + 1, high)),
                "tail": (max(low, encoded + 1), high),
            }
            for (kind, side), n_bytes in band.sizes.items():
                start, stop = bounds[kind]
                if start < stop:
                    addresses = sequence.tables[side, band.layers, :, start:stop]
                    held.append((self.pool(n_bytes), addresses))
        return held

    def cut_point(self, held: Held, n: int) -> int:
        """The most tokens up to n that can be gone back to."""
        if n >= held.tokens:
            return held.tokens
        m, before = n, n + 1
        while m < before:  # what one band allows may be too much for another
            before = m
            for number, band in self.bands_in(held):
                m = band.exact_point(self.sinks, held.encoded[number], m)
        for layer, shape in enumerate(self.shapes):
            # a page that a window let go of would be seen again
            lowest = max(m - shape.window + 1, 0) if shape.window else 0
            if held.first[layer] > self.entry(lowest):
                return 0
        return m

    def make_room(
        self, sequence: int, held: Held, count: int, opened: Callable[[Undo], None]
    ) -> Undo:
        """Pages for `count` more tokens, and the newest partly filled page for ourselves alone."""
        low, high = self.entry(held.tokens), self.entries(held.tokens + count)
        if self.sinks and held.tokens == 0:
            low = 0
        if not any(self.bands_in(held)):
            low = high = 0
        while high > held.tables.shape[3]:
            held.tables = np.concatenate([held.tables, np.zeros_like(held.tables)], axis=3)
        # the oldest tail pages may be encoded by this batch
        for number, band in self.bands_in(held):
            low = low if band.exact else min(low, held.encoded[number] + 1)
        undo = Undo(
            sequence, low, high, held.tables[:, :, :, low:high].copy(), [], [],
            held.tokens, list(held.encoded),
        )  # fmt: skip
        opened(undo)
        self._own_partial_page(held, undo)
        fresh = self.entries(held.tokens) if held.tokens > 0 and high else 0
        for entry in range(fresh if self.sinks else max(fresh, 1), high):
            self._fill_entry(held, entry, "sinks" if entry == 0 else "tail", undo)
        return undo

    def _fill_entry(self, held: Held, entry: int, kind: str, undo: Undo) -> None:
        for _, band in self.bands_in(held):
            for side in band.sides:
                pool, whole = self.pool(band.sizes[kind, side]), band.whole
                for layer in [slice(None)] if self._uniform and whole else band.layers:
                    target = held.tables[side, layer, :, entry]
                    heads = self.heads if isinstance(layer, slice) else self.shapes[layer].n_kv
                    target = target[..., :heads]
                    addresses = pool.take(target.size)
                    target[...] = addresses.reshape(target.shape)
                    undo.taken.append((pool, addresses))

    def _own_partial_page(self, held: Held, undo: Undo) -> None:
        """Copy the page that the next token goes into, where another sequence holds it too."""
        entry = self.entry(held.tokens)
        start = self.sinks + (entry - 1) * PAGE if entry else 0
        if held.tokens == start or not any(p.any_shared for p in self.pools.values()):
            return
        for number, band in self.bands_in(held):
            for side in band.sides:
                n_bytes = band.sizes[self.kind(held, number, entry), side]
                pool = self.pool(n_bytes)
                for layer in band.layers:
                    for head in range(self.shapes[layer].n_kv):
                        old = int(held.tables[side, layer, head, entry])
                        if old and pool.shared(old):
                            new = pool.take(1)
                            self.memory.copy(old, int(new[0]), n_bytes)
                            held.tables[side, layer, head, entry] = new[0]
                            undo.taken.append((pool, new))
                            undo.replaced.append((pool, np.array([old], np.int64)))

    def describe(self, held: Held, undo: Undo, count: int, row: int, step: Step) -> None:
        """Fill in the records of one sequence's rows, its rounds and what they encode."""
        rows = slice(row, row + count)
        positions = np.arange(held.tokens, held.tokens + count)
        step.positions[rows] = positions
        records, tables = step.records[:, rows], held.tables
        base, strides = tables.ctypes.data, tables.strides
        layers = np.arange(len(self.shapes))[:, None]
        records[:, :, 0] = base + layers * strides[1]
        records[:, :, 1] = base + strides[0] + layers * strides[1]
        records[:, :, 2], records[:, :, 3] = tables.shape[3], self.sinks
        records[:, :, 5] = records[:, :, 7] = positions
        records[:, :, 6] = np.maximum(positions - self._reach + 1, 0)
        step.parts.append(Part(row, count, held, undo.low, undo.high))
        self._rounds(held, undo, count, row, step)

    def _rounds(self, held: Held, undo: Undo, count: int, row: int, step: Step) -> None:
        done, n_round, encoded = 0, 0, list(held.encoded)
        while done < count:
            rooms = {
                number: self._room(band, encoded[number], held.tokens + done)
                for number, band in self.bands_in(held)
            }
            take = min([count - done, *rooms.values()])
            if n_round == len(step.rounds):
                step.rounds.append(Round([]))
            round_ = step.rounds[n_round]
            round_.segments.append(Segment(row + done, take))
            records = step.records[:, row + done : row + done + take, 4]
            records[...] = np.array(encoded)[self.band_of][:, None]
            full = [i for i, room in rooms.items() if room == take]
            if full:
                for i in full:
                    encoded[i] += 1
                round_.parts.append(self._encode_entries(held, full, encoded, undo))
            done, n_round = done + take, n_round + 1
        held.tokens, held.encoded = held.tokens + count, encoded

    def _room(self, band: Band, encoded: int, tokens: int) -> int:
        """Tokens after which the tail reaches residual + 64, and is encoded."""
        if band.exact:
            return 1 << 62
        return self.sinks + band.residual + PAGE * (encoded + 1) - tokens

    def _encode_entries(
        self, held: Held, full: list[int], encoded: list[int], undo: Undo
    ) -> list[tuple[I64, I64]]:
        """New pages for a table entry of each full band: per layer and side, where from and to."""
        none = np.empty((0, 2), np.int64)
        moves = [[none, none] for _ in self.shapes]
        for number in full:
            band, entry = self.bands[number], encoded[number]
            formats = band.formats
            for side, exact in enumerate((formats.exact_k, formats.exact_v)):
                if exact or side not in band.sides:
                    continue
                fresh_pool = self.pool(band.sizes["page", side])
                tail_pool = self.pool(band.sizes["tail", side])
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

    def leave_window(self, held: Held) -> None:
        """Let go of pages that no later query sees."""
        for layer, shape in enumerate(self.shapes):
            if not shape.window:
                continue
            last = self.entry(max(held.tokens - shape.window + 1, 0))
            number = int(self.band_of[layer])
            band = self.bands[number]
            for entry in range(held.first[layer], last):
                kind = self.kind(held, number, entry)
                for side in (0, 1):
                    if (kind, side) in band.sizes:
                        pool = self.pool(band.sizes[kind, side])
                        pool.drop(held.tables[side, layer, :, entry])
                held.tables[:, layer, :, entry] = 0
            held.first[layer] = max(held.first[layer], last)
