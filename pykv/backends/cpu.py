"""The CPU backend: NumPy arrays, Numba kernels.

A batch of few rows is noted down once as a program and replayed, its changing parts (tokens,
positions, page tables) lying in memory that the kernels read. A prompt's products go through the
BLAS, a panel of weights at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pykv.backends import cpu_heads, cpu_kept, plan
from pykv.backends.base import (
    F32,
    Array,
    Backend,
    CacheFormats,
    LayerShape,
    Move,
    Rope,
    Step,
    WeightSource,
)
from pykv.backends.cpu_attention import CpuAttention, maps_of
from pykv.backends.cpu_weights import Weight, byte_products, matvec
from pykv.backends.crew import Crew
from pykv.backends.kernels import Kernels
from pykv.backends.products import Products
from pykv.backends.program import Arena, Buffer, Program
from pykv.backends.threads import BlasThreads, default_threads
from pykv.errors import NumericsError

BLAS_ROWS = 8  # from this many rows on, decoding a panel and calling the BLAS is faster


# layer, q [T, H, D], k [T, G, D], v, before RoPE; the rotary embedding, and the scores' factor
Listener = Callable[[int, F32, F32, F32, Rope | None, float], None]


class CpuBackend(Backend):
    """Numba kernels on `threads` threads.

    `progress` is told each kernel that has to be compiled; `kernel_cache` is the folder that they
    are kept in. `listener` is told what reaches each layer's attention.
    `deterministic`: products and attention of every batch go row by row through the
    same kernels, so that a row's result does not depend on the rows beside it.
    """

    name = "cpu"
    keeps = True

    def __init__(
        self,
        threads: int | None = None,
        deterministic: bool = False,
        progress: Callable[[str], None] | None = None,
        kernel_cache: Path | None = None,
    ) -> None:
        self.threads = threads or default_threads()
        self.deterministic = deterministic
        self.kernels = Kernels(progress, kernel_cache)
        self._crew = Crew(self.kernels.driver, self.threads)
        self.arena = Arena()
        self._blas = BlasThreads()
        self._products = Products(self.kernels, self._crew)
        self._lock = threading.Lock()
        self._weights: list[Weight] = []
        self._head_types: set[str] = set()
        self._programs: dict[tuple[Any, ...], tuple[Program, Buffer, CpuAttention, Step]] = {}
        self._program = self._new_program()
        self._attention: CpuAttention | None = None
        self._clamped: set[int] = set()
        self.listener: Listener | None = None
        self.plan = []

    def load(self, tensor: WeightSource) -> Weight:  # noqa: D102
        weight = Weight(tensor)
        self._weights.append(weight)
        return weight

    def load_heads(self, tensor: WeightSource) -> cpu_heads.HeadWeights:  # noqa: D102
        weight = cpu_heads.HeadWeights(tensor)
        self._head_types.add(weight.type)
        return weight

    def load_vector(self, tensor: WeightSource) -> F32:  # noqa: D102
        values = plan.decode(tensor).reshape(-1)
        padded = np.zeros(len(values) + 16, np.float32)
        padded[: len(values)] = values
        return padded[: len(values)]

    def prepare(self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]) -> None:  # noqa: D102
        types = sorted({w.type for w in self._weights})
        self.kernels.load_weights(types)
        self.kernels.load_heads(sorted(self._head_types))
        self.kernels.load_cache(shapes, formats)
        self.plan = [
            f"cpu backend: {self.threads} threads",
            f"weights: {', '.join(types)}",
            *self.kernels.cache_plan,
        ]

    def prepare_moves(  # noqa: D102
        self, shapes: Sequence[LayerShape], formats: Sequence[CacheFormats]
    ) -> None:
        self.kernels.load(["column_sums", "keep_query"])
        self.kernels.load(name for layer in formats for name in cpu_kept.kernel_names(layer))

    def facts(self) -> dict[str, Any]:  # noqa: D102
        return {
            "threads": self.threads,
            "compile_seconds": self.kernels.compile_seconds,
        }

    def close(self) -> None:  # noqa: D102
        self._programs.clear()
        self._weights.clear()
        self._program = self._new_program()
        self._attention, self.arena = None, Arena()
        self._products.release()
        self._crew.close()

    # running a batch

    def run(self, graph: Any, step: Step) -> F32:  # noqa: D102
        with self._lock:
            few = step.n_rows < BLAS_ROWS and len(step.rounds) == 1 and not step.rounds[0].moves
            few = few and self.listener is None
            if step.policy is not None:
                few = few and step.policy.keeper is None
                if step.policy.moves:
                    self._move(step, step.policy.moves)
            return self._replay(graph, step) if few else self._run_once(graph, step)

    def _new_program(self) -> Program:
        return Program(self._crew)

    def new_program(self) -> Program:
        """A fresh program, which verbs add to from here on."""
        self._program = self._new_program()
        return self._program

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A block that runs programs of its own, apart from the one that verbs add to."""
        before = self._program
        try:
            yield
        finally:
            self._program = before

    def move(self, step: Step, moves: Sequence[Move]) -> None:  # noqa: D102
        with self._lock:
            self._move(step, moves)

    def _move(self, step: Step, moves: Sequence[Move]) -> None:
        cpu_kept.move(self, maps_of(step), step, moves)

    def window_sums(self, step: Step, layer: int, queries: F32) -> F32:  # noqa: D102
        with self._lock:
            return cpu_kept.window_sums(self, CpuAttention(self, step), layer, queries)

    def _replay(self, graph: Any, step: Step) -> F32:
        # the graph itself is part of the key, and so stays alive; so do the formats, in the copy
        key = (
            graph, step.n_rows, len(step.outputs), CpuAttention.capacity(step), id(step.formats),
            None if step.policy is None else step.policy.kind,
        )  # fmt: skip
        if key not in self._programs:
            self._program, self.arena = self._new_program(), Arena()
            self._program.keep(self.arena)
            # the program's own copy of what changes, at addresses that stay
            own = Step(
                step.shapes, step.formats, step.tokens.copy(), step.positions.copy(),
                step.outputs.copy(), step.records.copy(), step.rounds, step.numbers,
                policy=None if step.policy is None else step.policy.copy(),
            )  # fmt: skip
            self._attention = CpuAttention(self, own)
            logits = graph.forward(own)
            self._programs[key] = (self._program, logits, self._attention, own)
            # what comes between batches, such as moves, must not run it
            self._program, self.arena, self._attention = self._new_program(), Arena(), None
        program, logits, attention, own = self._programs[key]
        own.tokens[:], own.positions[:] = step.tokens, step.positions
        own.outputs[:], own.records[:] = step.outputs, step.records
        if own.policy is not None and step.policy is not None:
            own.policy.take_places(step.policy)
        attention.refresh(program)
        program.run(step.check_cancelled)
        attention.check()
        return np.array(logits.array)

    def _run_once(self, graph: Any, step: Step) -> F32:
        self._program, self.arena = self._new_program(), Arena()
        self._attention = CpuAttention(self, step)
        try:
            with self._blas.one():
                logits = graph.forward(step)
                self.flush()
            self._attention.check()
            return np.array(logits.array)
        finally:
            self._program, self.arena = self._new_program(), Arena()
            self._attention = None
            self._products.release()

    def flush(self) -> None:
        """Run what verbs have noted down."""
        if len(self._program):
            self._program.run(self._check)
            self._program = self._new_program()
        if self._attention is not None:
            self._attention.check()

    def _check(self) -> None:
        """Raise CancelledError if the batch that runs is to stop."""
        if self._attention is not None:
            self._attention.step.check_cancelled()

    def buffer(self, *shape: int) -> Buffer:
        """Fresh memory for a result."""
        return Buffer(self.arena.take(int(np.prod(shape)) * 4), shape)

    def emit(
        self, kernel: str, tasks: int, *params: Any,
        cost: int = 0, share: int = 1, group: object = None,
    ) -> Any:  # fmt: skip
        """Note down a launch of the kernel of that name; see Program.add."""
        return self._program.add(
            self.kernels[kernel], tasks, *params, cost=cost, share=share, group=group
        )

    @property
    def program(self) -> Program:
        """The program that verbs add to."""
        return self._program

    # verbs

    def array(self, x: F32) -> Array:  # noqa: D102
        buffer = self.buffer(*x.shape)
        buffer.array[...] = x
        return buffer

    def embed(self, weight: Weight, step: Step) -> Array:  # noqa: D102
        out = self.buffer(step.n_rows, weight.width)
        self._panel(weight, weight.address, step.tokens, out, step.n_rows)
        return self._resize(out, weight.n_in)

    def _resize(self, x: Buffer, n: int) -> Buffer:
        """Rows of n values, cut or filled up with zeros; x itself where it fits."""
        if x.shape[-1] == n:
            return x
        out = self.buffer(x.shape[0], n)
        self.emit("resize_rows", x.shape[0], x, out, x.shape[1], n)
        return out

    def _panel(self, weight: Weight, address: int, rows: Any, out: Any, n_rows: int) -> None:
        blocks = weight.width // self.kernels.block_len(weight.type)
        per_task = max(1, 8192 // weight.width)
        self.emit(
            f"panel_{weight.type}", -(-n_rows // per_task), address, weight.row_bytes, blocks,
            rows, out, weight.width * 4, n_rows, per_task,
        )  # fmt: skip

    def linear(self, x: Array, weight: Weight, add: Array | None = None) -> Array:  # noqa: D102
        n = x.shape[0]
        if n >= BLAS_ROWS and not self.deterministic:
            return self._linear_blas(x, weight, add)
        out, x = self.buffer(n, weight.n_out), self._resize(x, weight.width)
        inputs = self.kernels.vnni_inputs(weight.type)
        if inputs is not None:
            byte_products(self, x, weight, add, out, inputs)
            return out
        done = 0
        while done < n:
            rows = 4 if n - done >= 4 else 1
            matvec(self, x, weight, add, out, done, rows)
            done += rows
        return out

    def _linear_blas(self, x: Buffer, weight: Weight, add: Array | None) -> Buffer:
        out = self.buffer(x.shape[0], weight.n_out)
        self.flush()
        result = out.array
        self._products.multiply(x.array, weight, result, self._check)
        if add is not None:
            result += add.array
        return out

    def heads_linear(self, x: Array, weight: cpu_heads.HeadWeights) -> Array:  # noqa: D102
        if x.shape[0] < BLAS_ROWS or self.deterministic:
            return cpu_heads.emit(self, x, weight)
        self.flush()
        return cpu_heads.multiply(self, self._products, x, weight, self._check)

    def columns(self, x: Array, first: int, stop: int) -> Array:  # noqa: D102
        return cpu_heads.columns(self, x, first, stop)

    def concat(self, x: Array, y: Array) -> Array:  # noqa: D102
        return cpu_heads.concat(self, x, y)

    def rms_norm(self, x: Array, weight: F32, eps: float) -> Array:  # noqa: D102
        out, n = self.buffer(*x.shape), x.shape[-1]
        rows = int(np.prod(x.shape[:-1]))
        per_task = max(1, 16384 // n)
        self.emit("rms_norm", -(-rows // per_task), x, weight, out, n, per_task, rows, float(eps))
        return out

    def attention(  # noqa: D102
        self, step: Step, layer: int, q: Array, k: Array, v: Array, rope: Rope | None, scale: float
    ) -> Array:
        if self._attention is None:
            raise NumericsError("attention was called outside a batch")
        if self.listener is not None:
            self.flush()
            shape, keys = step.shapes[layer], k.array.copy()
            values = keys[..., : shape.d_v].copy() if shape.shared else v.array.copy()
            self.listener(layer, q.array.copy(), keys, values, rope, scale)
        return self._attention.emit(layer, q, k, v, rope, scale)

    def _gated(self, kernel: str, gate: Array, up: Array) -> Array:
        out, count = self.buffer(*gate.shape), int(np.prod(gate.shape))
        per_task = 8192
        self.emit(kernel, -(-count // per_task), gate, up, out, count, per_task)
        return out

    def swiglu(self, gate: Array, up: Array) -> Array:  # noqa: D102
        return self._gated("swiglu", gate, up)

    def geglu(self, gate: Array, up: Array) -> Array:  # noqa: D102
        return self._gated("geglu", gate, up)

    def add(self, x: Array, y: Array) -> Array:  # noqa: D102
        out = self.buffer(*x.shape)
        self.emit("add", 1, x, y, out, int(np.prod(x.shape)), 1.0)
        return out

    def bias(self, x: Array, weight: F32) -> Array:  # noqa: D102
        out = self.buffer(*x.shape)
        self.emit("bias", x.shape[0], x, weight, out, x.shape[1])
        return out

    def scale(self, x: Array, factor: float) -> Array:  # noqa: D102
        out = self.buffer(*x.shape)
        self.emit("add", 1, x, 0, out, int(np.prod(x.shape)), float(factor))
        return out

    def softcap(self, x: Array, limit: float) -> Array:  # noqa: D102
        out = self.buffer(*x.shape)
        self.emit("softcap", 1, x, out, int(np.prod(x.shape)), float(limit))
        return out

    def take_rows(self, x: Array, step: Step) -> Array:  # noqa: D102
        out = self.buffer(len(step.outputs), x.shape[1])
        self.emit("take_rows", len(step.outputs), x, step.outputs, out, x.shape[1] * 4)
        return out

    def report_clamped(self, layer: int, count: int) -> None:
        """Say once per layer that values were too large for the tail's type."""
        if layer not in self._clamped:
            self._clamped.add(layer)
            plan.warn_clamped(layer, count)


def create(**settings: Any) -> CpuBackend:
    """A CPU backend; settings are those of CpuBackend."""
    return CpuBackend(**settings)
