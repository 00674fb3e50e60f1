"""Attention's kernels alone, over pages that do not fit the CPU's caches.

The bound is what the same threads need to load the bytes of the pages, or to do the multiply-adds,
whichever takes longer. Both speeds are measured beside each sample, by a kernel
that only loads (an array larger than the CPU's caches, which also drives the pages out of them) and
one that only multiplies and adds.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import bars
from benchmarks.caches import cache_of
from benchmarks.report import Bar, Options, Result
from pykv.backends.base import PAGE, LayerShape, Step
from pykv.backends.cpu import CpuBackend
from pykv.backends.cpu_attention import CpuAttention
from pykv.backends.program import Program
from pykv.cache.store import Store
from pykv.formats.coded import find
from pykv.kernels import jit_numba
from pykv.kernels.simd import fma
from pykv.kernels.simd_memory import load_f32, scalar_i64, store_f32

SHAPE = LayerShape(n_head=32, n_kv=8, d_k=128, d_v=128)  # Llama-3-8B's
READ_BYTES, READ_TASK = 512 << 20, 1 << 18  # of the array, and of one task
MULTIPLY_TASKS, MULTIPLY_ROUNDS, CHAINS = 32, 20_000, 12
SAMPLES = 4  # for each of --repeat: a run takes milliseconds
PAUSE_S = 0.02  # lets the threads of another run go to sleep
READ_BATCH = 512  # tokens that are read together
_SEED = 0


def _load_only(ctx, task, worker):
    """Sum up a task's bytes.  ctx: address, bytes of a task, where to put the sums."""
    start = scalar_i64(ctx) + task * scalar_i64(ctx + 8)
    a = load_f32(start)
    b, c, d = a, a, a
    for at in range(start, start + scalar_i64(ctx + 8), 256):
        a = a + load_f32(at)
        b = b + load_f32(at + 64)
        c = c + load_f32(at + 128)
        d = d + load_f32(at + 192)
    store_f32(scalar_i64(ctx + 16) + worker * 64, a + b + c + d)


def _multiply_only(ctx, task, worker):
    """Twelve chains of 16 multiply-adds.  ctx: rounds, inputs, results."""
    x = scalar_i64(ctx + 8)
    a, b, c, d = load_f32(x), load_f32(x + 64), load_f32(x + 128), load_f32(x + 192)
    e, f, g, h = load_f32(x + 256), load_f32(x + 320), load_f32(x + 384), load_f32(x + 448)
    i, j, k, m = load_f32(x + 512), load_f32(x + 576), load_f32(x + 640), load_f32(x + 704)
    y = load_f32(x + 768)
    for _ in range(scalar_i64(ctx)):
        a, b, c, d = fma(a, y, y), fma(b, y, y), fma(c, y, y), fma(d, y, y)
        e, f, g, h = fma(e, y, y), fma(f, y, y), fma(g, y, y), fma(h, y, y)
        i, j, k, m = fma(i, y, y), fma(j, y, y), fma(k, y, y), fma(m, y, y)
    out = scalar_i64(ctx + 16) + worker * 64
    store_f32(out, a + b + c + d + e + f + g + h + i + j + k + m)


def _compiled(template: Any) -> int:
    """The kernel's address; its name follows this file, which no cache of pykv's sees change."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    address: int = jit_numba.kernel(template, f"benchmark{template.__name__}_{digest}").address
    return address


def _seconds(program: Program) -> float:
    time.sleep(PAUSE_S)
    started = time.perf_counter()
    program.run(lambda: None)
    return time.perf_counter() - started


class Limits:
    """What the machine can do: bytes loaded and multiply-adds, a second."""

    def __init__(self, threads: int, n_bytes: int) -> None:
        self._backends = [CpuBackend(threads), CpuBackend(threads)]
        loading, multiplying = (b.program for b in self._backends)
        # written, for pages that were never written may all be the same one
        self._array = np.ones(n_bytes // 4, np.float32)
        sums = np.zeros(threads * 16, np.float32)
        inputs = np.linspace(0.1, 0.9, 13 * 16, dtype=np.float32)
        self._tasks = n_bytes // READ_TASK
        loading.add(_compiled(_load_only), self._tasks, self._array, READ_TASK, sums)
        multiplying.add(_compiled(_multiply_only), MULTIPLY_TASKS, MULTIPLY_ROUNDS, inputs, sums)
        self._programs = loading, multiplying

    def measure(self) -> tuple[float, float]:
        """Both, now."""
        done = MULTIPLY_TASKS * MULTIPLY_ROUNDS * CHAINS * 16
        loading, multiplying = self._programs
        return self._tasks * READ_TASK / _seconds(loading), done / _seconds(multiplying)

    def close(self) -> None:
        """Let the threads end."""
        for backend in self._backends:
            backend.close()


class Attention:
    """One query's attention over a cache of n tokens, ready to run again and again."""

    def __init__(self, label: str, n: int, threads: int) -> None:
        config = cache_of(label)
        self._store = Store([SHAPE], config, n + 1)
        self._backend = CpuBackend(threads)
        self._backend.prepare([SHAPE], self._store.formats)
        sequence, none = self._store.new_sequence(), np.empty(0, np.int32)
        for start in range(0, n, READ_BATCH):  # pages are allocated as a prompt would have them
            tokens = np.zeros(min(READ_BATCH, n - start), np.int32)
            _put_pages(self._store.begin([(sequence, tokens)], none))
            self._store.commit()
        step = self._store.begin([(sequence, np.zeros(1, np.int32))], np.zeros(1, np.int32))
        self.page_bytes = _fill(step)
        self._attention = CpuAttention(self._backend, step)
        inputs = [
            self._backend.buffer(1, SHAPE.n_head, SHAPE.d_k),
            self._backend.buffer(1, SHAPE.n_kv, SHAPE.d_k),
            self._backend.buffer(1, SHAPE.n_kv, SHAPE.d_v),
        ]
        generator = np.random.default_rng(_SEED + 1)  # other numbers than the pages'
        for array in (x.array for x in inputs):
            array[:] = generator.standard_normal(array.shape) * 0.1
        self.out = self._attention.emit(0, *inputs, None, 1.0)
        self.inputs = inputs  # query, new key, new value; kept, so that their memory is theirs
        self.multiply_adds = n * SHAPE.n_head * (SHAPE.d_k + SHAPE.d_v)

    @property
    def encoded(self) -> int:
        """Pages of a head that are encoded."""
        return int(self._attention.step.records[0, 0, 4])

    def seconds(self) -> float:
        """Of a run.  Exits where the result is no number."""
        taken = _seconds(self._backend.program)
        if not np.isfinite(self.out.array).all():
            raise SystemExit("cache-kernel: the attention's result holds NaN or infinity")
        return taken

    def close(self) -> None:
        """Let the threads end."""
        self._store.abort()
        self._backend.close()


def _put_pages(step: Step) -> None:
    """Enter the pages that a batch encodes in the tables, as the kernel that encodes them does."""
    for moves in (m for round_ in step.rounds for side in round_.moves for m in side):
        for place, page in moves.tolist():
            ctypes.c_int64.from_address(place).value = page


def _fill(step: Step) -> int:
    """Write random keys and values into all pages; returns the bytes of the pages."""
    record, formats, total = step.records[0, 0], step.formats[0], 0
    capacity, encoded = int(record[2]), int(record[4])
    entries = 2 + (int(record[5]) - int(record[3])) // PAGE
    sides = (
        (int(record[0]), "keys", formats.page_k, formats.tail_k, SHAPE.d_k),
        (int(record[1]), "values", formats.page_v, formats.tail_v, SHAPE.d_v),
    )
    for address, side, page_type, tail_type, d in sides:
        raw = (ctypes.c_int64 * (SHAPE.n_kv * capacity)).from_address(address)
        table = np.ctypeslib.as_array(raw).reshape(SHAPE.n_kv, capacity)
        values = np.random.default_rng(_SEED).standard_normal((PAGE, d)).astype(np.float32)
        page, tail = (_encoder(t, side)(values) for t in (page_type, tail_type))
        sinks = _encoder(tail_type, side)(values[:16])
        for head in range(SHAPE.n_kv):
            for entry in range(entries):
                data = sinks if entry == 0 else page if entry <= encoded else tail
                ctypes.memmove(int(table[head, entry]), data.ctypes.data, data.nbytes)
                total += data.nbytes
    return total


def _encoder(name: str, side: str) -> Callable[[Any], Any]:
    encode: Callable[[Any], Any] = getattr(find(name), f"encode_{side}")
    return encode


def kernel(options: Options) -> Iterator[Result]:
    """Attention over 65,536 tokens of Llama-3-8B's shape, against the machine's limits."""
    labels = options.types or bars.KERNEL_TYPES
    for cache in map(cache_of, labels):
        if any(find(name).calibration == "levels" for name in (cache.type_k, cache.type_v)):
            raise SystemExit(
                f"cache-kernel: {cache.type_k} keys and {cache.type_v} values need a model's "
                "calibration, and no model is loaded here; see cache-position"
            )
    for n in options.tokens or (options.size(bars.KERNEL_TOKENS, 2048),):
        limits = Limits(options.threads, options.size(READ_BYTES, 8 << 20))
        attentions = {label: Attention(label, n, options.threads) for label in labels}
        try:
            rounds = options.size(SAMPLES, 1) * options.repeat
            yield from _rows(n, attentions, limits, rounds)
        finally:
            limits.close()
            for attention in attentions.values():
                attention.close()


def _rows(
    n: int, attentions: dict[str, Attention], limits: Limits, rounds: int
) -> Iterator[Result]:
    times: dict[str, list[float]] = {label: [] for label in attentions}
    bounds: dict[str, list[float]] = {label: [] for label in attentions}
    speeds: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        for label in attentions if number % 2 else reversed(attentions):
            attention = attentions[label]
            bandwidth, peak = limits.measure()
            seconds = attention.seconds()
            if number:
                least = max(attention.page_bytes / bandwidth, attention.multiply_adds / peak)
                times[label].append(seconds * 1e3)
                bounds[label].append(least * 1e3)
                speeds.append((bandwidth / 1e9, peak / 1e9))
    names = ("loading an array larger than the CPU's caches", "multiply-adds alone")
    for what, unit, figures in zip(names, ("GB/s", "G/s"), zip(*speeds, strict=True), strict=True):
        yield Result("cache-kernel", what, "", unit, list(figures))
    bar = Bar("≤", bars.KERNEL) if n == bars.KERNEL_TOKENS else None
    for label, attention in attentions.items():
        notes = {
            "page_bytes": attention.page_bytes,
            "multiply_adds": attention.multiply_adds,
            "shape": "8 KV heads of 128, group 4",
        }
        yield Result(
            "cache-kernel", f"attention over {n} tokens, {label}", "", "ms", times[label],
            "the machine's limit", bounds[label], notes, bar,
        )  # fmt: skip
