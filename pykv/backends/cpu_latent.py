"""Attention on the CPU over layers whose values are the first channels of their keys.

Writes, attention and encoding of one layer as lines of a batch's program; cpu_attention.py has
those of all other layers, and what a batch's layers share.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pykv.backends import transforms
from pykv.backends.base import I64, CacheFormats, LayerShape, Step
from pykv.backends.kernels import latent_block, latent_key, mapped_by, stem
from pykv.backends.page_maps import matrices
from pykv.backends.program import Buffer
from pykv.formats.coded import HeadNumbers, find

if TYPE_CHECKING:
    from pykv.backends.cpu import CpuBackend
    from pykv.backends.cpu_attention import CpuAttention

CHUNK_ENTRIES = 8  # attention_numba.CHUNK
ROWS_AT_ONCE = 16  # rows whose partial sums are kept at the same time
LEAST_SHARE = 4096  # values that a thread sums at a time
LAUNCH_FLOPS = 4e9  # of one prompt launch, so that Ctrl-C is heard soon
HEADS_AT_ONCE = 32  # query heads of a row that share one decoded page, at most
LINES_AT_ONCE = 64  # query heads x queries of one prompt task
PROMPT_TASKS_PER_THREAD = 4  # of one prompt launch, at least
TASKS_PER_THREAD = 2  # that a batch of rows is cut into, if it has as many heads
WHOLE = 1 << 40  # table entries: a prompt's task walks over all of them


class LatentMaps:
    """A layer's transform, and the numbers of its format that lie outside the pages."""

    def __init__(
        self,
        shape: LayerShape,
        formats: CacheFormats,
        numbers: Sequence[Sequence[HeadNumbers]],
    ) -> None:
        keys, values = numbers or ((), ())
        self.d_v = transforms.width(formats.transform_k, shape.d_v)
        self.d_k = self.d_v + shape.d_k - shape.d_v
        self.matrix, self.back = matrices(formats.transform_k, shape.d_v, values)
        # what maps rows: the block alone, where the matrix consists of equal ones
        self.block = latent_block(formats, shape)
        self.rows, self.rows_back = self.matrix, self.back
        if self.block:
            self.rows, self.rows_back = matrices(formats.transform_k, self.block, values)
        format_ = find(formats.page_k)
        # of the latent, and of the channels that turn
        scales = [1.0 if not n or n[0].scale is None else float(n[0].scale) for n in (values, keys)]
        self.extra = np.array(scales, np.float32)
        self.second = int(format_.page_bytes(self.d_v, "key"))


class CpuLatent:
    """Emits such layers' attention for a batch."""

    def __init__(self, batch: CpuAttention, backend: CpuBackend, step: Step) -> None:
        # the batch holds this: a cycle would keep its pages' owners alive
        self._batch: CpuAttention = weakref.proxy(batch)
        self._backend, self._step = backend, step
        self._rows = [np.asarray(r.rows, np.int32) for r in step.rounds]
        self._maps: dict[int, LatentMaps] = {}

    def _maps_of(self, layer: int) -> LatentMaps:
        if layer not in self._maps:
            step = self._step
            numbers = step.numbers[layer] if step.numbers else ()
            self._maps[layer] = LatentMaps(step.shapes[layer], step.formats[layer], numbers)
        return self._maps[layer]

    def emit(self, layer: int, q: Buffer, k: Buffer) -> Buffer:
        """Lines for one layer; q [T, H, d_k] and k [T, 1, d_k] have been turned, q scaled."""
        batch, backend, step = self._batch, self._backend, self._step
        shape, formats = step.shapes[layer], step.formats[layer]
        out = backend.buffer(q.shape[0], shape.n_head * shape.d_v)
        few = q.shape[0] < 8 or backend.deterministic
        q_pages = self._turned(layer, q)
        for rows, round_ in zip(self._rows, step.rounds, strict=True):
            backend.emit(
                f"latent_write_{formats.tail_k}", 1, step.records[layer], rows, len(rows), k,
                shape.d_k * 4, shape.d_k, batch.flags_of(layer),
            )  # fmt: skip
            if few:
                self._attend_rows(layer, rows, q, q_pages, out)
            else:
                for segment in round_.segments:
                    mine = np.arange(segment.first, segment.first + segment.count, dtype=np.int32)
                    self._attend_prompt(layer, mine, q, q_pages, out)
            if round_.moves:
                self._encode(layer, round_.moves[layer][0])
        return out

    def _turned(self, layer: int, q: Buffer) -> Buffer:
        """The rows' queries as the layer's encoded pages want them."""
        maps, shape = self._maps_of(layer), self._step.shapes[layer]
        if maps.matrix is None:
            return q
        rows, heads, d = q.shape
        out = self._backend.buffer(rows, heads, maps.d_k)
        self._backend.emit(
            mapped_by("latent_turn", maps.block), rows * heads, q, d, shape.d_v, maps.rows,
            maps.d_v, out,
        )  # fmt: skip
        return out

    def _attend(
        self, layer: int, rows: Any, q: Buffer, q_pages: Buffer, block: tuple[int, int],
        chunks: int, cost: int = 0,
    ) -> tuple[I64, int, tuple[int, int]]:  # fmt: skip
        """The launch for some rows, a block being so many heads and queries.

        Chunks are 0 for a prompt. Returns its parameters, its tasks per chunk, and where sums and
        softmax states go.
        """
        from pykv.kernels.latent_numba import scratch_bytes

        batch, backend, shape = self._batch, self._backend, self._step.shapes[layer]
        maps, heads, whole = self._maps_of(layer), shape.n_head, chunks == 0
        width = (shape.d_v + 31) // 32 * 32
        if maps.matrix is not None:
            width += (maps.d_v + 31) // 32 * 32
        room = 1 if whole else batch.capacity(self._step)
        partial, stats = batch.partial_for(len(rows) * heads * room, width)
        per_block, queries = block
        scratch = scratch_bytes(per_block * queries, shape.d_k, shape.d_v, maps.d_k, maps.d_v)
        tasks = -(-heads // per_block) * -(-len(rows) // queries)
        ctx = backend.emit(
            f"latent_{latent_key(self._step.formats[layer])}", tasks * max(chunks, 1),
            self._step.records[layer], rows, len(rows), q, heads * shape.d_k * 4, q_pages,
            heads * maps.d_k * 4, shape.d_k, shape.d_v, maps.d_k, maps.d_v, max(chunks, 1), heads,
            per_block, queries, WHOLE if whole else CHUNK_ENTRIES, partial, stats,
            batch.scratch_for(scratch).address, scratch, maps.matrix is not None, maps.extra,
            maps.second, cost=cost,
        )  # fmt: skip
        return ctx, tasks, (partial, stats)

    def _combine(
        self, layer: int, rows: Any, chunks: int, places: Any, out: Buffer
    ) -> tuple[I64, int]:
        shape, maps = self._step.shapes[layer], self._maps_of(layer)
        tasks = len(rows) * shape.n_head
        ctx = self._backend.emit(
            mapped_by("combine", maps.block), tasks, rows, shape.n_head, shape.d_v, chunks,
            *places, out, shape.n_head * shape.d_v * 4, maps.d_v,
            0 if maps.rows_back is None else maps.rows_back, 0, shape.n_head,
            share=max(1, LEAST_SHARE // (chunks * shape.d_v)),
        )  # fmt: skip
        return ctx, tasks

    def _attend_rows(self, layer: int, rows: Any, q: Buffer, q_pages: Buffer, out: Buffer) -> None:
        batch, heads = self._batch, self._step.shapes[layer].n_head
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            block = HEADS_AT_ONCE
            wanted = TASKS_PER_THREAD * self._backend.threads
            # lines do not depend on each other, so that this changes no result
            while block > 4 and len(some) * -(-heads // block) * batch.chunks < wanted:
                block //= 2
            ctx, tasks, places = self._attend(layer, some, q, q_pages, (block, 1), batch.chunks)
            lines = [(len(self._backend.program) - 1, ctx, tasks)]
            ctx, tasks = self._combine(layer, some, batch.chunks, places, out)
            width = self._step.shapes[layer].d_v
            batch.launched(lines, (len(self._backend.program) - 1, ctx, tasks, width))

    def _attend_prompt(
        self, layer: int, rows: Any, q: Buffer, q_pages: Buffer, out: Buffer
    ) -> None:
        heads = self._step.shapes[layer].n_head
        per_block = min(heads, HEADS_AT_ONCE)
        queries = max(1, LINES_AT_ONCE // per_block)
        shape = self._step.shapes[layer]
        context = int(self._step.positions[rows[-1]]) + 1
        flops = 2 * context * heads * (shape.d_k + shape.d_v)
        least = queries * PROMPT_TASKS_PER_THREAD * self._backend.threads
        at_once = max(least, int(LAUNCH_FLOPS / flops) // queries * queries)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            cost = int(len(some) * flops / 32)
            places = self._attend(layer, some, q, q_pages, (per_block, queries), 0, cost)[2]
            self._combine(layer, some, 1, places, out)

    def _encode(self, layer: int, moves: I64) -> None:
        shape, maps = self._step.shapes[layer], self._maps_of(layer)
        formats = self._step.formats[layer]
        if len(moves):
            scratch = (shape.d_k + maps.d_k) * 256
            self._backend.emit(
                f"latent_encode_{formats.tail_k}_{stem(formats.page_k)}", len(moves), moves,
                shape.d_k, shape.d_v, maps.d_v, maps.second,
                self._batch.scratch_for(scratch).address, scratch,
                0 if maps.matrix is None else maps.matrix, maps.extra,
            )  # fmt: skip
