"""Attention of one batch on the CPU: writes, row and prompt kernels, encoding, in the right order.

A batch that is replayed has one round and no encoding; what changes between replays (positions,
page tables, the number of chunks) is refreshed in place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv.backends import cpu_kept
from pykv.backends.base import F32, I64, PAGE, Rope, Step
from pykv.backends.cpu_latent import CpuLatent
from pykv.backends.kernels import cache_key, stem, tiles
from pykv.backends.page_maps import PageMaps, Turns
from pykv.backends.program import Arena, Buffer, Memory, Program
from pykv.errors import NumericsError

if TYPE_CHECKING:
    from pykv.backends.cpu import CpuBackend

log = logging.getLogger("pykv")

CHUNK_TOKENS = 8 * PAGE  # attention_numba.CHUNK table entries
ROWS_AT_ONCE = 16  # rows whose partial sums are kept at the same time
LINES_AT_ONCE = 64  # query heads x queries of one prompt task
MOST_RUN, SHARES_PER_THREAD = 4, 16  # chunks that a thread takes at a time, and how often it does
LEAST_SHARE = 4096  # values that a thread writes or sums at a time
SUMS_WORDS = 13  # of column_sums' parameters
LAUNCH_FLOPS = 4e9  # of one prompt launch, so that Ctrl-C is heard soon


@dataclass
class _RowLaunch:
    """Lines of the program whose size follows the context."""

    lines: list[tuple[int, I64, int]]  # line, parameters, tasks per chunk
    combine: tuple[int, I64, int, int]  # line, parameters, tasks, values per chunk


@dataclass
class Queries:
    """Queries of all rows, turned: for pages as written, for the sinks, and for mapped pages."""

    own: Buffer
    sinks: Buffer
    pages: Buffer
    turns: Any  # position_numba.py's numbers, or 0


def maps_of(step: Step) -> dict[int, PageMaps]:
    """What the pages of each layer with keys and values need beside their bytes."""
    numbers = step.numbers or ((),) * len(step.shapes)
    return {
        i: PageMaps(*layer)
        for i, layer in enumerate(zip(step.shapes, step.formats, numbers, strict=True))
        if not layer[0].shared
    }


def _share(values: int) -> int:
    """Tasks of so many values that a thread takes at a time."""
    return max(1, LEAST_SHARE // values)


class CpuAttention:
    """Emits a batch's attention into the backend's program."""

    def __init__(self, backend: CpuBackend, step: Step) -> None:
        self._backend, self.step = backend, step
        # by rope and kind of position: cosines and sines of the rows
        self._ropes: dict[tuple[int, str], tuple[Rope, F32, F32]] = {}
        self._flags = np.zeros((len(step.shapes), 4), np.int64)
        self._chunks = self._room = max(1, self.capacity(step))
        self._launches: list[_RowLaunch] = []
        self._scratch: dict[int, Memory] = {}
        self._partial: dict[tuple[int, int], tuple[Memory, Memory]] = {}
        self.maps = maps_of(step)
        self._turns: dict[int, Turns] = {}
        self._rows = [np.asarray(r.rows, np.int32) for r in step.rounds]
        self._arena: Arena = backend.arena
        self._latent = CpuLatent(self, backend, step)

    @staticmethod
    def capacity(step: Step) -> int:
        """Chunks to make room for: what the longest row needs, rounded up to a power of two."""
        entries = 2 + int(step.records[:, :, 5].max(initial=0)) // PAGE
        return 1 << (-(-entries * PAGE // CHUNK_TOKENS) - 1).bit_length()

    def _run_of_chunks(self, tasks: int) -> int:
        """Chunks that a thread takes at a time: where there are many, neighbours."""
        return max(1, min(MOST_RUN, tasks // (self._backend.threads * SHARES_PER_THREAD)))

    # between replays

    def refresh(self, program: Program) -> None:
        """Take over the step's positions: RoPE tables and the number of chunks."""
        self._flags[:] = 0  # a run that was stopped may have left some
        for (_, kind), (rope, cos, sin) in self._ropes.items():
            cos[:], sin[:] = rope.tables(self._places(kind))
        records = self.step.records
        sinks = int(records[0, 0, 3])
        entries = 2 + max(int(records[:, :, 5].max()) - sinks, 0) // PAGE
        chunks = -(-entries * PAGE // CHUNK_TOKENS)
        if chunks != self._chunks:
            self._chunks = chunks
            for launch in self._launches:
                for line, ctx, tasks in launch.lines:
                    ctx[7 if len(ctx) == SUMS_WORDS else 11] = chunks
                    program.set_tasks(line, tasks * chunks, self._run_of_chunks(tasks * chunks))
                line, ctx, tasks, width = launch.combine
                ctx[3] = chunks
                program.set_tasks(line, tasks, _share(chunks * width))

    def check(self) -> None:
        """Raise or report what the write kernels noticed."""
        if not self._flags.any():
            return
        flags, self._flags[:] = self._flags.copy(), 0
        bad = np.flatnonzero(flags[:, 0])
        if len(bad):
            raise NumericsError(
                f"layer {bad[0]}, position {flags[bad[0], 1]}: a key or value is not a finite "
                "number; the model file may be damaged"
            )
        for layer in np.flatnonzero(flags[:, 2]):
            self._backend.report_clamped(int(layer), int(flags[layer, 2]))

    # emitting

    def emit(
        self, layer: int, q: Buffer, k: Buffer, v: Buffer, rope: Rope | None, scale: float
    ) -> Buffer:
        """Lines for one layer's attention; see Backend.attention."""
        shape, formats = self.step.shapes[layer], self.step.formats[layer]
        policy = self.step.policy
        if policy is None or layer not in policy.layers:
            policy = None
        q_sinks = q
        if policy is not None and policy.sink_places is not None:
            q_sinks = self._backend.scale(q, 1.0)
            self._turn(q_sinks, rope, scale, "sinks")
        turns: Any = 0
        if formats.position == "read":
            self._turn(q, rope, scale, "write" if policy is None else "read")
            turns = self._turns_for(rope)
        else:
            self._turn(q, rope, scale)
            self._turn(k, rope, 1.0)
        if shape.shared:
            return self._latent.emit(layer, q, k)
        out = self._backend.buffer(q.shape[0], shape.n_head * shape.d_v)
        queries = Queries(q, q_sinks, self.key_query(layer, q), turns)
        if self.step.policy is not None and self.step.policy.queries and shape.window == 0:
            cpu_kept.keep_queries(self._backend, self.step, layer, q)
        if policy is not None and policy.keeper is not None:
            cpu_kept.attend_by_row(self._backend, self, layer, queries, k, v, out)
            return out
        few = q.shape[0] < 8 or self._backend.deterministic or policy is not None
        for number, round_ in enumerate(self.step.rounds):
            rows = self._rows[number]
            self.write(layer, rows, k, v)
            if few:
                for first in range(0, len(rows), ROWS_AT_ONCE):
                    self.attend_rows(layer, rows[first : first + ROWS_AT_ONCE], queries, out)
            else:
                for segment in round_.segments:
                    self._attend_prompt(layer, segment.first, segment.count, queries, out)
            if round_.moves:
                self.encode(layer, round_.moves[layer])
        return out

    def write(self, layer: int, rows: Any, k: Buffer, v: Buffer) -> None:
        """Put some rows' keys and values in the tail."""
        shape, formats = self.step.shapes[layer], self.step.formats[layer]
        self._backend.emit(
            f"write_{formats.tail_k}_{formats.tail_v}", shape.n_kv,
            self.step.records[layer], rows, len(rows), k, shape.n_kv * shape.d_k * 4,
            v, shape.n_kv * shape.d_v * 4, shape.d_k, shape.d_v, shape.n_kv, self._flags[layer],
            share=_share(len(rows) * shape.d_k),
        )  # fmt: skip

    def _places(self, kind: str) -> I64:
        """Positions by which queries are turned: their own, or by place; see base.Policy."""
        policy = self.step.policy
        if policy is None or kind == "write":
            return self.step.positions
        places = policy.sink_places if kind == "sinks" else policy.places
        return self.step.positions if places is None else places

    def _turn(self, x: Buffer, rope: Rope | None, scale: float, kind: str = "write") -> None:
        rows, heads, d = x.shape
        if rope is None:
            if scale != 1.0:
                self._backend.emit("add", 1, x, 0, x, rows * heads * d, float(scale))
            return
        if (id(rope), kind) not in self._ropes:
            self._ropes[id(rope), kind] = (rope, *rope.tables(self._places(kind)))
        _, cos, sin = self._ropes[id(rope), kind]
        other, step = (rope.n_rot // 2, 1) if rope.neox else (1, 2)
        self._backend.emit(
            "rope", rows, x, heads, d, rope.n_rot, other, step, cos, sin, float(scale), rope.first,
        )  # fmt: skip

    def _turns_for(self, rope: Rope | None) -> I64:
        if id(rope) not in self._turns:
            sinks, room = int(self.step.records[0, 0, 3]), self.capacity(self.step)
            entries = room * CHUNK_TOKENS // PAGE + 1
            self._turns[id(rope)] = Turns(rope, sinks, entries)
        return self._turns[id(rope)].words

    def key_query(self, layer: int, q: Buffer) -> Buffer:
        """The rows' queries [T, H, D] as the layer's key pages want them."""
        maps = self.maps[layer]
        if maps.matrix_k is None:
            return q
        rows, heads, d = q.shape
        out = self._backend.buffer(rows, heads, maps.d_k)
        self._backend.emit(
            "turn", rows * heads, q, heads * d * 4, heads, d, maps.matrix_k, maps.d_k, out,
            heads * maps.d_k * 4, maps.distance_k, heads // maps.n_kv,
        )  # fmt: skip
        return out

    # what cpu_latent.py shares

    def flags_of(self, layer: int) -> I64:
        """Where write kernels note what they found."""
        flags: I64 = self._flags[layer]
        return flags

    @property
    def chunks(self) -> int:
        """Chunks that the longest row needs."""
        return self._chunks

    def launched(
        self, lines: list[tuple[int, I64, int]], combine: tuple[int, I64, int, int]
    ) -> None:
        """Take note of lines whose size follows the context; see `_RowLaunch`."""
        self._launches.append(_RowLaunch(lines, combine))

    def partial_for(self, places: int, width: int) -> tuple[int, int]:
        """Addresses for so many partial sums of that width, and for their softmax states."""
        if (places, width) not in self._partial:
            memory = self._arena.take(places * width * 4), self._arena.take(places * 8)
            self._partial[places, width] = memory
        partial, stats = self._partial[places, width]
        return partial.address, stats.address

    def scratch_for(self, n_bytes: int) -> Memory:
        """Scratch of n_bytes for every worker, kept while the batch runs."""
        if n_bytes not in self._scratch:
            self._scratch[n_bytes] = self._arena.take(n_bytes * self._backend.threads)
        return self._scratch[n_bytes]

    def attend_rows(
        self, layer: int, rows: Any, queries: Queries, out: Buffer, each: Any = None
    ) -> None:
        """Lines for some rows' attention; `each`: where every query head's shares go, or nowhere.

        Where a policy wants to know them, the rows' shares go where their records say.
        """
        policy = self.step.policy
        taps = each is not None or (policy is not None and policy.sums and layer in policy.layers)
        backend, shape = self._backend, self.step.shapes[layer]
        key, group = cache_key(self.step.formats[layer]), shape.n_head // shape.n_kv
        maps, room = self.maps[layer], self._room
        width = (shape.d_v + 31) // 32 * 32
        if maps.matrix_v is not None:
            width += (maps.d_v + 31) // 32 * 32
        places = min(len(rows), ROWS_AT_ONCE) * shape.n_head * room
        partial, stats = self.partial_for(places, width)
        lines, sums = [], []
        for heads, first, count in tiles(group):
            scratch = heads * CHUNK_TOKENS * 4
            tasks = len(rows) * shape.n_kv * count
            if taps:
                own = self._arena.take(tasks * room * scratch)
                sums.append((heads, first, count, own, scratch))
            else:
                own = self.scratch_for(scratch)
            ctx = backend.emit(
                f"attend_{key}_g{heads}", tasks * self._chunks, self.step.records[layer], rows,
                len(rows), queries.own, shape.n_head * shape.d_k * 4, shape.d_k, shape.d_v,
                shape.n_kv, group, first, count, self._chunks, partial, stats, own.address,
                scratch, queries.pages, shape.n_head * maps.d_k * 4, maps.d_k, maps.d_v,
                maps.matrix_v is not None, maps.extra_k, maps.extra_k.shape[1] * 4, maps.extra_v,
                maps.extra_v.shape[1] * 4, queries.turns, queries.sinks, taps,
                share=self._run_of_chunks(tasks * self._chunks),
            )  # fmt: skip
            lines.append((len(backend.program) - 1, ctx, tasks))
        tasks = len(rows) * shape.n_head
        ctx = backend.emit(
            "combine", tasks, rows, shape.n_head, shape.d_v, self._chunks,
            partial, stats, out, shape.n_head * shape.d_v * 4, maps.d_v,
            0 if maps.back_v is None else maps.back_v, maps.distance_back_v, group,
            share=_share(self._chunks * maps.d_v),
        )  # fmt: skip
        combine = len(backend.program) - 1, ctx, tasks, maps.d_v
        for number, (heads, first, count, own, scratch) in enumerate(sums):
            tasks = len(rows) * shape.n_kv
            ctx = backend.emit(
                "column_sums", tasks * self._chunks, self.step.records[layer], rows, shape.n_kv,
                group, first, count, heads, self._chunks, own.address, scratch, stats,
                number > 0, 0 if each is None else each,
            )  # fmt: skip
            backend.program.keep(own)
            lines.append((len(backend.program) - 1, ctx, tasks))
        self._launches.append(_RowLaunch(lines, combine))

    def attend_window(self, layer: int, rows: Any, q: Buffer, each: F32) -> None:
        """Lines that write out what rows of finished queries give every token."""
        shape = self.step.shapes[layer]
        out = self._backend.buffer(q.shape[0], shape.n_head * shape.d_v)
        self.attend_rows(layer, rows, Queries(q, q, self.key_query(layer, q), 0), out, each)

    def chunks_of(self, layer: int, row: int) -> int:
        """Chunks that a row of a layer under a policy sees."""
        records = self.step.records[layer, row]
        entries = 2 + max(int(records[5] - records[3]), 0) // PAGE
        return -(-entries * PAGE // CHUNK_TOKENS)

    def row_program(
        self, layer: int, row: Any, queries: Queries, k: Buffer, v: Buffer, out: Buffer, chunks: int
    ) -> Program:
        """A program of one row's attention, to be run for row after row."""
        self._chunks = self._room = chunks
        program = self._backend.new_program()
        self.write(layer, row, k, v)
        self.attend_rows(layer, row, queries, out)
        return program

    def _attend_prompt(
        self, layer: int, first: int, count: int, queries: Queries, out: Buffer
    ) -> None:
        from pykv.kernels.prompt_numba import scratch_bytes

        shape, maps = self.step.shapes[layer], self.maps[layer]
        group = shape.n_head // shape.n_kv
        per_block = max(1, LINES_AT_ONCE // group)
        scratch = scratch_bytes(per_block, group, shape.d_k, shape.d_v, maps.d_k, maps.d_v)
        context = int(self.step.positions[first + count - 1]) + 1
        flops = 2 * context * shape.n_head * (shape.d_k + shape.d_v)
        at_once = max(per_block, int(LAUNCH_FLOPS / flops) // per_block * per_block)
        q, q_pages = queries.own, queries.pages
        for start in range(first, first + count, at_once):
            rows = min(at_once, first + count - start)
            self._backend.emit(
                f"prompt_{cache_key(self.step.formats[layer])}",
                shape.n_kv * -(-rows // per_block), self.step.records[layer, start], rows,
                q.address + start * shape.n_head * shape.d_k * 4, shape.n_head * shape.d_k * 4,
                shape.d_k, shape.d_v, shape.n_kv, group, per_block, shape.window,
                out.address + start * shape.n_head * shape.d_v * 4, shape.n_head * shape.d_v * 4,
                self.scratch_for(scratch).address, scratch,
                q_pages.address + start * shape.n_head * maps.d_k * 4, shape.n_head * maps.d_k * 4,
                maps.d_k, maps.d_v, 0 if maps.back_v is None else maps.back_v,
                maps.extra_k, maps.extra_k.shape[1] * 4, maps.extra_v, maps.extra_v.shape[1] * 4,
                queries.turns, maps.distance_back_v, cost=int(rows * flops / 32),
            )  # fmt: skip

    def encode(self, layer: int, moves: tuple[I64, I64]) -> None:
        """Lines that encode tail pages of a layer, keys and values."""
        shape, maps = self.step.shapes[layer], self.maps[layer]
        names = self.step.formats[layer]
        sides = (
            (f"k_{names.tail_k}_{stem(names.page_k)}", shape.d_k, maps.matrix_k, maps.d_k,
             maps.extra_k, maps.distance_k),
            (f"v_{names.tail_v}_{stem(names.page_v)}", shape.d_v, maps.matrix_v, maps.d_v,
             maps.extra_v, maps.distance_v),
        )  # fmt: skip
        for (kernel, d, matrix, r, extra, distance), side_moves in zip(sides, moves, strict=True):
            if len(side_moves):
                scratch = ((d + 31) // 32 + (r + 31) // 32) * 32 * PAGE * 4
                self._backend.emit(
                    f"encode_{kernel}", len(side_moves), side_moves, d,
                    self.scratch_for(scratch).address, scratch,
                    0 if matrix is None else matrix, r, shape.n_kv, extra, extra.shape[1] * 4,
                    distance,
                )  # fmt: skip
