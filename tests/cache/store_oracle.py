"""A store beside plain lists of tokens, and what the store must hold if it is right.

Nothing here is taken from the store's own arithmetic: which pages are encoded, what a query sees
and where `truncate` may stop are worked out from the sentences of the design.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np

from pykv import registry
from pykv.backends import reference
from pykv.backends.base import PAGE, LayerShape
from pykv.cache.store import Store
from pykv.config import CacheConfig

SHAPES = (
    LayerShape(4, 2, 4, 3),
    LayerShape(2, 2, 4, 3, window=75),
    LayerShape(3, 1, 5, 33),
)

# key page, value page, tail: exact ones, encoded ones, and one side of each
FORMATS = [
    ("f16", "f16", None),
    ("f32", "bf16", None),
    ("f16", "f16", "f32"),
    ("f32", "f32", "f16"),
    ("bf16", "f16", "f16"),
    ("f16", "bf16", "f16"),
]
ENCODED = FORMATS[2:]


@dataclass
class Token:
    """Keys and values of one token, per layer f32 [G, D]."""

    keys: list
    values: list


def bytes_at(address, n_bytes):
    return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), np.uint8)


@cache
def codec(name):
    return registry.find("formats", name, "cache type").FORMAT


def cells_of(page, format_, side, d, slots, used):
    """The stored numbers of the first `used` tokens of a page, as they lie."""
    numbers = page.view(format_.layout)
    if side == 0:
        return numbers[: d * slots].reshape(d, slots)[:, :used]
    blocks = -(-d // 32)
    return numbers[: blocks * slots * 32].reshape(blocks, slots, 32)[:, :used]


def encode(format_, side, x):
    return format_.encode_values(x) if side else format_.encode_keys(x)


def decode(format_, side, page, d, slots):
    return (format_.decode_values if side else format_.decode_keys)(page, d, slots)


class Oracle:
    """Drives a store through the reference backend, and keeps the tokens in lists."""

    def __init__(self, config, residual, shapes=SHAPES, n_ctx=1000, seed=0, backend=None):
        self.store = Store(shapes, config, n_ctx, fill=255)
        self.shapes, self.sinks, self.residual = shapes, config.sinks, residual
        self.sequences: dict[int, list[Token]] = {}
        self.freed = {}  # per sequence: per layer, tokens below this position are gone
        self.rng = np.random.default_rng(seed)
        self.backend = backend or reference.create()
        self._poisoned: dict[int, set[int]] = {}
        names = self.store.formats
        self.pages = codec(names.page_k), codec(names.page_v)
        self.tails = codec(names.tail_k), codec(names.tail_v)
        self.exact = self.pages == self.tails

    # what should be

    def n_encoded(self, n):
        """Pages that are encoded once n tokens are there: the tail holds under residual + 64."""
        if self.exact:
            return 0
        pages = 0
        while n - self.sinks - PAGE * pages >= self.residual + PAGE:
            pages += 1
        return pages

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
                (e <= self.n_encoded(m)) == (e <= self.n_encoded(tokens))
                for e in self.entries(m)
                if e > 0
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
        x = self.rounded(self.tails[side], side, x)
        if self.exact:
            return x
        y = x.copy()
        for start in range(self.sinks, len(x), PAGE):
            if query - (start + PAGE - 1) > self.residual:
                page = slice(start, start + PAGE)
                y[page] = self.rounded(self.pages[side], side, x[page])
        return y

    def rounded(self, format_, side, x):
        """As `format_` holds them, 64 tokens to a page."""
        n, d = x.shape
        padded = np.zeros((-(-n // PAGE) * PAGE, d), np.float32)
        padded[:n] = x
        for start in range(0, n, PAGE):
            page = encode(format_, side, padded[start : start + PAGE])
            padded[start : start + PAGE] = decode(format_, side, page, d, PAGE)
        return padded[:n]

    # doing

    def new(self):
        sequence = self.store.new_sequence()
        self.sequences[sequence] = []
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
        return self.backend.attention(step, layer, q, k, v, None, self.scale(layer))

    def scale(self, layer):
        return float(self.shapes[layer].d_k ** -0.5)

    def write(self, parts, *, check=True):
        """Append tokens, and check what some queries of each sequence saw."""
        step = self.begin(parts)
        results = self.attend(step, parts)
        self.store.commit()
        for sequence, tokens in parts.items():
            self.sequences[sequence] += tokens
            n = len(self.sequences[sequence])
            for layer in range(len(self.shapes)):
                first = [self.span(e)[0] for e in self.kept(layer, n)]
                freed = self.freed[sequence]
                freed[layer] = max(freed[layer], min(first, default=0))
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
                scores = q[i, heads].astype(np.float64) @ k.T * self.scale(layer)
                p = np.exp(scores - scores.max(-1, keepdims=True))
                expected = p / p.sum(-1, keepdims=True) @ v
                # the design's bound between two ways to the same output
                error = np.linalg.norm(out[i, heads] - expected, axis=-1)
                assert (error <= 1e-5 * np.linalg.norm(expected, axis=-1)).all()

    def fork(self, sequence):
        other = self.store.fork(sequence)
        self.sequences[other] = list(self.sequences[sequence])
        self.freed[other] = list(self.freed[sequence])
        return other

    def truncate(self, sequence, n):
        expected = self.cut_point(sequence, n)
        m = self.store.truncate(sequence, n)
        assert m == expected
        del self.sequences[sequence][m:]
        if m == 0:
            self.freed[sequence] = [0] * len(self.shapes)
        return m

    def free(self, sequence):
        self.store.free(sequence)
        del self.sequences[sequence], self.freed[sequence]

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
            tuple(place): self.page(place, address, sequence)[1][:, :used].tobytes()
            for *place, address, used in self.visible(sequence)
        }

    def page(self, place, address, sequence):
        """A page's format, and its numbers as they lie."""
        layer, side, _, entry = place
        d = (self.shapes[layer].d_k, self.shapes[layer].d_v)[side]
        encoded = 0 < entry <= self.n_encoded(len(self.sequences[sequence]))
        format_ = (self.pages if encoded else self.tails)[side]
        slots = self.span(entry)[2]
        page = bytes_at(address, format_.page_bytes(d, ("key", "value")[side], slots))
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
        pools = self.store._pools.values()
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
        tokens = self.sequences[sequence][start : start + used]
        x = np.stack([(t.values if side else t.keys)[layer][head] for t in tokens])
        d = x.shape[1]
        padded = np.zeros((slots, d), np.float32)
        padded[:used] = x
        page = encode(self.tails[side], side, padded)
        if format_ is not self.tails[side]:
            page = encode(format_, side, decode(self.tails[side], side, page, d, slots))
        expected = cells_of(page, format_, side, d, slots, slots)
        cut = np.s_[:, :used]
        np.testing.assert_array_equal(cells[cut], expected[cut], strict=True)

    def _poison(self):
        """Fill pages that were given back with 0xFF, which reads as NaN."""
        for size, pool in self.store._pools.items():
            free = set(pool._free)
            assert len(free) == len(pool._free)
            for address in free - self._poisoned.get(size, set()):
                ctypes.memset(address, 255, size)
            self._poisoned[size] = free


def oracle(formats=("f16", "f16", "f32"), sinks=4, residual=0, shapes=SHAPES, n_ctx=1000, seed=0):
    k, v, tail = formats
    config = CacheConfig(k, v, sinks, residual, tail)
    return Oracle(config, residual, shapes, n_ctx, seed)


def fill(o, n):
    """A sequence of n tokens."""
    sequence = o.new()
    if n:
        o.write({sequence: o.tokens(n)})
    return sequence
