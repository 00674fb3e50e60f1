"""Attention over the pages of a cache on the GPU, written once for all formats.

A row is one query token; records and tables are those of backends/base.py, in device memory, but
that tables hold places in the pool of pages. A program takes one row, one KV head and every
`splits`-th chunk of eight table entries, and decodes a page once for all query heads of the group.
It walks only the chunks that the row sees, which the record says, so that the grid may be the same
for every length. Each chunk has sums of its own, so that a result depends neither on the number of
splits nor on the other rows; `combine` adds them up. A prompt's program takes a block of queries
with all heads of a group, and walks through all that they see.

Channels go by slices; see slices_triton.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.plain_triton import PAGE, page_at, value_tile
from pykv.kernels.slices_triton import (
    MASKED,
    page_scores,
    page_values,
    queries,
    slices,
    store_sums,
    tail_scores,
    weights,
    width_of,
    zero_sums,
)

CHUNK = tl.constexpr(8)  # table entries
AT_ONCE = tl.constexpr(16)  # chunks whose sums `combine` reads at a time
RECORD = tl.constexpr(16)  # int64 of a record


@device
def visible(at, position, low):
    """Which of the positions `at` [T] each line sees, [LINES, T]."""
    return (at[None, :] >= low[:, None]) & (at[None, :] <= position[:, None])


@device
def tables(record, h):
    """Of a record and a KV head: both tables, and the tokens that are sinks and pages encoded."""
    first = h * tl.load(record + 2)
    keys = tl.load(record).to(tl.pointer_type(tl.int64)) + first
    values = tl.load(record + 1).to(tl.pointer_type(tl.int64)) + first
    return keys, values, tl.load(record + 3), tl.load(record + 4)


@device
def kept_by(record, h, encoded, keys, KEPT: tl.constexpr):
    """A KV head's place, and pages encoded, and of each entry the bits of slots with a token."""
    if KEPT:
        words = tl.load(record + 8).to(tl.pointer_type(tl.int64)) + h * 2
        alive = tl.load(record + 9).to(tl.pointer_type(tl.int64)) + h * tl.load(record + 2)
        place, encoded = tl.load(words), tl.load(words + 1)
    else:
        place, alive = tl.load(record + 5), keys
    return place, encoded, alive


@device
def holds(alive, e):
    """Which of an entry's slots [64] hold a token."""
    return (tl.load(alive + e) >> tl.arange(0, PAGE) & 1) != 0


@device
def walk(
    pool, keys, values, alive, first, last, sinks, encoded, query, across, page_query, sink_query,
    sink_across, position, low,
    k_extra, v_extra, offset_cos, offset_sin, start_cos, start_sin,
    LINES: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, SLICE_K: tl.constexpr, SLICE_V: tl.constexpr, PAGE_K: tl.constexpr,
    PAGE_V: tl.constexpr, PAGE_WIDTH_K: tl.constexpr, PAGE_WIDTH_V: tl.constexpr,
    PAGE_SLICE_K: tl.constexpr, PAGE_SLICE_V: tl.constexpr, MAPPED: tl.constexpr,
    ENCODED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    TAIL_K: tl.constexpr, TAIL_V: tl.constexpr,
    K_BITS: tl.constexpr, K_AXIS: tl.constexpr, K_PARAMETERS: tl.constexpr, k_level: tl.constexpr,
    V_BITS: tl.constexpr, V_AXIS: tl.constexpr, V_PARAMETERS: tl.constexpr, v_level: tl.constexpr,
    N_ROT: tl.constexpr, NEOX: tl.constexpr, K_OUTLIERS: tl.constexpr, K_PLACES: tl.constexpr,
    V_OUTLIERS: tl.constexpr, V_PLACES: tl.constexpr, KEPT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Table entries `first` to `last` for queries [LINES, WIDTH_K] at their positions.

    KEPT: only slots count whose bit is set in `alive`. SINKS: sinks have queries of their own.
    Returns log2 of the largest weight and the weights' sum [LINES], the sums of the values' slices
    and halves, and where values of pages are mapped these pages' sums.
    """
    m, total = tl.full((LINES,), MASKED, tl.float32), tl.zeros((LINES,), tl.float32)
    acc, t = zero_sums(LINES, PAGE_WIDTH_V, PAGE_SLICE_V), tl.arange(0, PAGE)
    if ENCODED:
        for e in range(tl.maximum(first, 1), tl.minimum(last, encoded) + 1):
            k_page, v_page = page_at(pool, keys + e), page_at(pool, values + e)
            s = page_scores(
                k_page, k_extra, page_query, across, e, offset_cos, offset_sin, start_cos,
                start_sin, LINES, PAGE_K, PAGE_WIDTH_K, PAGE_SLICE_K, OPERAND, PRECISION, K_BITS,
                K_AXIS, K_PARAMETERS, k_level, N_ROT, NEOX, K_OUTLIERS, K_PLACES,
            )  # fmt: skip
            seen = visible(t + (sinks + (e - 1) * PAGE), position, low)
            if KEPT:
                seen = seen & holds(alive, e)[None, :]
            m, total, shrink, p = weights(s, seen, m, total, OPERAND)
            sums = ()
            for i in tl.static_range(2 * slices(PAGE_WIDTH_V, PAGE_SLICE_V)):
                v = page_values(
                    v_page, v_extra, i // 2 * PAGE_SLICE_V, i % 2, PAGE_V,
                    width_of(i // 2, PAGE_WIDTH_V, PAGE_SLICE_V), V_BITS, V_AXIS, V_PARAMETERS,
                    v_level, V_OUTLIERS, V_PLACES,
                )  # fmt: skip
                v = v.to(OPERAND)
                sums = sums + (tl.dot(p, v, acc[i] * shrink, input_precision=PRECISION),)
            acc = sums
    m_pages, acc_pages = m, acc
    if MAPPED:
        acc = zero_sums(LINES, WIDTH_V, SLICE_V)
    # the sinks, where the entries have them, and the tail
    tail = tl.maximum(tl.maximum(first, 1), encoded + 1)
    for n in range(tl.where(first == 0, 0, 1), tl.maximum(last - tail, -1) + 2):
        e = tl.where(n == 0, 0, tail + n - 1)
        start = tl.where(n == 0, 0, sinks + (e - 1) * PAGE)
        slots = tl.where(n == 0, (sinks + 15) // 16 * 16, PAGE)
        k_tail = page_at(pool, keys + e).to(tl.pointer_type(TAIL_K))
        v_tail = page_at(pool, values + e).to(tl.pointer_type(TAIL_V))
        s = tail_scores(
            k_tail, slots, query, across, sink_query, sink_across, e, offset_cos, offset_sin,
            start_cos, start_sin, LINES, D_K, WIDTH_K, SLICE_K, OPERAND, PRECISION, N_ROT, NEOX,
            SINKS,
        )  # fmt: skip
        there = t < tl.where(n == 0, sinks, PAGE)
        seen = visible(t + start, position, low) & there[None, :]
        if KEPT:
            seen = seen & holds(alive, e)[None, :]
        # slots that were never written may hold anything
        written = (there & (t + start <= tl.max(position, 0)))[:, None]
        m, total, shrink, p = weights(s, seen, m, total, OPERAND)
        sums = ()
        for i in tl.static_range(2 * slices(WIDTH_V, SLICE_V)):
            v = value_tile(
                v_tail, t, slots, i // 2 * SLICE_V, i % 2, D_V, width_of(i // 2, WIDTH_V, SLICE_V)
            )
            v = tl.where(written, v.to(OPERAND), 0.0)
            sums = sums + (tl.dot(p, v, acc[i] * shrink, input_precision=PRECISION),)
        acc = sums
    return m, total, acc, tl.exp2(m_pages - m)[:, None], acc_pages


@device
def entry_of(position, sinks):
    """The table entry that holds a position."""
    return tl.where(position < sinks, 0, 1 + (position - sinks) // PAGE)


@device
def first_entry(low, sinks):
    """The first table entry that positions from `low` on lie in; entry 0 is empty without sinks."""
    return tl.maximum(entry_of(low, sinks), tl.where(sinks == 0, 1, 0))


@device
def chunks_seen(record):
    """The first and the last chunk that hold positions which a row sees."""
    sinks = tl.load(record + 3)
    first, last = first_entry(tl.load(record + 6), sinks), entry_of(tl.load(record + 5), sinks)
    return (first // CHUNK).to(tl.int32), (last // CHUNK).to(tl.int32)


@triton.jit(do_not_specialize=["chunks", "splits"])
def attend_rows(
    pool, records, rows, q, q_pages, q_sinks, partial, stats,
    extra_k, extra_v, extra_k_stride, extra_v_stride, n_kv, chunks, splits, scale,
    offset_cos, offset_sin, start_cos, start_sin,
    GROUP: tl.constexpr, TILE: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    SLICE_K: tl.constexpr, SLICE_V: tl.constexpr, PAGE_K: tl.constexpr, PAGE_V: tl.constexpr,
    PAGE_WIDTH_K: tl.constexpr, PAGE_WIDTH_V: tl.constexpr, PAGE_SLICE_K: tl.constexpr,
    PAGE_SLICE_V: tl.constexpr, MAPPED: tl.constexpr, ENCODED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, TAIL_K: tl.constexpr, TAIL_V: tl.constexpr,
    K_BITS: tl.constexpr, K_AXIS: tl.constexpr, K_PARAMETERS: tl.constexpr, k_level: tl.constexpr,
    V_BITS: tl.constexpr, V_AXIS: tl.constexpr, V_PARAMETERS: tl.constexpr, v_level: tl.constexpr,
    N_ROT: tl.constexpr, NEOX: tl.constexpr, K_OUTLIERS: tl.constexpr, K_PLACES: tl.constexpr,
    V_OUTLIERS: tl.constexpr, V_PLACES: tl.constexpr, KEPT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Partial sums f32 [rows, heads, chunks, size] and stats [..., 2] (log2 maximum, total).

    `chunks` is the room for a row; those that it does not see are not written. Row i of the sums is
    that of record rows[i], as in q f32 [records, heads, D_K] and q_pages [records, heads, PAGE_K];
    `scale` includes log2(e), `splits` is the grid's last size. TILE is GROUP rounded up to what
    tl.dot takes. ENCODED: whether there are pages, beside sinks and tail.
    MAPPED: the pages' sums lie behind the others, PAGE_V wide. N_ROT: keys are stored before RoPE,
    which turns so many channels when they are read; 0: as they are to be read. K_OUTLIERS and
    V_OUTLIERS: a page's, and K_PLACES and V_PLACES these rounded up for tl.dot. KEPT: what a policy
    has kept is said in the records, for each KV head; SINKS: sinks meet q_sinks, shaped as q.
    """
    i, h, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    number = tl.load(rows + i).to(tl.int64)
    record = records + number * RECORD
    keys, values, sinks, encoded = tables(record, h)
    position, encoded, alive = kept_by(record, h, encoded, keys, KEPT)
    low = tl.load(record + 6)
    g, heads = tl.arange(0, TILE), n_kv * GROUP
    real, line = g < GROUP, number * heads + h * GROUP + g
    query, across, page_query = queries(
        q, q_pages, line, real, scale, D_K, WIDTH_K, SLICE_K, PAGE_K, PAGE_WIDTH_K, PAGE_SLICE_K,
        OPERAND, N_ROT, NEOX,
    )  # fmt: skip
    sink_query, sink_across = query, across
    if SINKS:
        sink_query, sink_across, _ = queries(
            q_sinks, q_sinks, line, real, scale, D_K, WIDTH_K, SLICE_K, D_K, WIDTH_K, SLICE_K,
            OPERAND, N_ROT, NEOX,
        )  # fmt: skip
    begin, final = first_entry(low, sinks), entry_of(position, sinks)
    WIDTH: tl.constexpr = (D_V + 31) // 32 * 32
    SIZE: tl.constexpr = WIDTH + ((PAGE_V + 31) // 32 * 32 if MAPPED else 0)
    oldest, newest = chunks_seen(record)
    # the first chunk from `oldest` on that is this split's
    oldest += (split + splits - oldest % splits) % splits
    for chunk in range(oldest, newest + 1, splits):
        m, total, acc, shrink, acc_pages = walk(
            pool, keys, values, alive, tl.maximum(begin, chunk * CHUNK),
            tl.minimum(final, chunk * CHUNK + CHUNK - 1), sinks, encoded, query, across, page_query,
            sink_query, sink_across, position + g * 0, low + g * 0,
            extra_k + h * extra_k_stride, extra_v + h * extra_v_stride,
            offset_cos, offset_sin, start_cos, start_sin,
            TILE, D_K, D_V, WIDTH_K, WIDTH_V, SLICE_K, SLICE_V, PAGE_K, PAGE_V,
PAGE_WIDTH_K, PAGE_WIDTH_V, PAGE_SLICE_K, PAGE_SLICE_V,
            MAPPED, ENCODED, OPERAND, PRECISION, TAIL_K, TAIL_V, K_BITS, K_AXIS, K_PARAMETERS,
            k_level, V_BITS, V_AXIS, V_PARAMETERS, v_level, N_ROT, NEOX,
            K_OUTLIERS, K_PLACES, V_OUTLIERS, V_PLACES, KEPT, SINKS,
        )  # fmt: skip
        place = (i * heads + h * GROUP + g) * chunks + chunk
        store_sums(partial, place, SIZE, real, acc, 1.0, WIDTH_V, SLICE_V, WIDTH)
        if MAPPED:
            store_sums(
                partial + WIDTH, place, SIZE, real, acc_pages, shrink, PAGE_WIDTH_V, PAGE_SLICE_V,
                (PAGE_V + 31) // 32 * 32,
            )  # fmt: skip
        tl.store(stats + place * 2, m, real)
        tl.store(stats + place * 2 + 1, total, real)


@triton.jit(do_not_specialize=["n_queries"])
def attend_prompt(
    pool, records, q, q_pages, out, out_pages,
    extra_k, extra_v, extra_k_stride, extra_v_stride, n_queries, n_kv, window, scale,
    offset_cos, offset_sin, start_cos, start_sin,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, LINES: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    SLICE_K: tl.constexpr, SLICE_V: tl.constexpr, PAGE_K: tl.constexpr, PAGE_V: tl.constexpr,
    PAGE_WIDTH_K: tl.constexpr, PAGE_WIDTH_V: tl.constexpr, PAGE_SLICE_K: tl.constexpr,
    PAGE_SLICE_V: tl.constexpr, MAPPED: tl.constexpr, ENCODED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, TAIL_K: tl.constexpr, TAIL_V: tl.constexpr,
    K_BITS: tl.constexpr, K_AXIS: tl.constexpr, K_PARAMETERS: tl.constexpr, k_level: tl.constexpr,
    V_BITS: tl.constexpr, V_AXIS: tl.constexpr, V_PARAMETERS: tl.constexpr, v_level: tl.constexpr,
    N_ROT: tl.constexpr, NEOX: tl.constexpr, K_OUTLIERS: tl.constexpr, K_PLACES: tl.constexpr,
    V_OUTLIERS: tl.constexpr, V_PLACES: tl.constexpr,
):  # fmt: skip
    """out f32 [queries, heads, D_V] of queries that follow each other in one sequence.

    A program takes QUERIES of them and one KV head: LINES, at least GROUP * QUERIES, is what tl.dot
    takes. `records` is the first query's; `window` is 0 for none. MAPPED: out_pages [queries,
    heads, PAGE_V] is the pages' part, to be mapped back and added.
    """
    block, h = tl.program_id(0), tl.program_id(1)
    keys, values, sinks, encoded = tables(records, h)
    start = tl.load(records + 5)
    n = tl.arange(0, LINES)
    index, g = block * QUERIES + n // GROUP, n % GROUP
    real = (n < QUERIES * GROUP) & (index < n_queries)
    index = tl.minimum(index, n_queries - 1)
    position = start + index
    low = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    line = (index.to(tl.int64) * n_kv + h) * GROUP + g
    query, across, page_query = queries(
        q, q_pages, line, real, scale, D_K, WIDTH_K, SLICE_K, PAGE_K, PAGE_WIDTH_K, PAGE_SLICE_K,
        OPERAND, N_ROT, NEOX,
    )  # fmt: skip
    first, last = first_entry(tl.min(low, 0), sinks), entry_of(tl.max(position, 0), sinks)
    m, total, acc, shrink, acc_pages = walk(
        pool, keys, values, keys, first, last, sinks, encoded, query, across, page_query, query,
        across, position, low,
        extra_k + h * extra_k_stride, extra_v + h * extra_v_stride,
        offset_cos, offset_sin, start_cos, start_sin,
        LINES, D_K, D_V, WIDTH_K, WIDTH_V, SLICE_K, SLICE_V, PAGE_K, PAGE_V,
PAGE_WIDTH_K, PAGE_WIDTH_V, PAGE_SLICE_K, PAGE_SLICE_V,
        MAPPED, ENCODED, OPERAND, PRECISION, TAIL_K, TAIL_V, K_BITS, K_AXIS, K_PARAMETERS, k_level,
        V_BITS, V_AXIS, V_PARAMETERS, v_level, N_ROT, NEOX,
        K_OUTLIERS, K_PLACES, V_OUTLIERS, V_PLACES, False, False,
    )  # fmt: skip
    share = 1.0 / total[:, None]
    store_sums(out, line, D_V, real, acc, share, WIDTH_V, SLICE_V, D_V)
    if MAPPED:
        share *= shrink
        store_sums(
            out_pages, line, PAGE_V, real, acc_pages, share, PAGE_WIDTH_V, PAGE_SLICE_V, PAGE_V
        )


@triton.jit
def combine(
    records, rows, partial, stats, out, out_pages, chunks, distance,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE_D: tl.constexpr,
    PAGE_WIDTH: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """out[rows[i], head, :D] = the chunks' sums f32 [..., distance] by their share of the softmax.

    MAPPED: out_pages[rows[i], head, :PAGE_D] is the same of the pages' sums.
    """
    i, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.load(rows + i).to(tl.int64)
    first, last = chunks_seen(records + number * RECORD)
    place, c, page_c = (i * HEADS + head) * chunks, tl.arange(0, WIDTH), tl.arange(0, PAGE_WIDTH)
    m, total = -1.0e30, 0.0
    acc, acc_pages = tl.zeros((WIDTH,), tl.float32), tl.zeros((PAGE_WIDTH,), tl.float32)
    for begin in range(first // AT_ONCE * AT_ONCE, last + 1, AT_ONCE):
        chunk = begin + tl.arange(0, AT_ONCE)
        there, at = (chunk >= first) & (chunk <= last), place + chunk
        top = tl.load(stats + at * 2, there, MASKED)
        most = tl.maximum(m, tl.max(top, 0))
        shrink, share = tl.exp2(m - most), tl.exp2(top - most)
        total = total * shrink + tl.sum(share * tl.load(stats + at * 2 + 1, there, 0.0), 0)
        sums = partial + at[:, None] * (distance // 32) * 32  # so that its alignment is seen
        share = share[:, None]
        x = tl.load(sums + c[None, :], there[:, None] & (c < D)[None, :], 0.0)
        acc = acc * shrink + tl.sum(x * share, 0)
        if MAPPED:
            sums += (D + 31) // 32 * 32
            x = tl.load(sums + page_c[None, :], there[:, None] & (page_c < PAGE_D)[None, :], 0.0)
            acc_pages = acc_pages * shrink + tl.sum(x * share, 0)
        m = most
    line = number * HEADS + head
    tl.store(out + line * D + c, acc / total, c < D)
    if MAPPED:
        tl.store(out_pages + line * PAGE_D + page_c, acc_pages / total, page_c < PAGE_D)
