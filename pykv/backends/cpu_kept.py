"""What policies need of the CPU: attention row by row, statistics, and pages made of others.

A layer under a policy that acts after every token takes a prompt's rows one after the other: each
row's token joins, attends to what is there, and the policy decides before the next. The projections
of all rows have been computed before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pykv.backends.base import F32, PAGE, CacheFormats, Move, Step
from pykv.backends.kernels import stem
from pykv.backends.page_maps import PageMaps

if TYPE_CHECKING:
    from pykv.backends.cpu import CpuBackend
    from pykv.backends.cpu_attention import CpuAttention, Queries
    from pykv.backends.program import Buffer

ROWS_AT_ONCE = 8  # of a window whose every share is written out


def keep_queries(backend: CpuBackend, step: Step, layer: int, q: Buffer) -> None:
    """Copy the rows' queries to where their records say."""
    rows, heads, d = q.shape
    backend.emit(
        "keep_query", rows, step.records[layer], np.arange(rows, dtype=np.int32), q, heads * d * 4,
        heads * d,
    )  # fmt: skip


def attend_by_row(
    backend: CpuBackend, attention: CpuAttention, layer: int, queries: Queries, k: Buffer,
    v: Buffer, out: Buffer,
) -> None:  # fmt: skip
    """One layer's attention, a row after the other, the policy deciding in between.

    Rows of sequences that keep every token yet may be among them.
    """
    policy = attention.step.policy
    if policy is None or policy.keeper is None:
        return
    row, program, chunks = np.zeros(1, np.int32), None, 0
    backend.flush()
    with backend.apart():
        for round_ in attention.step.rounds:
            for number in round_.rows.tolist():
                attention.step.check_cancelled()
                moves = policy.keeper.before(layer, number)
                if moves:
                    move(backend, attention.maps, attention.step, moves)
                row[0] = number
                needed = attention.chunks_of(layer, number)
                if program is None or needed != chunks:
                    chunks = needed
                    program = attention.row_program(layer, row, queries, k, v, out, chunks)
                    backend.new_program()  # moves run what is open first, which is not the row
                program.run(_nothing)
                policy.keeper.after(layer, number)
            if round_.moves and any(map(len, round_.moves[layer])):
                encoding = backend.new_program()
                attention.encode(layer, round_.moves[layer])
                encoding.run(_nothing)
                backend.new_program()


def _nothing() -> None:
    """A row takes microseconds; the batch asks between rows."""


def move(
    backend: CpuBackend, maps: Mapping[int, PageMaps], step: Step, moves: Sequence[Move]
) -> None:
    """Make pages of tokens of other pages, at once."""
    with backend.apart():
        program = backend.new_program()
        for work in moves:
            _emit(backend, maps[work.layer], step, work)
        program.run(_nothing)


def _emit(backend: CpuBackend, maps: PageMaps, step: Step, work: Move) -> None:
    shape, names = step.shapes[work.layer], step.formats[work.layer]
    d, r, page, tail, matrix, distance, extra = (
        (shape.d_k, maps.d_k, names.page_k, names.tail_k, maps.matrix_k, maps.distance_k,
         maps.extra_k),
        (shape.d_v, maps.d_v, names.page_v, names.tail_v, maps.matrix_v, maps.distance_v,
         maps.extra_v),
    )[work.side]  # fmt: skip
    old, new = {"tail": (d, d), "seal": (d, r), "page": (r, r)}[work.kind]
    scratch = 2 * ((max(old, new) + 31) // 32 * 32) * PAGE * 4
    own = extra.shape[1] * 4  # bytes of a head's numbers
    memory = backend.arena.take(scratch * backend.threads)
    backend.program.keep(memory)
    backend.emit(
        kernel_name(work.side, work.kind, stem(page), tail), len(work.pages), work.pages,
        work.heads, work.sources, work.sources.shape[1], work.picks, old, memory.address, scratch,
        0 if matrix is None else matrix, new, distance, extra, own, extra, own,
    )  # fmt: skip


def kernel_name(side: int, kind: str, page: str, tail: str) -> str:
    """The name of the kernel that makes such pages."""
    return f"gather_{'kv'[side]}_{kind}_{tail}" + ("" if kind == "tail" else f"_{page}")


def kernel_names(formats: CacheFormats) -> Iterator[str]:
    """The kernels that make pages for a layer."""
    sides = (
        (formats.page_k, formats.tail_k, formats.exact_k),
        (formats.page_v, formats.tail_v, formats.exact_v),
    )
    for side, (page, tail, exact) in enumerate(sides):
        for kind in ("tail",) if exact else ("tail", "seal", "page"):
            yield kernel_name(side, kind, stem(page), tail)


def window_sums(backend: CpuBackend, attention: CpuAttention, layer: int, queries: F32) -> F32:
    """See Backend.window_sums."""
    step, shape = attention.step, attention.step.shapes[layer]
    capacity = int(step.records[layer, 0, 2])
    total = np.zeros((shape.n_head, capacity, PAGE), np.float32)
    with backend.apart():
        for first in range(0, len(queries), ROWS_AT_ONCE):
            rows = np.arange(first, min(first + ROWS_AT_ONCE, len(queries)), dtype=np.int32)
            each = np.zeros((len(rows), shape.n_head, capacity, PAGE), np.float32)
            program = backend.new_program()
            attention.attend_window(layer, rows, backend.array(queries), each)
            program.run(step.check_cancelled)
            total += each.sum(0)
    return total
