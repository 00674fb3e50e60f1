"""Attention over the pages of a cache on the GPU, written once for all formats.

A row is one query token; records and tables are those of attention_numba.py, in device memory, but
that tables hold places in the pool of pages. A program takes one row, one KV head and every
SPLITS-th chunk of eight table entries, and decodes a page once for all query heads of the group.
Each chunk has sums of its own, so that a result depends neither on the number of splits nor on the
other rows; `combine` adds them up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.coded_triton import key_bytes, key_plane, planes, value_plane
from pykv.kernels.plain_triton import key_tile, value_tile

PAGE = tl.constexpr(64)
CHUNK = tl.constexpr(8)  # table entries
MASKED = tl.constexpr(-1.0e30)
ALIGN = tl.constexpr(64)  # bytes
RECORD = tl.constexpr(16)  # int64 of a record


@triton.jit
def page_at(pool, entry):
    """The page of a table's entry, which is its place in the pool in units of ALIGN bytes.

    So the compiler sees that it is aligned, and loads 16 bytes at a time.
    """
    return pool + tl.load(entry) * ALIGN


@triton.jit
def absorb(s, seen, v0, v1, m, total, acc0, acc1, OPERAND: tl.constexpr):
    """Take scores [GROUP, T], of which `seen` [T] count, and their values into the sums."""
    s = tl.where(seen[None, :], s, MASKED)
    top = tl.maximum(m, tl.max(s, 1))
    shrink, p = tl.exp2(m - top), tl.where(seen[None, :], tl.exp2(s - top[:, None]), 0.0)
    total = total * shrink + tl.sum(p, 1)
    p = p.to(OPERAND)
    acc0 = acc0 * shrink[:, None] + tl.dot(p, v0, input_precision="ieee")
    acc1 = acc1 * shrink[:, None] + tl.dot(p, v1, input_precision="ieee")
    return top, total, acc0, acc1


@triton.jit
def store_sums(partial, place, distance, real, acc0, acc1, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """acc0 and acc1 [GROUP, WIDTH / 2] to rows `place` [GROUP] of `distance` f32 each."""
    j = tl.arange(0, WIDTH // 2)[None, :]
    channel = j // 16 * 32 + j % 16
    mask = real[:, None] & (channel < SIZE)
    tl.store(partial + place[:, None] * distance + channel, acc0, mask)
    tl.store(partial + place[:, None] * distance + channel + 16, acc1, mask)


@triton.jit
def attend_rows(
    pool, records, rows, q, q_pages, partial, stats,
    extra_k, extra_v, extra_k_stride, extra_v_stride, n_kv, chunks, scale,
    GROUP: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    PAGE_K: tl.constexpr, PAGE_V: tl.constexpr, PAGE_WIDTH_K: tl.constexpr,
    PAGE_WIDTH_V: tl.constexpr, MAPPED: tl.constexpr, ENCODED: tl.constexpr,
    OPERAND: tl.constexpr, TAIL_K: tl.constexpr, TAIL_V: tl.constexpr,
    K_BITS: tl.constexpr, K_AXIS: tl.constexpr, K_PARAMETERS: tl.constexpr, k_level: tl.constexpr,
    V_BITS: tl.constexpr, V_AXIS: tl.constexpr, V_PARAMETERS: tl.constexpr, v_level: tl.constexpr,
):  # fmt: skip
    """Partial sums f32 [rows, heads, chunks, size] and stats [..., 2] (log2 maximum, total).

    q f32 [rows, heads, D_K], q_pages [rows, heads, PAGE_K]; `scale` includes log2(e). TILE is GROUP
    rounded up to what tl.dot takes. ENCODED: whether there are pages, beside sinks and tail.
    MAPPED: the pages' sums lie behind the others, PAGE_V wide.
    """
    i, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = tl.load(rows + i).to(tl.int64)
    record = records + number * RECORD
    capacity = tl.load(record + 2)
    keys = tl.load(record).to(tl.pointer_type(tl.int64)) + h * capacity
    values = tl.load(record + 1).to(tl.pointer_type(tl.int64)) + h * capacity
    sinks, encoded = tl.load(record + 3), tl.load(record + 4)
    position, low = tl.load(record + 5), tl.load(record + 6)
    k_extra, v_extra = extra_k + h * extra_k_stride, extra_v + h * extra_v_stride
    g = tl.arange(0, TILE)
    real, heads = g < GROUP, n_kv * GROUP
    head = number * heads + h * GROUP + g
    c = tl.arange(0, WIDTH_K)[None, :]
    query = tl.load(q + head[:, None] * D_K + c, real[:, None] & (c < D_K), 0.0)
    query = (query * scale).to(OPERAND)
    c = tl.arange(0, PAGE_WIDTH_K)[None, :]
    page_query = tl.load(q_pages + head[:, None] * PAGE_K + c, real[:, None] & (c < PAGE_K), 0.0)
    page_query = (page_query * scale).to(OPERAND)
    final = tl.where(position < sinks, 0, 1 + (position - sinks) // PAGE)
    begin = tl.where(low < sinks, 0, 1 + (low - sinks) // PAGE)
    begin = tl.where(sinks == 0, tl.maximum(begin, 1), begin)
    WIDTH: tl.constexpr = (D_V + 31) // 32 * 32
    SIZE: tl.constexpr = WIDTH + ((PAGE_V + 31) // 32 * 32 if MAPPED else 0)
    for chunk in range(split, chunks, SPLITS):
        first = tl.maximum(begin, chunk * CHUNK)
        last = tl.minimum(final, chunk * CHUNK + CHUNK - 1)
        m = tl.full((TILE,), MASKED, tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        acc0 = tl.zeros((TILE, PAGE_WIDTH_V // 2), tl.float32)
        acc1 = tl.zeros((TILE, PAGE_WIDTH_V // 2), tl.float32)
        if ENCODED:
            for e in range(tl.maximum(first, 1), tl.minimum(last, encoded) + 1):
                k_page, v_page = page_at(pool, keys + e), page_at(pool, values + e)
                raw = key_bytes(k_page, PAGE_K, PAGE_WIDTH_K, K_BITS)
                for plane in tl.static_range(planes(K_BITS)):
                    k, t = key_plane(
                        raw, k_page, k_extra, plane, PAGE_K, PAGE_WIDTH_K,
                        K_BITS, K_AXIS, K_PARAMETERS, k_level,
                    )  # fmt: skip
                    s = tl.dot(page_query, k.to(OPERAND), input_precision="ieee")
                    at = t + (sinks + (e - 1) * PAGE)
                    v0 = value_plane(
                        v_page, t, v_extra, 0, PAGE_V, PAGE_WIDTH_V,
                        V_BITS, V_AXIS, V_PARAMETERS, v_level,
                    )  # fmt: skip
                    v1 = value_plane(
                        v_page, t, v_extra, 1, PAGE_V, PAGE_WIDTH_V,
                        V_BITS, V_AXIS, V_PARAMETERS, v_level,
                    )  # fmt: skip
                    m, total, acc0, acc1 = absorb(
                        s, (at >= low) & (at <= position), v0.to(OPERAND), v1.to(OPERAND),
                        m, total, acc0, acc1, OPERAND,
                    )  # fmt: skip
        m_pages, b0, b1 = m, acc0, acc1
        if MAPPED:
            acc0 = tl.zeros((TILE, WIDTH_V // 2), tl.float32)
            acc1 = tl.zeros((TILE, WIDTH_V // 2), tl.float32)
        # the sinks, where the chunk has them, and the tail
        tail = tl.maximum(tl.maximum(first, 1), encoded + 1)
        for n in range(tl.where(first == 0, 0, 1), tl.maximum(last - tail, -1) + 2):
            e = tl.where(n == 0, 0, tail + n - 1)
            start = tl.where(n == 0, 0, sinks + (e - 1) * PAGE)
            slots = tl.where(n == 0, (sinks + 15) // 16 * 16, PAGE)
            k_tail = page_at(pool, keys + e).to(tl.pointer_type(TAIL_K))
            v_tail = page_at(pool, values + e).to(tl.pointer_type(TAIL_V))
            k = key_tile(k_tail, slots, D_K, WIDTH_K).to(OPERAND)
            s = tl.dot(query, k, input_precision="ieee")
            t = tl.arange(0, PAGE)
            at = t + start
            seen = (at >= low) & (at <= position) & (t < tl.where(n == 0, sinks, PAGE))
            # slots that were never written may hold anything
            v0 = value_tile(v_tail, t, slots, 0, D_V, WIDTH_V).to(OPERAND)
            v1 = value_tile(v_tail, t, slots, 1, D_V, WIDTH_V).to(OPERAND)
            v0 = tl.where(seen[:, None], v0, 0.0)
            v1 = tl.where(seen[:, None], v1, 0.0)
            m, total, acc0, acc1 = absorb(s, seen, v0, v1, m, total, acc0, acc1, OPERAND)
        place = (i * heads + h * GROUP + g) * chunks + chunk
        store_sums(partial, place, SIZE, real, acc0, acc1, WIDTH_V, WIDTH)
        if MAPPED:
            shrink = tl.exp2(m_pages - m)[:, None]
            store_sums(
                partial + WIDTH, place, SIZE, real, b0 * shrink, b1 * shrink, PAGE_WIDTH_V,
                (PAGE_V + 31) // 32 * 32,
            )  # fmt: skip
        tl.store(stats + place * 2, m, real)
        tl.store(stats + place * 2 + 1, total, real)


@triton.jit
def combine(
    partial, stats, out, chunks, distance,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[row, head, :D] = the chunks' sums f32 [..., distance] by their share of the softmax."""
    row, head = tl.program_id(0), tl.program_id(1)
    place, c = (row * HEADS + head) * chunks, tl.arange(0, WIDTH)
    m, total = -1.0e30, 0.0
    acc = tl.zeros((WIDTH,), tl.float32)
    for chunk in range(chunks):
        top, n = tl.load(stats + (place + chunk) * 2), tl.load(stats + (place + chunk) * 2 + 1)
        most = tl.maximum(m, top)
        shrink, share = tl.exp2(m - most), tl.exp2(top - most)
        x = tl.load(partial + (place + chunk) * distance + c, c < D, 0.0)
        acc = acc * shrink + x * share
        total = total * shrink + n * share
        m = most
    tl.store(out + (row * HEADS + head) * D + c, acc / total, c < D)
