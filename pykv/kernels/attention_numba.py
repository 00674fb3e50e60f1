"""Attention over the pages of a cache, written once for all formats.

Templates. `scores_*` and `mix_*` are the functions of the page formats and of the tails' formats
(see plain_numba.py), bound in `walk_chunk`, which is bound in turn as `one_chunk` in `attend_rows`;
GROUP is the number of query heads that share one pass over a page, at most 4.

A row is one query token. Its record is int64 [16]: 0 key table, 1 value table (addresses; a table
is page addresses, [KV heads][capacity]: the sinks page, then pages of 64 tokens), 2 capacity,
3 sinks, 4 encoded pages, 5 the row's place in the table, 6 the lowest place that it sees, and more
under a policy, see backends/base.py. Tokens of a sequence stand at table entry 0 while their place
is below the sinks, else at 1 + (place - sinks) / 64; without a policy it is their position.

Sums over tokens are taken in chunks of eight table entries whatever the threads, the batch or the
history, so that a row's result depends on nothing else than the pages.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.jit_numba import device
from pykv.kernels.math_numba import exp16
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.position_numba import turn_back
from pykv.kernels.simd import (
    maximum,
    reduce_add,
    reduce_max,
    splat,
)
from pykv.kernels.simd_memory import (
    keep_lanes,
    load_f32,
    put_f32,
    scalar_f32,
    scalar_i32,
    scalar_i64,
    stack,
    store_f32,
)
from pykv.kernels.turn_numba import ROW_BYTES, times_matrix

f = np.float32
CHUNK = 8  # table entries
RECORD = 128  # bytes
MASKED = np.float32(-3e38)
SUMS_BYTES = 2 * ROW_BYTES
GROUP = 1
READ = False  # whether keys lie in the pages as they were before RoPE
TURNED_BYTES = 4 * ROW_BYTES
_stub = device(lambda *args: None)
scores_page = scores_tail = mix_page = mix_tail = one_chunk = _stub


@device
def entry_of(position, sinks):
    """The table entry that holds a position."""
    return 0 if position < sinks else 1 + (position - sinks) // PAGE


@device
def sink_slots(sinks):
    """The slots of a sinks page."""
    return (sinks + 15) // 16 * 16


@device
def mask(row, start, count, low, high):
    """Mask scores of one page at `row`: kept are tokens in `low` .. `high` - 1 (positions)."""
    first, last = max(low - start, 0), min(high - start, count)
    for t in range(0, min(first, PAGE)):
        put_f32(row + t * 4, MASKED)
    for t in range(max(last, 0), PAGE):
        put_f32(row + t * 4, MASKED)


@device
def mask_bits(row, bits):
    """Mask scores of one page at `row` whose bit, of 64 at an address, is not set."""
    for i in range(4):
        store_f32(row + i * 64, keep_lanes(load_f32(row + i * 64), bits + i * 2, MASKED))


def walk_chunk(
    q, q_sinks, q_pages, alive, keys, values, first, last, sinks, encoded, position, low, d_k, d_v,
    page_k, page_v, extra_k, extra_v, turns, scratch, partial, partial_pages, out_stride, stats,
    stats_stride, more,
):  # fmt: skip
    """Table entries `first` to `last` for one row: scores, their softmax, the values' sum.

    Pages may hold keys and values of other widths, `page_k` and `page_v`, and mapped: they meet a
    query of their own, and where values are mapped their sum goes to a place of its own. Sinks
    meet `q_sinks`. `alive`: of each entry the bits of slots that hold a token, or 0. `more`:
    whether there are entries after the last.
    """
    stride = CHUNK * PAGE * 4
    turned = stack(TURNED_BYTES)
    for e in range(first, last + 1):
        at = scratch + (e - first) * PAGE * 4
        page = scalar_i64(keys + e * 8)
        # after the last page of keys come the first one's values
        ahead = scalar_i64(keys + (e + 1) * 8) if e < last else scalar_i64(values + first * 8)
        start, count = sinks + (e - 1) * PAGE, PAGE
        if READ:
            turn_back(q_sinks if e == 0 else q, d_k, GROUP, turns, e, turned)
            slots = sink_slots(sinks) if e == 0 else PAGE
            if 0 < e <= encoded:
                scores_page(turned, d_k * 4, page, ahead, d_k, PAGE, at, stride, extra_k, turns)
            else:
                scores_tail(turned, d_k * 4, page, ahead, d_k, slots, at, stride, 0, turns)
            if e == 0:
                start, count = 0, sinks
        elif e == 0:
            start, count = 0, sinks
            scores_tail(q_sinks, d_k * 4, page, ahead, d_k, sink_slots(sinks), at, stride, 0)
        elif e <= encoded:
            scores_page(q_pages, page_k * 4, page, ahead, page_k, PAGE, at, stride, extra_k)
        else:
            scores_tail(q, d_k * 4, page, ahead, d_k, PAGE, at, stride, 0)
        if low > start or position + 1 < start + PAGE or count < PAGE:
            for g in range(GROUP):
                mask(at + g * stride, start, count, low, position + 1)
        if alive != 0 and scalar_i64(alive + e * 8) != -1:
            for g in range(GROUP):
                mask_bits(at + g * stride, alive + e * 8)
    runs = (last - first + 1) * (PAGE // 16)
    for g in range(GROUP):
        softmax(scratch + g * stride, runs, stats + g * stats_stride)
        for i in range((d_v + 31) // 32 * 2):
            store_f32(partial + g * out_stride + i * 64, splat(f(0)))
        if partial_pages != partial:
            for i in range((page_v + 31) // 32 * 2):
                store_f32(partial_pages + g * out_stride + i * 64, splat(f(0)))
    # after the last page of values come the next chunk's keys
    end = scalar_i64(keys + (last + 1) * 8) if more else scalar_i64(values + last * 8)
    e = first
    if e == 0:
        mix_tail(
            scratch, stride, values, 1, min(sinks, position + 1), sink_slots(sinks),
            d_v, partial, out_stride, 0, scalar_i64(values + min(last, 1) * 8),
        )  # fmt: skip
        e = 1
    pages = min(last, encoded) - e + 1
    if pages > 0:
        p = scratch + (e - first) * PAGE * 4
        after = scalar_i64(values + (e + pages) * 8) if e + pages <= last else end
        mix_page(
            p, stride, values + e * 8, pages, PAGE, PAGE, page_v, partial_pages, out_stride,
            extra_v, after,
        )  # fmt: skip
        e += pages
    if e <= last:
        p = scratch + (e - first) * PAGE * 4
        tokens = min(PAGE, position + 1 - (sinks + (last - 1) * PAGE))
        count = last - e + 1
        mix_tail(p, stride, values + e * 8, count, tokens, PAGE, d_v, partial, out_stride, 0, end)


# ctx: records, rows (address of int32 record numbers), n_rows, q, q_stride, d_k, d_v, n_kv, group,
# first head of the tile, tiles per KV head, chunks, partial, stats, scratch, scratch per worker,
# q for pages, its stride, d_k and d_v of pages, whether the values of pages are mapped, and of the
# formats' extra float32 for keys and values address and bytes per KV head, the address of
# position_numba.py's numbers, q for sinks (of q's stride), and whether scratch is by task, to stay
def attend_rows(ctx, task, worker):
    """One chunk of the cache for one row and GROUP query heads: partial sums, maximum, total."""
    chunks, tiles, n_kv = scalar_i64(ctx + 88), scalar_i64(ctx + 80), scalar_i64(ctx + 56)
    group, d_k, d_v = scalar_i64(ctx + 64), scalar_i64(ctx + 40), scalar_i64(ctx + 48)
    c, rest = task % chunks, task // chunks
    tile, rest = rest % tiles, rest // tiles
    h, i = rest % n_kv, rest // n_kv
    number = scalar_i32(scalar_i64(ctx + 8) + i * 4)
    record = scalar_i64(ctx) + number * RECORD
    sinks, position, low = (
        scalar_i64(record + 24),
        scalar_i64(record + 40),
        scalar_i64(record + 48),
    )
    encoded, alive, kept = scalar_i64(record + 32), 0, scalar_i64(record + 64)
    if kept != 0:
        position, encoded = scalar_i64(kept + h * 16), scalar_i64(kept + h * 16 + 8)
        alive = scalar_i64(record + 72) + h * scalar_i64(record + 16) * 8
    head = h * group + scalar_i64(ctx + 72) + tile * GROUP
    width = (d_v + 31) // 32 * 32
    place = (i * n_kv * group + head) * chunks + c
    page_k, page_v = scalar_i64(ctx + 144), scalar_i64(ctx + 152)
    size = width
    if scalar_i64(ctx + 160) != 0:
        size += (page_v + 31) // 32 * 32
    partial = scalar_i64(ctx + 96) + place * size * 4
    stats = scalar_i64(ctx + 104) + place * 8
    first = max(entry_of(low, sinks), c * CHUNK)
    last = min(entry_of(position, sinks), c * CHUNK + CHUNK - 1)
    if sinks == 0:
        first = max(first, 1)
    out_stride = chunks * size * 4
    for g in range(GROUP):
        put_f32(stats + g * chunks * 8, MASKED)
        put_f32(stats + g * chunks * 8 + 4, f(0))
    if first <= last:
        at = number * scalar_i64(ctx + 32) + head * d_k * 4
        q, q_sinks = scalar_i64(ctx + 24) + at, scalar_i64(ctx + 208) + at
        own = worker if scalar_i64(ctx + 216) == 0 else task
        scratch = scalar_i64(ctx + 112) + own * scalar_i64(ctx + 120)
        tables = h * scalar_i64(record + 16) * 8
        keys, values = scalar_i64(record) + tables, scalar_i64(record + 8) + tables
        q_pages = scalar_i64(ctx + 128) + number * scalar_i64(ctx + 136) + head * page_k * 4
        extra_k = scalar_i64(ctx + 168) + h * scalar_i64(ctx + 176)
        extra_v = scalar_i64(ctx + 184) + h * scalar_i64(ctx + 192)
        partial_pages = partial + width * 4 if size > width else partial
        one_chunk(
            q, q_sinks, q_pages, alive, keys, values, first, last, sinks, encoded, position, low,
            d_k, d_v, page_k, page_v, extra_k, extra_v, scalar_i64(ctx + 200), scratch, partial,
            partial_pages, out_stride,
            stats, chunks * 8, last < entry_of(position, sinks),
        )  # fmt: skip


@device
def softmax(row, runs, stats):
    """exp(score - maximum) in place, over `runs` x 16 scores; maximum and total to `stats`."""
    top = load_f32(row)
    for i in range(1, runs):
        top = maximum(top, load_f32(row + i * 64))
    m = reduce_max(top)
    total = splat(f(0))
    for i in range(runs):
        e = exp16(load_f32(row + i * 64) - m)
        store_f32(row + i * 64, e)
        total = total + e
    put_f32(stats, m)
    put_f32(stats + 4, reduce_add(total))


# ctx: rows, heads, d_v, chunks, partial, stats, out, out_stride, d_v of pages, the matrices back or
# 0, their distance, heads of a KV head
def combine(ctx, task, worker):
    """out[row, head] = the chunks' sums, weighted by their share of the softmax."""
    heads, d_v, chunks = scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 24)
    row, head = task // heads, task % heads
    number = scalar_i32(scalar_i64(ctx) + row * 4)
    matrix, width = scalar_i64(ctx + 72), (d_v + 31) // 32 * 32
    page_v, size = scalar_i64(ctx + 64), width
    if matrix != 0:
        size += (page_v + 31) // 32 * 32
    place = (row * heads + head) * chunks
    partial = scalar_i64(ctx + 32) + place * size * 4
    stats = scalar_i64(ctx + 40) + place * 8
    out = scalar_i64(ctx + 48) + number * scalar_i64(ctx + 56) + head * d_v * 4
    m = MASKED
    for c in range(chunks):
        m = max(m, scalar_f32(stats + c * 8))
    total = f(0)
    for c in range(chunks):
        total += scalar_f32(stats + c * 8 + 4) * np.exp(scalar_f32(stats + c * 8) - m)
    sums, mapped = stack(SUMS_BYTES), stack(ROW_BYTES)
    for i in range(0, size, 16):
        store_f32(sums + i * 4, splat(f(0)))
    for c in range(chunks):
        w = splat(np.exp(scalar_f32(stats + c * 8) - m) / total)
        # a chunk outside the window has a total of 0, and sums that were never written
        if scalar_f32(stats + c * 8 + 4) > 0:
            for i in range(0, size * 4, 64):
                more = load_f32(partial + c * size * 4 + i)
                store_f32(sums + i, load_f32(sums + i) + w * more)
    if matrix != 0:
        matrix += head // scalar_i64(ctx + 88) * scalar_i64(ctx + 80)
        times_matrix(sums + width * 4, page_v, matrix, d_v, mapped)
        for i in range(d_v):
            put_f32(sums + i * 4, scalar_f32(sums + i * 4) + scalar_f32(mapped + i * 4))
    for i in range(d_v):
        put_f32(out + i * 4, scalar_f32(sums + i * 4))
