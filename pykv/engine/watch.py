"""What calibration notes down of each layer while a text goes through it, and what follows.

A watch is a listener of the CPU backend. calibrate.py says what is measured, and of which tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32, LayerShape, Rope
from pykv.engine.importance import HeadInputs, importance, turned
from pykv.engine.levels import Histogram
from pykv.engine.spectrum import second_moments
from pykv.formats.base import PAGE_TOKENS
from pykv.formats.coded import CodedFormat, HeadNumbers

FIRST = 4  # tokens of a chunk that are never encoded, by default
SAMPLE_BYTES, LEAST_SAMPLE = 384 << 20, 1024  # of keys and weights; tokens
SEED = 0x70796B76  # of the draw of tokens
HUGE = np.full(1, 3e38, np.float32)  # a type with scales stores it as its largest value


@dataclass
class _Notes:
    """What has been seen of a layer so far."""

    most: list[F32]  # largest magnitude of each head's keys and values, [G]
    squares: list[NDArray[np.float64]]  # sums of x x^T of each head's keys and values, [G, D, D]
    least_key: F32  # [G, D]
    largest_key: F32
    keys: list[F32] = field(default_factory=list)  # of the tokens drawn, before RoPE, [n, G, D]
    weights: list[F32] = field(default_factory=list)  # of their channels
    values: dict[Fraction, Histogram] = field(default_factory=dict)  # by percent of outliers
    waiting: list[tuple[F32, F32, F32]] = field(default_factory=list)  # of a chunk's first part


class Watch:
    """Call `begin` before each chunk; `numbers` gives a layer's arrays when all were read.

    `levelled`: the formats with levels that are wanted. `n_chunks` of `ctx_size` tokens follow.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        levelled: Sequence[CodedFormat],
        n_chunks: int,
        ctx_size: int,
        pool: Executor,
    ) -> None:
        self._shapes, self._levelled, self._pool = shapes, levelled, pool
        self._ctx, self._rows = ctx_size, np.empty(0, np.int64)
        token_bytes = 8 * sum(s.n_kv * s.d_k for s in shapes)
        wanted = max(SAMPLE_BYTES // token_bytes, LEAST_SAMPLE)
        self._n_pages = -(-wanted // (n_chunks * PAGE_TOKENS))
        self._notes = [self._blank(s) for s in shapes]

    def _blank(self, s: LayerShape) -> _Notes:
        return _Notes(
            [np.zeros(s.n_kv, np.float32) for _ in range(2)],
            [np.zeros((s.n_kv, d, d)) for d in (s.d_k, s.d_v)],
            np.full((s.n_kv, s.d_k), np.inf, np.float32),
            np.full((s.n_kv, s.d_k), -np.inf, np.float32),
            values={f.outliers: Histogram() for f in self._levelled},
        )

    def begin(self, chunk: int) -> None:
        """A chunk comes: draw the pages whose tokens' weights count."""
        whole = (self._ctx - FIRST) // PAGE_TOKENS
        rng = np.random.default_rng((SEED, chunk))
        drawn = np.sort(rng.choice(whole, min(self._n_pages, whole), replace=False))
        first = FIRST + PAGE_TOKENS * drawn.astype(np.int64)
        self._rows = (first[:, None] + np.arange(PAGE_TOKENS)).reshape(-1)
        for notes in self._notes:
            notes.waiting.clear()

    def __call__(self, layer: int, q: F32, k: F32, v: F32, rope: Rope | None, scale: float) -> None:
        """A part of the chunk, as the backend tells it; dealt with when the chunk is whole."""
        waiting = self._notes[layer].waiting
        waiting.append((q, k, v))
        if sum(len(part[0]) for part in waiting) < self._ctx:
            return
        q, k, v = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        waiting.clear()
        self._note(layer, q * np.float32(scale), k, v, rope)

    def _note(self, layer: int, q: F32, k: F32, v: F32, rope: Rope | None) -> None:
        notes, positions = self._notes[layer], np.arange(len(k), dtype=np.int64)
        q, written = turned(q, rope, positions), turned(k, rope, positions)
        # values that are channels of the keys have a scale of their own
        shape = self._shapes[layer]
        own = written[..., shape.d_v :] if shape.shared else written
        for side, x in enumerate((own, v)):
            np.maximum(notes.most[side], np.abs(x).max((0, 2)), out=notes.most[side])
        for side, x in enumerate((written, v)):
            notes.squares[side] += second_moments(x[FIRST:])
        np.minimum(notes.least_key, k[FIRST:].min(0), out=notes.least_key)
        np.maximum(notes.largest_key, k[FIRST:].max(0), out=notes.largest_key)
        if self._levelled:
            self._weigh(layer, q, k, written, v, rope)

    def _weigh(self, layer: int, q: F32, k: F32, written: F32, v: F32, rope: Rope | None) -> None:
        notes, shape = self._notes[layer], self._shapes[layer]
        group = shape.n_head // shape.n_kv

        def head(g: int) -> tuple[F32, F32]:
            mine = np.ascontiguousarray(q[:, g * group : (g + 1) * group].transpose(1, 0, 2))
            given = HeadInputs(
                mine, np.ascontiguousarray(written[:, g]), np.ascontiguousarray(v[:, g]),
                shape.window,
            )  # fmt: skip
            return importance(given, rope, self._rows)

        of_heads = list(self._pool.map(head, range(shape.n_kv)))
        notes.keys.append(k[self._rows])
        notes.weights.append(np.stack([of_keys for _, of_keys in of_heads], 1))
        by_outliers = {f.outliers: f for f in self._levelled}
        for g, (of_values, _) in enumerate(of_heads):
            pages = _pages(v[self._rows, g], of_values[:, None])
            for (outliers, format_), (x, weights) in product(by_outliers.items(), pages):
                rest, taken = format_.set_apart(x, "value", None)
                ratio, (scale, _) = format_.within(rest, None)
                notes.values[outliers].add(ratio, weights * scale**2 * ~taken)

    # what follows

    def numbers(self, layer: int, formats: Sequence[CodedFormat]) -> list[dict[str, F32]]:
        """A layer's arrays for each of some formats with a calibration."""
        notes = self._notes[layer]
        levels: dict[Fraction, dict[int, dict[str, F32]]] = {}
        if self._levelled:
            keys, weights = np.concatenate(notes.keys), np.concatenate(notes.weights)
            for outliers in notes.values:
                counts = [2**f.bits for f in self._levelled if f.outliers == outliers]
                levels[outliers] = self._levels(layer, outliers, counts, keys, weights)
        return [
            levels[f.outliers][2**f.bits] if f.calibration == "levels" else _scales(notes, f)
            for f in formats
        ]

    def _levels(
        self, layer: int, outliers: Fraction, counts: Sequence[int], keys: F32, weights: F32
    ) -> dict[int, dict[str, F32]]:
        """Ranges, and for each count that many levels of keys and of values."""
        notes = self._notes[layer]
        low, high = notes.least_key, notes.largest_key
        if outliers:
            ends = np.percentile(keys, [float(outliers) / 2, 100 - float(outliers) / 2], 0)
            low, high = ends.astype(np.float32)
        # halves first: a sum of two large ends may be no float32
        half = np.float32(0.5)
        centre, scale = high * half + low * half, high * half - low * half
        format_ = next(f for f in self._levelled if f.outliers == outliers)
        of_keys = Histogram()
        for g in range(keys.shape[1]):
            numbers = HeadNumbers(scale[g], centre[g])
            for x, weight in _pages(keys[:, g], weights[:, g]):
                _, taken = format_.set_apart(x, "key", numbers)
                ratio, _ = format_.within(x, numbers)
                of_keys.add(ratio, weight * scale[g] ** 2 * ~taken)
        by_count = of_keys.levels(counts), notes.values[outliers].levels(counts)
        return {
            n: {
                "k_scale": scale, "k_centre": centre,
                "k_levels": by_count[0][n], "v_levels": by_count[1][n],
            }
            for n in counts
        }  # fmt: skip

    def bases(self, layer: int) -> dict[str, F32]:
        """A layer's right singular vectors, as columns, and singular values, falling."""
        out: dict[str, F32] = {}
        for side, squares in zip("kv", self._notes[layer].squares, strict=True):
            found, vectors = np.linalg.eigh(squares)
            vectors = vectors[:, :, ::-1]
            largest = np.abs(vectors).argmax(1, keepdims=True)
            # a vector's sign is arbitrary: its largest entry is made positive
            vectors = vectors * np.sign(np.take_along_axis(vectors, largest, 1))
            out[f"{side}_basis"] = vectors.astype(np.float32)
            singular = np.sqrt(np.maximum(found[:, ::-1], 0))
            out[f"{side}_singular"] = singular.astype(np.float32)
        return out


def _pages(x: F32, weights: F32) -> list[tuple[F32, F32]]:
    """[pages * 64, D] and weights of as many tokens, page by page."""
    n = len(x) // PAGE_TOKENS
    return list(zip(np.split(x, n), np.split(weights, n), strict=True))


def _scales(notes: _Notes, format_: CodedFormat) -> dict[str, F32]:
    codes, parameters = format_.quantize(HUGE)
    largest = format_.dequantize(codes, parameters)[0]
    scales = (np.where(most > 0, most / largest, np.float32(1)) for most in notes.most)
    return {f"{side}_scale": s.astype(np.float32) for side, s in zip("kv", scales, strict=True)}
