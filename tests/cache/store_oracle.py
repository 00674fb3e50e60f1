"""A store beside plain lists of tokens, and what the store must hold if it is right.

Nothing here is taken from the store's own arithmetic: which pages are encoded, what a query sees
and where `truncate` may stop are worked out from the sentences of the design.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from page_oracle import (
    FORMATS,
    ROPE,
    SIDES,
    Formats,
    bytes_at,
    cells_of,
    decode,
    encode,
    layers_of,
    rounded,
    turned,
)

from pykv.backends import reference
from pykv.backends.base import PAGE, LayerShape
from pykv.cache.pages import HostMemory
from pykv.cache.store import Store

SHAPES = (
    LayerShape(4, 2, 4, 3),
    LayerShape(2, 2, 4, 3, window=75),
    LayerShape(3, 1, 5, 33),
)


@dataclass
class Token:
    """Keys and values of one token, per layer f32 [G, D]."""

    keys: list
    values: list


@dataclass
class Known:
    """An encoded page: its bytes, and its keys or values [64, d], taken back to the model's."""

    cells: np.ndarray
    values: np.ndarray


class Oracle:
    """Drives a store through the reference backend, and keeps the tokens in lists."""

    def __init__(self, config, shapes=SHAPES, n_ctx=1000, seed=0, backend=None, calibrated=False):
        self.layers = layers_of(config, shapes, calibrated)
        numbers = [[side.numbers for side in layer.sides] for layer in self.layers]
        self.backend = backend or reference.create()
        memory = self.backend.page_memory() or HostMemory(255)
        self.store = Store(shapes, config, n_ctx, memory, numbers if calibrated else ())
        self.shapes, self.sinks = shapes, config.sinks
        # elsewhere keys come as they are kept
        self.rope = ROPE if self.store.formats[0].position == "read" else None
        self.sequences: dict[int, list[Token]] = {}
        self.freed = {}  # per sequence: per layer, tokens below this position are gone
        self.rng = np.random.default_rng(seed)
        self._poisoned: dict[int, set[int]] = {}
        # per sequence its encoded pages, by layer, side, head and table entry
        self.known: dict[int, dict[tuple, Known]] = {}
        self.ever: set[tuple] = set()  # layers and sides that had any

    # what should be

    def span(self, entry):
        """The positions that a table entry holds, and its slots."""
        if entry == 0:
            return 0, self.sinks, -(-self.sinks // 16) * 16
        start = self.sinks + (entry - 1) * PAGE
        return start, start + PAGE, PAGE

    def entries(self, n):
        """Table entries that n tokens fill, in part or wholly."""
        every = range(0 if self.sinks else 1, 2 + n // PAGE)
        return [e for e in every if self.span(e)[0] < n]

    def lowest(self, layer, n):
        """The lowest position that the query at position n sees."""
        window = self.shapes[layer].window
        return max(n - window + 1, 0) if window else 0

    def kept(self, layer, n):
        return [e for e in self.entries(n) if self.span(e)[1] > self.lowest(layer, n)]

    def cut_point(self, sequence, n):
        """The largest m <= n whose state can be had by leaving out pages, by trying each."""
        tokens = len(self.sequences[sequence])
        for m in range(min(n, tokens), 0, -1):
            same = all(
                (e <= layer.n_encoded(m)) == (e <= layer.n_encoded(tokens))
                for e in self.entries(m)
                if e > 0
                for layer in self.layers
            )
            there = all(
                self.span(e)[1] > self.freed[sequence][layer]
                for layer in range(len(self.shapes))
                for e in self.kept(layer, m)
            )
            if same and there:
                return m
        return 0

    def seen(self, sequence, layer, side, head, query):
        """Keys or values, f32 [query + 1, D], as the query at that position sees them."""
        tokens = self.sequences[sequence][: query + 1]
        x = np.stack([(t.values if side else t.keys)[layer][head] for t in tokens])
        y = rounded(self.layers[layer].sides[side].tail, side, x).astype(np.float64)
        for start in range(self.sinks, len(x), PAGE):
            if query - (start + PAGE - 1) > self.layers[layer].residual:
                entry = 1 + (start - self.sinks) // PAGE
                page = self.known[sequence].get((layer, side, head, entry))
                if page is not None:  # else it is exact, or below the window
                    y[start : start + PAGE] = page.values
        return y

    def learn(self, sequence, n):
        """Take note of the pages that are encoded once n tokens are there."""
        for layer, (shape, how) in enumerate(zip(self.shapes, self.layers, strict=True)):
            for side, kept in enumerate(how.sides):
                for head in range(0 if kept.exact else shape.n_kv):
                    for entry in range(1, how.n_encoded(n) + 1):
                        place = layer, side, head, entry
                        address = int(self.tables(sequence)[side, layer, head, entry])
                        if address and place not in self.known[sequence]:
                            at = self.real(address)
                            self.known[sequence][place] = self.encoded(sequence, place, at)
                            self.ever.add(place[:2])

    def real(self, address):
        """Where a page's bytes lie in the process's memory."""
        memory = self.store.memory
        return address if memory.unit == 1 else memory.base + memory.unit * address

    def encoded(self, sequence, place, address):
        """What the page there must be, from the tokens."""
        layer, side, head, _ = place
        kept, x = self.layers[layer].sides[side], self.tail_of(sequence, place)
        mapped = x if kept.matrices is None else x @ kept.matrix(head)
        return self.page_of(encode(kept.page, side, mapped, **kept.keyword(head)), place)

    def page_of(self, page, place):
        layer, side, head, _ = place
        kept, d = self.layers[layer].sides[side], self.width_of(place)
        values = decode(kept.page, side, page, d, **kept.keyword(head)).astype(np.float64)
        if kept.matrices is not None:
            values = values @ kept.matrix(head).T.astype(np.float64)
        return Known(cells_of(page, kept.page, side, d, PAGE, PAGE), values)

    def tail_of(self, sequence, place):
        """A page's keys or values, f32 [64, d], as the tail holds them."""
        layer, side, head, entry = place
        start, stop, _ = self.span(entry)
        tokens = self.sequences[sequence][start:stop]
        x = np.stack([(t.values if side else t.keys)[layer][head] for t in tokens])
        tail = self.layers[layer].sides[side].tail
        return decode(tail, side, encode(tail, side, x), self.d_of(place))

    def d_of(self, place):
        shape = self.shapes[place[0]]
        return shape.d_v if place[1] else shape.d_k

    def width_of(self, place):
        """Channels of an encoded page."""
        matrix = self.layers[place[0]].sides[place[1]].matrix(place[2])
        return self.d_of(place) if matrix is None else matrix.shape[1]

    # doing

    def new(self):
        sequence = self.store.new_sequence()
        self.sequences[sequence] = []
        self.known[sequence] = {}
        self.freed[sequence] = [0] * len(self.shapes)
        return sequence

    def tokens(self, count):
        def draw(shape, d):
            return self.rng.normal(0, 3, (shape.n_kv, d)).astype(np.float32)

        return [
            Token([draw(s, s.d_k) for s in self.shapes], [draw(s, s.d_v) for s in self.shapes])
            for _ in range(count)
        ]

    def begin(self, parts):
        """The store's step for {sequence: tokens}."""
        batch = [(s, np.zeros(len(t), np.int32)) for s, t in parts.items()]
        return self.store.begin(batch, np.zeros(1, np.int32))

    def attend(self, step, parts, layers=None):
        """Run the batch's attention through some layers; per layer q and the output."""
        rows = [t for tokens in parts.values() for t in tokens]
        results = []
        for layer, shape in enumerate(self.shapes[:layers]):
            q = self.rng.normal(0, 1, (len(rows), shape.n_head, shape.d_k)).astype(np.float32)
            k = np.stack([t.keys[layer] for t in rows])
            v = np.stack([t.values[layer] for t in rows])
            out = self.attention(step, layer, q, k, v)
            results.append((q, out.reshape(len(rows), shape.n_head, shape.d_v)))
        return results

    def attention(self, step, layer, q, k, v):
        """The verb under test, f32 arrays in and out."""
        return self.backend.attention(step, layer, q, k, v, self.rope, self.scale(layer))

    def scale(self, layer):
        return float(self.shapes[layer].d_k ** -0.5)

    def write(self, parts, *, check=True):
        """Append tokens, and check what some queries of each sequence saw."""
        step = self.begin(parts)
        results = self.attend(step, parts)
        for sequence, tokens in parts.items():
            self.sequences[sequence] += tokens
            n = len(self.sequences[sequence])
            self.learn(sequence, n)  # before a window lets go of pages
            for layer in range(len(self.shapes)):
                first = [self.span(e)[0] for e in self.kept(layer, n)]
                freed = self.freed[sequence]
                freed[layer] = max(freed[layer], min(first, default=0))
        self.store.commit()
        if check:
            self._check_outputs(step, parts, results)

    def _check_outputs(self, step, parts, results):
        row = 0
        for sequence, tokens in parts.items():
            n, before = len(tokens), len(self.sequences[sequence]) - len(tokens)
            for i in sorted({0, 1, n // 3, n // 2, n - 2, n - 1} & set(range(n))):
                assert step.positions[row + i] == before + i
                self._check_query(sequence, before + i, row + i, results)
            row += n

    def _check_query(self, sequence, position, i, results):
        for layer, (shape, (q, out)) in enumerate(zip(self.shapes, results, strict=True)):
            low = self.lowest(layer, position)
            for g in range(shape.n_kv):
                k, v = (
                    self.seen(sequence, layer, side, g, position)[low:].astype(np.float64)
                    for side in (0, 1)
                )
                group = shape.n_head // shape.n_kv
                heads = slice(g * group, (g + 1) * group)
                query = q[i, heads].astype(np.float64)
                if self.rope is not None:
                    k = turned(k, self.rope, np.arange(low, position + 1))
                    query = turned(query[None], self.rope, np.array([position]))[0]
                scores = query @ k.T * self.scale(layer)
                p = np.exp(scores - scores.max(-1, keepdims=True))
                expected = p / p.sum(-1, keepdims=True) @ v
                error = np.linalg.norm(out[i, heads] - expected, axis=-1)
                assert (error <= self.bound(layer, query, k, v, expected)).all()

    def bound(self, layer, query, k, v, expected):
        """Of outputs' errors: the design's, between two ways to the same output."""
        return 1e-5 * np.linalg.norm(expected, axis=-1)

    def fork(self, sequence):
        other = self.store.fork(sequence)
        self.sequences[other] = list(self.sequences[sequence])
        self.known[other] = dict(self.known[sequence])
        self.freed[other] = list(self.freed[sequence])
        return other

    def truncate(self, sequence, n):
        expected = self.cut_point(sequence, n)
        m = self.store.truncate(sequence, n)
        assert m == expected
        del self.sequences[sequence][m:]
        for place in list(self.known[sequence]):
            if self.span(place[3])[1] > m:
                del self.known[sequence][place]
        if m == 0:
            self.freed[sequence] = [0] * len(self.shapes)
        return m

    def free(self, sequence):
        self.store.free(sequence)
        del self.sequences[sequence], self.freed[sequence], self.known[sequence]

    # checking

    def tables(self, sequence):
        return self.store._sequences[sequence].tables

    def visible(self, sequence):
        """Yields (layer, side, head, entry, address, used) for each page that can be seen."""
        n = len(self.sequences[sequence])
        for layer, shape in enumerate(self.shapes):
            for entry in self.kept(layer, n):
                start, stop, _ = self.span(entry)
                for side in (0, 1):
                    for head in range(shape.n_kv):
                        address = int(self.tables(sequence)[side, layer, head, entry])
                        yield layer, side, head, entry, address, min(stop, n) - start

    def state(self, sequence):
        """The bytes of all that can be seen, by place."""
        return {
            tuple(place): self.page(tuple(place), address, sequence)[1][:, :used].tobytes()
            for *place, address, used in self.visible(sequence)
        }

    def page(self, place, address, sequence):
        """A page's format, and what it holds, as it lies."""
        layer, side, _, entry = place
        kept = self.layers[layer].sides[side]
        format_, d = kept.tail, self.d_of(place)
        if place in self.known[sequence]:
            format_, d = kept.page, self.width_of(place)
        slots = self.span(entry)[2]
        page = bytes_at(self.real(address), format_.page_bytes(d, SIDES[side], slots))
        return format_, cells_of(page, format_, side, d, slots, slots)

    def check(self):
        """Every sequence's pages, the pools' books, and nothing read from what was given back."""
        self._poison()
        holders: dict[int, int] = {}
        for sequence, tokens in self.sequences.items():
            assert self.store.length(sequence) == len(tokens)
            held = 0
            for *place, address, used in self.visible(sequence):
                assert address
                held += 1
                holders[address] = holders.get(address, 0) + 1
                self._check_page(sequence, tuple(place), address, used)
            # nothing else is held: what no later query sees has been given back
            assert np.count_nonzero(self.tables(sequence)) == held
        pools = self.store._paging.pools.values()
        assert sum(p.in_use for p in pools) == len(holders)
        for address, count in holders.items():
            assert sum(p._extra.get(address, 0) for p in pools) == count - 1
        tables = sum(self.tables(s).nbytes for s in self.sequences)
        pages = sum(p.in_use * p.page_bytes for p in pools)
        assert self.store.nbytes == pages + tables

    def _check_page(self, sequence, place, address, used):
        layer, side, head, entry = place
        start, _, slots = self.span(entry)
        format_, cells = self.page(place, address, sequence)
        if place in self.known[sequence]:
            expected, used = self.known[sequence][place].cells, PAGE
        else:
            tokens = self.sequences[sequence][start : start + used]
            filled = np.zeros((slots, self.d_of(place)), np.float32)
            filled[:used] = [(t.values if side else t.keys)[layer][head] for t in tokens]
            page = encode(format_, side, filled)
            expected = cells_of(page, format_, side, self.d_of(place), slots, slots)
        cut = np.s_[:, :used]
        np.testing.assert_array_equal(cells[cut], expected[cut], strict=True)

    def _poison(self):
        """Fill pages that were given back with 0xFF, which reads as NaN."""
        for size, pool in self.store._paging.pools.items():
            free = set(pool._free)
            assert len(free) == len(pool._free)
            for address in free - self._poisoned.get(size, set()):
                ctypes.memset(self.real(address), 255, size)
            self._poisoned[size] = free


def oracle(formats=FORMATS[2], sinks=4, residual=0, shapes=SHAPES, n_ctx=1000, seed=0):
    formats = Formats(*formats)
    config = formats.config(sinks, residual)
    return Oracle(config, shapes, n_ctx, seed, calibrated=formats.calibrated)


def fill(o, n):
    """A sequence of n tokens."""
    sequence = o.new()
    if n:
        o.write({sequence: o.tokens(n)})
    return sequence
