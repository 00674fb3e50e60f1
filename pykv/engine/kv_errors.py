"""What encoding keys and values does to one layer's attention output; largest keys, and spectra.

A watch is a listener of the CPU backend; kv_report.py says what is measured. A query at position i
sees a page's tokens encoded where the last of them is more than the residual before i.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pykv.backends import transforms
from pykv.backends.base import F32, PAGE, LayerShape, Rope
from pykv.cache.layout import LayerLayout
from pykv.engine.importance import turned
from pykv.engine.numbers import Numbers
from pykv.engine.spectrum import F64, Spectrum, second_moments
from pykv.errors import NumericsError
from pykv.formats.base import VALUE_CHANNELS, Side
from pykv.formats.coded import CodedFormat, HeadNumbers, find

Unseen = tuple[NDArray[np.intp], NDArray[np.intp]]
Part = Literal["keys", "values", "both"]
Progress = Callable[[int, int, float], None]  # layers done, of, seconds a layer
PARTS: tuple[Part, ...] = ("keys", "values", "both")
SIDES: tuple[Side, Side] = ("key", "value")
HELD_BYTES = 256 << 20  # decoded keys and values that are held at a time


@dataclass(frozen=True, eq=False)
class Candidate:
    """A cache type on trial, for keys and for values."""

    name: str
    layouts: Sequence[LayerLayout]  # of each layer
    numbers: Numbers  # out of calibration files; empty where it needs none

    def bits(self, shapes: Sequence[LayerShape], side: Side) -> float:
        """Bits that a value costs in a full page, the mean of all layers' values."""
        n_bytes, n_values = 0, 0
        for shape, layout in zip(shapes, self.layouts, strict=True):
            d, map_ = (
                (shape.d_k, layout.formats.transform_k) if side == "key" else
                (shape.d_v, layout.formats.transform_v)
            )  # fmt: skip
            page = find(self.name).page_bytes(transforms.width(map_, d), side)
            n_bytes, n_values = n_bytes + shape.n_kv * page, n_values + shape.n_kv * PAGE * d
        return n_bytes * 8 / n_values

    def head(self, layer: int, head: int, side: Side) -> HeadNumbers:
        """What calibration files say of a KV head."""
        if not self.numbers:
            return HeadNumbers()
        return self.numbers[layer][SIDES.index(side)][head]


@dataclass(frozen=True, eq=False)
class _Layer:
    """What a layer's attention is given in a chunk, keys and queries turned by RoPE."""

    q: F32  # of the last tokens only, times the scores' factor, [R, H, D]
    keys: F32  # [T, G, D]
    values: F32
    unturned: F32  # keys before RoPE
    rope: Rope | None
    shape: LayerShape

    @property
    def first(self) -> int:
        """The first query's position."""
        return len(self.keys) - len(self.q)


@dataclass(frozen=True, eq=False)
class _Kept:
    """A head's keys or values as the cache gives them back, [T, D] and those of pages [64 P, D]."""

    exact: F32
    coded: F32


class Watch:
    """Call it with each layer of each chunk of `ctx_size` tokens, in parts or whole.

    `unturned`: largest keys and their spectra are told as they are before RoPE.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        tried: Sequence[Candidate],
        sinks: int,
        ctx_size: int,
        n_chunks: int,
        unturned: bool,
        pool: Executor,
        progress: Progress | None,
    ) -> None:
        self._shapes, self._tried, self._sinks, self._ctx = shapes, tried, sinks, ctx_size
        self._unturned, self._pool, self._progress = unturned, pool, progress
        self._started, self._done, self._total = time.perf_counter(), 0, n_chunks * len(shapes)
        self._waiting: list[list[tuple[F32, F32, F32]]] = [[] for _ in shapes]
        # of the exact outputs, and of the differences from them
        self._norms = [np.zeros(s.n_kv) for s in shapes]
        self._squares = [np.zeros((len(tried), len(PARTS), s.n_kv)) for s in shapes]
        # of keys, the largest magnitudes of channels, sinks apart
        self.magnitudes: list[F32] = [np.zeros((s.n_kv, s.d_k), np.float32) for s in shapes]
        # of keys and values, sinks apart
        self._moments = [[np.zeros((s.n_kv, d, d)) for d in (s.d_k, s.d_v)] for s in shapes]

    def errors(self, candidate: int, part: int) -> list[F64]:
        """||o - o'|| / ||o|| of each layer's heads, f64 [G]; 1 where o is 0 and o' is not."""
        out = []
        for norms, squares in zip(self._norms, self._squares, strict=True):
            mine = squares[candidate, part]
            none = np.where(mine > 0, 1.0, 0.0)
            out.append(np.sqrt(np.divide(mine, norms, out=none, where=norms > 0)))
        return out

    def spectra(self) -> list[tuple[Spectrum, Spectrum]]:
        """Of each layer's keys and values, over all tokens so far, sinks apart."""
        return [(Spectrum.of(keys), Spectrum.of(values)) for keys, values in self._moments]

    def __call__(self, layer: int, q: F32, k: F32, v: F32, rope: Rope | None, scale: float) -> None:
        """A part of the chunk, as the backend tells it; dealt with when the chunk is whole."""
        waiting = self._waiting[layer]
        start, wanted = sum(len(part[1]) for part in waiting), self._ctx - self._ctx // 4
        waiting.append((q[max(wanted - start, 0) :], k, v))
        if start + len(k) < self._ctx:
            return
        q, k, v = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        waiting.clear()
        if not all(np.isfinite(x).all() for x in (q, k, v)):
            raise NumericsError(
                f"layer {layer}: queries, keys or values hold NaN or infinity, where finite "
                "numbers were expected; the model's file may be damaged"
            )
        at = np.arange(len(k), dtype=np.int64)
        turned_q = turned(q, rope, at[wanted:]) * np.float32(scale)
        self._note(layer, _Layer(turned_q, turned(k, rope, at), v, k, rope, self._shapes[layer]))
        self._done += 1
        if self._progress is not None:
            seconds = (time.perf_counter() - self._started) / self._done
            self._progress(self._done, self._total, seconds)

    def _note(self, layer: int, given: _Layer) -> None:
        stored = given.unturned if self._unturned else given.keys
        most = np.abs(stored[self._sinks :]).max(0)
        np.maximum(self.magnitudes[layer], most, out=self.magnitudes[layer])
        for moments, x in zip(self._moments[layer], (stored, given.values), strict=True):
            moments += second_moments(x[self._sinks :])
        shape, n = given.shape, len(given.keys)
        at_once = max(1, HELD_BYTES // (2 * 4 * n * shape.n_kv * (shape.d_k + shape.d_v)))
        for start in range(0, len(self._tried), at_once):
            norms, squares = self._try(layer, given, self._tried[start : start + at_once])
            self._squares[layer][start : start + at_once] += squares
            if start == 0:
                self._norms[layer] += norms

    def _try(self, layer: int, given: _Layer, some: Sequence[Candidate]) -> tuple[F64, F64]:
        """Squared norms of o, f64 [G], and of o - o', [candidates, parts, G]."""
        heads = range(given.shape.n_kv)
        places = [(c, g, side) for g in heads for c in some for side in SIDES]
        made = self._pool.map(lambda place: self._kept(layer, given, *place), places)
        kept = dict(zip(places, made, strict=True))
        blocks = pairwise(self._bounds(given.first, len(given.keys), layer, some))
        tasks = [(g, start, stop) for start, stop in blocks for g in heads]
        found = self._pool.map(lambda task: self._block(layer, given, some, kept, *task), tasks)
        norms, squares = np.zeros(len(heads)), np.zeros((len(some), len(PARTS), len(heads)))
        for (g, _, _), (norm, of_block) in zip(tasks, found, strict=True):
            norms[g] += norm
            squares[:, :, g] += of_block
        return norms, squares

    def _kept(self, layer: int, given: _Layer, of: Candidate, head: int, side: Side) -> _Kept:
        layout, key = of.layouts[layer], side == "key"
        formats = layout.formats
        turns = key and formats.position == "read"
        x = (given.unturned if turns else given.keys if key else given.values)[:, head]
        exact = _rounded(formats.tail_k if key else formats.tail_v, x)
        coded = exact[self._sinks : self._sinks + self._encoded(layout, len(x) - 1)]
        if not (formats.exact_k if key else formats.exact_v):
            name, map_ = (
                (formats.page_k, formats.transform_k) if key else
                (formats.page_v, formats.transform_v)
            )  # fmt: skip
            coded = _through(find(name), side, map_, coded, of.head(layer, head, side))
        if turns:
            at = np.arange(len(x), dtype=np.int64)
            exact = turned(exact[:, None], given.rope, at)[:, 0]
            pages = at[self._sinks : self._sinks + len(coded)]
            coded = turned(coded[:, None], given.rope, pages)[:, 0]
        return _Kept(exact, coded)

    def _encoded(self, layout: LayerLayout, position: int) -> int:
        """Tokens that a query there sees encoded, or would without a window; sinks precede them."""
        return max((position - self._sinks - layout.residual) // PAGE, 0) * PAGE

    def _bounds(self, first: int, n: int, layer: int, some: Sequence[Candidate]) -> list[int]:
        """Where the queries are cut: those of a block see the same tokens encoded."""
        turns = {self._sinks + c.layouts[layer].residual for c in some}
        inside = (i for i in range(first + 1, n) if any((i - t) % PAGE == 0 for t in turns))
        return [first, *inside, n]

    def _block(
        self,
        layer: int,
        given: _Layer,
        some: Sequence[Candidate],
        kept: dict[Any, _Kept],
        head: int,
        start: int,
        stop: int,
    ) -> tuple[float, F64]:
        """Of a block of queries the squared norm of o, and of o - o', [candidates, parts]."""
        shape, first = given.shape, given.first
        group, window = shape.n_head // shape.n_kv, shape.window
        low = max(start - window + 1, 0) if window else 0
        mine = given.q[start - first : stop - first, head * group : (head + 1) * group]
        q = np.ascontiguousarray(mine.transpose(1, 0, 2)).reshape(-1, shape.d_k)
        attend = partial(_attend, q, stop - start, _hidden(start, stop, low, window))
        values = np.ascontiguousarray(given.values[low:stop, head])
        weights, sums = attend(np.ascontiguousarray(given.keys[low:stop, head]))
        exact = weights @ values / sums
        squares = np.zeros((len(some), len(PARTS)))
        for i, c in enumerate(some):
            end = self._sinks + self._encoded(c.layouts[layer], start)
            k, v = (self._seen(kept[c, head, side], low, stop, end) for side in SIDES)
            other, other_sums = attend(k)
            for part, out in enumerate(
                (other @ values / other_sums, weights @ v / sums, other @ v / other_sums)
            ):
                squares[i, part] = np.square(out - exact, dtype=np.float64).sum()
        return float(np.square(exact, dtype=np.float64).sum()), squares

    def _seen(self, of: _Kept, low: int, stop: int, end: int) -> F32:
        """Tokens low to stop - 1, those from the sinks to `end` out of their pages."""
        out = of.exact[low:stop].copy()
        begin = max(low, self._sinks)
        if begin < end:
            out[begin - low : end - low] = of.coded[begin - self._sinks : end - self._sinks]
        return out


def _hidden(start: int, stop: int, low: int, window: int) -> Unseen:
    """Row and column of each score that is none, for queries start.. and tokens low to stop - 1."""
    query, token = np.arange(start, stop)[:, None], np.arange(low, stop)
    unseen = token > query
    if window:
        unseen |= token <= query - window
    rows, columns = np.nonzero(unseen)
    return rows, columns


def _attend(q: F32, rows: int, hidden: Unseen, keys: F32) -> tuple[F32, F32]:
    """Weights [group * rows, keys], not yet divided by their sums, and these, [group * rows, 1]."""
    scores: F32 = q @ keys.T
    scores.reshape(-1, rows, len(keys))[:, hidden[0], hidden[1]] = -np.inf
    scores -= scores.max(1, keepdims=True)
    weights = np.exp(scores, out=scores)
    return weights, weights.sum(1, keepdims=True)


def _rounded(name: str, x: F32) -> F32:
    """[T, D] as pages of a type without codes give them back."""
    filled = np.pad(x, ((0, -len(x) % PAGE), (0, 0)))
    return _through(find(name), "key", "none", filled, HeadNumbers())[: len(x)]


def _through(format_: Any, side: Side, transform: str, x: F32, numbers: HeadNumbers) -> F32:
    """[64 P, D] as P pages give them back."""
    maps = transforms.matrices(transform, x.shape[1], [numbers])
    mapped = x if maps is None else x @ maps[0]
    pages = mapped.reshape(-1, PAGE, mapped.shape[1])
    encode, decode = (
        (format_.encode_keys, format_.decode_keys) if side == "key" else
        (format_.encode_values, format_.decode_values)
    )  # fmt: skip
    given = {} if format_.calibration == "none" else {"numbers": numbers}

    def one(page: F32) -> F32:
        out: F32 = decode(encode(page, **given), page.shape[1], PAGE, **given)
        return out

    if _splits(format_, side, mapped.shape[1]):
        # a wide page instead of many narrow ones: NumPy is then several times as fast
        wide = one(np.ascontiguousarray(pages.transpose(1, 0, 2)).reshape(PAGE, -1))
        out = wide.reshape(PAGE, len(pages), -1).transpose(1, 0, 2)
    else:
        out = np.stack([one(page) for page in pages])
    flat = out.reshape(mapped.shape)
    return flat if maps is None else flat @ maps[0].T


def _splits(format_: Any, side: Side, width: int) -> bool:
    """Whether a head beside others in one page is encoded as it is alone."""
    if not isinstance(format_, CodedFormat):
        return True
    axis = format_.key_axis if side == "key" else format_.value_axis
    whole = axis == "block" and width % VALUE_CHANNELS == 0
    return not format_.outliers and (whole or axis == "channel")
