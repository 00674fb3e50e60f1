"""A decoding step's attention on a GPU, as the backend launches it, over pages of no model.

Every layer, sequence and KV head has pages of its own, so that a pass over all layers reads far
more than the L2 cache holds, each page once. What is timed is `CudaAttention.attend` of each layer,
all of them in one CUDA graph: the new token's keys and values are written, the row kernel and the
one that combines its sums run, and where the cache type has a transform, queries and sums go
through it. No products with weights, no norms, no rotation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pykv.backends import cuda_attention
from pykv.backends.base import PAGE, LayerShape, Step
from pykv.backends.cuda_attention import CudaAttention, LayerMaps
from pykv.backends.cuda_memory import UNIT, DeviceMemory, Tables
from pykv.cache.layout import SIDES
from pykv.cache.pages import MOST_SLAB_BYTES
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.formats.coded import find
from pykv.kernels import attention_triton

READ_BATCH = 1024  # tokens for which pages are allocated together
FILL_BYTES = 64 << 20  # of pages that are filled together
KINDS = ("sinks", "page", "tail")
WARM_UP = 3  # replays that are not counted
# Of an output's length. Queries, keys, weights and values are rounded to float16, by up to 2**-11,
# so that a score is off by 2**-10 * |q| |k| scale = 0.01 at most for normal numbers of 128 channels
# and by a twentieth of that as a rule, and an output by the like.
MOST_ERROR = 1e-2


def seconds_of(launch: Callable[[], Any], repeat: int, device: torch.device) -> list[float]:
    """Seconds of each of `repeat` calls, by events on a GPU, after some that do not count."""
    for _ in range(WARM_UP if device.type == "cuda" else 0):
        launch()
    if device.type != "cuda":
        samples = []
        for _ in range(repeat):
            started = time.perf_counter()
            launch()
            samples.append(time.perf_counter() - started)
        return samples
    # each has its own pair, and all are queued at once: the host does not come in between
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for start, end in pairs:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def copy_bandwidth(n_bytes: int, repeat: int, device: torch.device) -> float:
    """Bytes a second, those read plus those written, of torch's copy: the median."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), repeat, device)
    return 2 * n_bytes / statistics.median(seconds)


@dataclass(frozen=True)
class Measured:
    """A row of the table."""

    label: str
    sequences: int
    layers: int
    page_bytes: int  # all that the pass reads of pages
    other_bytes: int  # queries, sums written and read, outputs
    seconds: float  # of the pass over all layers: the median
    fastest: float
    error: float  # of the last layer's outputs, by their length

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return (self.page_bytes + self.other_bytes) / self.seconds


class Cache:
    """Sequences of `tokens` - 1 tokens in a store in device memory, whose pages hold numbers."""

    def __init__(
        self, config: CacheConfig, shape: LayerShape, layers: int, sequences: int, tokens: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.device, self.shape, self.layers = device, shape, layers
        memory = DeviceMemory(device)
        self.store = Store([shape] * layers, config, tokens, memory)
        self.formats, self._tokens = self.store.formats[0], tokens
        # tails are larger than what they are encoded to, and every pool's last slab has room
        tails = sum(
            find(name).page_bytes(d, side)
            for name, d, side in zip(self._tails, self._widths, SIDES, strict=True)
        )
        spare = (READ_BATCH // PAGE + 2) * layers * shape.n_kv * tails + 6 * MOST_SLAB_BYTES
        memory.reserve(sequences * self.store.estimate(tokens) + spare)
        reserved = memory.reserved_bytes
        self._maps = [LayerMaps(shape, self.formats, (), device) for _ in range(layers)]
        self._tables = Tables(device)
        self.sequences = [self.store.new_sequence() for _ in range(sequences)]
        none = np.empty(0, np.int32)
        for sequence in self.sequences:
            for start in range(0, tokens - 1, READ_BATCH):
                part = np.zeros(min(READ_BATCH, tokens - 1 - start), np.int32)
                _put_pages(self.store.begin([(sequence, part)], none))
                self.store.commit()
        self._pages = {(kind, side): self._page(kind, side) for kind in KINDS for side in (0, 1)}
        step = self._begin(sequences)
        self._fill(step)
        self.store.abort()
        if memory.reserved_bytes != reserved:
            raise RuntimeError("the pages do not lie in one slab")

    @property
    def _tails(self) -> tuple[str, str]:
        return self.formats.tail_k, self.formats.tail_v

    @property
    def _widths(self) -> tuple[int, int]:
        return self.shape.d_k, self.shape.d_v

    def _begin(self, sequences: int) -> Step:
        """A step of one more token for some sequences, after which nothing is encoded."""
        batch = [(s, np.zeros(1, np.int32)) for s in self.sequences[:sequences]]
        step = self.store.begin(batch, np.zeros(1, np.int32))
        if step.rounds[0].moves:
            raise RuntimeError("the step would encode pages: take another number of tokens")
        return step

    def _format_of(self, kind: str, side: int) -> tuple[Any, int, int]:
        """A kind of page's format, width and slots."""
        if kind == "page":
            names, maps = (self.formats.page_k, self.formats.page_v), self._maps[0]
            return find(names[side]), (maps.d_k, maps.d_v)[side], PAGE
        slots = -(-self.store.sinks // 16) * 16 if kind == "sinks" else PAGE
        return find(self._tails[side]), self._widths[side], slots

    def _page(self, kind: str, side: int) -> np.ndarray:
        """A page's bytes, out of normal numbers."""
        format_, d, slots = self._format_of(kind, side)
        values = np.random.default_rng((side, d)).standard_normal((slots, d)).astype(np.float32)
        page = (format_.encode_values if side else format_.encode_keys)(values)
        return np.pad(page, (0, -len(page) % UNIT))

    def _entries(self, step: Step) -> dict[str, range]:
        """Which table entries are of which kind."""
        encoded, position = int(step.records[0, 0, 4]), int(step.records[0, 0, 5])
        last = 1 + (position - self.store.sinks) // PAGE
        first = 0 if self.store.sinks else 1
        return {
            "sinks": range(first, 1), "page": range(1, encoded + 1),
            "tail": range(encoded + 1, last + 1),
        }  # fmt: skip

    def _fill(self, step: Step) -> None:
        """Copy the page of its kind and side to every page."""
        for part in step.parts:
            for kind, entries in self._entries(step).items():
                for side in (0, 1):
                    places = part.sequence.tables[side][..., entries.start : entries.stop]
                    self._put(places.ravel(), self._pages[kind, side])

    def _put(self, places: Any, page: np.ndarray) -> None:
        pool = self.store.memory.pool
        units = pool[: len(pool) // UNIT * UNIT].view(-1, UNIT)
        data = torch.from_numpy(page).to(self.device).view(-1, UNIT)
        each, at_once = torch.arange(len(data), device=self.device), max(1, FILL_BYTES // len(page))
        for first in range(0, len(places), at_once):
            some = torch.from_numpy(places[first : first + at_once].copy()).to(self.device)
            units[some[:, None] + each] = data

    # measuring

    def measure(self, label: str, sequences: int, repeat: int) -> Measured:
        """One token more for each of the first sequences.  Raises RuntimeError: wrong outputs."""
        step = self._begin(sequences)
        try:
            q, k, v = self._inputs(sequences)
            attention = CudaAttention(self.device, step, self._maps, self._tables, False)
            scale = self.shape.d_k**-0.5

            def launch() -> list[torch.Tensor]:
                return [attention.attend(i, q, k, v, None, scale) for i in range(self.layers)]

            outs, run = launch(), launch
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    outs = launch()
                run = graph.replay
                run()
            samples = seconds_of(run, repeat, self.device)
            expected = self._expected(step, q, k, v, scale)
            error = max(self._error(out, expected) for out in (outs[0], outs[-1]))
            if attention.check() or not error <= MOST_ERROR:
                raise RuntimeError(f"outputs are off by {error:.1e} of their length")
            return Measured(
                label, sequences, self.layers, self._page_bytes(step), self._other_bytes(step),
                statistics.median(samples), min(samples), error,
            )  # fmt: skip
        finally:
            self.store.abort()

    def _inputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Queries, the new keys and the new values."""
        rng, s = np.random.default_rng(7), self.shape
        sizes = ((s.n_head, s.d_k), (s.n_kv, s.d_k), (s.n_kv, s.d_v))
        made = (rng.standard_normal((rows, *size)).astype(np.float32) for size in sizes)
        return tuple(torch.from_numpy(x).to(self.device) for x in made)  # type: ignore[return-value]

    def _page_bytes(self, step: Step) -> int:
        """Of all pages of the step's sequences, each counted once, partly filled ones whole."""
        total = 0
        for kind, entries in self._entries(step).items():
            for side in (0, 1):
                format_, d, slots = self._format_of(kind, side)
                total += len(entries) * format_.page_bytes(d, SIDES[side], slots)
        return total * self.shape.n_kv * self.layers * step.n_rows

    def _other_bytes(self, step: Step) -> int:
        """Queries read, sums written and read again, outputs written; all float32."""
        maps, lines = self._maps[0], step.n_rows * self.shape.n_head * self.layers
        entries = self._entries(step)["tail"].stop  # the sinks' included, be they none
        chunks = -(-entries // int(attention_triton.CHUNK))
        queries, outputs = self.shape.d_k, self.shape.d_v
        if maps.matrix_k is not None:
            queries += maps.d_k
        if maps.mapped:
            outputs += maps.d_v
        return lines * 4 * (queries + 2 * chunks * (maps.size + 2) + outputs)

    def _expected(
        self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> np.ndarray:
        """Outputs f64 [rows, heads * D]: all pages of a kind are alike, and counted."""
        new = (k, v)
        seen: list[list[np.ndarray]] = [[], []]
        counts: list[np.ndarray] = []
        tail_slots = (int(step.positions[0]) - self.store.sinks) % PAGE
        entries = self._entries(step)
        for side in (0, 1):
            for kind, slots, count in (
                ("sinks", self.store.sinks, len(entries["sinks"])),
                ("page", PAGE, len(entries["page"])),
                ("tail", PAGE, len(entries["tail"]) - 1),
                ("tail", tail_slots, 1),
            ):
                seen[side].append(self._values(kind, side)[:slots])
                counts += [np.full(slots, count)] * (1 - side)
        weight = np.concatenate([*counts, [1]])
        group, rows = self.shape.n_head // self.shape.n_kv, []
        for i in range(step.n_rows):
            for head in range(self.shape.n_head):
                keys, values = (
                    np.concatenate([*seen[s], new[s][i, head // group][None].cpu().numpy()])
                    for s in (0, 1)
                )
                s = keys @ q[i, head].double().cpu().numpy() * scale
                p = weight * np.exp(s - s.max())
                rows.append(p / p.sum() @ values)
        return np.stack(rows).reshape(step.n_rows, -1)

    def _values(self, kind: str, side: int) -> np.ndarray:
        """What a page holds, f64 [slots, D], taken back through the transform."""
        format_, d, slots = self._format_of(kind, side)
        decode = format_.decode_values if side else format_.decode_keys
        n_bytes = format_.page_bytes(d, SIDES[side], slots)
        x = decode(self._pages[kind, side][:n_bytes], d, slots).astype(np.float64)
        matrix = (self._maps[0].matrix_k, self._maps[0].matrix_v)[side]
        if kind != "page" or matrix is None:
            return x
        return x @ matrix[0].double().cpu().numpy().T

    def _error(self, out: torch.Tensor, expected: np.ndarray) -> float:
        found, d = out.double().cpu().numpy(), self.shape.d_v
        off = np.linalg.norm((found - expected).reshape(-1, d), axis=1)
        return float((off / np.linalg.norm(expected.reshape(-1, d), axis=1)).max())


def _put_pages(step: Step) -> None:
    """Enter the pages that a batch encodes in the tables, as the kernel that encodes them does."""
    for part in step.parts:
        tables = part.sequence.tables
        for moves in (m for round_ in step.rounds for side in round_.moves for m in side):
            tables.reshape(-1)[(moves[:, 0] - tables.ctypes.data) // 8] = moves[:, 1]


def with_programs(programs: int, measure: Callable[[], Measured]) -> Measured:
    """A measurement with so many programs of a multiprocessor that share a step's attention."""
    usual = cuda_attention.PROGRAMS
    cuda_attention.PROGRAMS = programs
    try:
        return measure()
    finally:
        cuda_attention.PROGRAMS = usual


def layers_that_fit(
    shape: LayerShape, config: CacheConfig, most: int, sequences: int, tokens: int, free: int
) -> int:
    """Of `most` layers, those whose pages take four fifths of the free memory at most."""
    one = sequences * Store([shape], config, tokens).estimate(tokens)
    return max(1, min(most, free * 4 // 5 // one))
