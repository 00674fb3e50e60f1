"""Attention of many queries at once, for prompts: a page is decoded once for a block of queries.

Templates like attention_numba.py: `read_*` are bound in `walk_pages`, and that as `walk` in
`attend_prompt`. A task takes one KV head and a block of queries with all their
query heads ("lines": line j * queries + i is query i of the block, head j of the group), walks over
the pages with a running softmax, and multiplies tiles of 4 lines x 64 tokens.

Source of the running softmax: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.attention_numba import (
    MASKED,
    entry_of,
    mask,
    sink_slots,
)
from pykv.kernels.jit_numba import device
from pykv.kernels.math_numba import exp16
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.position_numba import turn_page
from pykv.kernels.simd import (
    maximum,
    reduce_add,
    reduce_max,
    splat,
)
from pykv.kernels.simd_group import (
    add_products,
    load_group,
    store_group,
    zeros,
)
from pykv.kernels.simd_memory import (
    load_f32,
    put_f32,
    scalar_f32,
    scalar_i64,
    stack,
    store_f32,
)
from pykv.kernels.turn_numba import ROW_BYTES, times_matrix

f = np.float32
READ = False  # whether keys lie in the pages as they were before RoPE
TILE = 4  # lines whose sums are kept in registers
_stub = device(lambda *args: None)
read_keys_page = read_keys_tail = read_values_page = read_values_tail = walk = _stub


@device
def tile_scores(q, d, keys, out):
    """out[4][64] = q[4][d] . keys[d][64]."""
    a, b, c, e = zeros(4), zeros(4), zeros(4), zeros(4)
    for i in range(d):
        at = keys + i * 256
        a = add_products(a, q + i * 4, d * 4, load_f32(at))
        b = add_products(b, q + i * 4, d * 4, load_f32(at + 64))
        c = add_products(c, q + i * 4, d * 4, load_f32(at + 128))
        e = add_products(e, q + i * 4, d * 4, load_f32(at + 192))
    store_group(out, 256, a)
    store_group(out + 64, 256, b)
    store_group(out + 128, 256, c)
    store_group(out + 192, 256, e)


@device
def tile_mix(p, tokens, values, blocks, acc, acc_stride):
    """acc[4][d] += p[4][tokens] . values[blocks][64][32]."""
    for block in range(blocks):
        at = acc + block * 128
        v = values + block * PAGE * 128
        a, b = load_group(zeros(4), at, acc_stride), load_group(zeros(4), at + 64, acc_stride)
        for t in range(tokens):
            a = add_products(a, p + t * 4, 256, load_f32(v + t * 128))
            b = add_products(b, p + t * 4, 256, load_f32(v + t * 128 + 64))
        store_group(at, acc_stride, a)
        store_group(at + 64, acc_stride, b)


@device
def rescale(row, acc, runs, acc_pages, runs_pages, state):
    """Fold 64 new scores into a running softmax: `state` is maximum and total, `acc` the sums."""
    low = maximum(load_f32(row), load_f32(row + 64))
    high = maximum(load_f32(row + 128), load_f32(row + 192))
    old = scalar_f32(state)
    m = max(old, reduce_max(maximum(low, high)))
    total = splat(f(0))
    for i in range(4):
        e = exp16(load_f32(row + i * 64) - m)
        store_f32(row + i * 64, e)
        total = total + e
    factor = np.exp(old - m)
    put_f32(state, m)
    put_f32(state + 4, scalar_f32(state + 4) * factor + reduce_add(total))
    if m > old:
        for i in range(runs):
            store_f32(acc + i * 64, load_f32(acc + i * 64) * factor)
        for i in range(runs_pages):
            store_f32(acc_pages + i * 64, load_f32(acc_pages + i * 64) * factor)


def walk_pages(
    record, h, position, queries, lines, d_k, d_v, page_k, page_v, extra_k, extra_v, turns, window,
    packed, packed_pages, keys, values, scores, acc, acc_pages, states,
):  # fmt: skip
    """Run over all pages that any query of the block sees; see `walk_chunk` for encoded ones."""
    tables = h * scalar_i64(record + 16) * 8
    key_table, value_table = scalar_i64(record) + tables, scalar_i64(record + 8) + tables
    sinks, encoded = scalar_i64(record + 24), scalar_i64(record + 32)
    lowest = max(position - window + 1, 0) if window > 0 else 0
    final = position + queries - 1
    blocks = (d_v + 31) // 32
    blocks_pages = (page_v + 31) // 32
    apart = blocks_pages * 2 if acc_pages != acc else 0
    for e in range(max(entry_of(lowest, sinks), 0 if sinks > 0 else 1), entry_of(final, sinks) + 1):
        key_page, value_page = scalar_i64(key_table + e * 8), scalar_i64(value_table + e * 8)
        start, count, slots = sinks + (e - 1) * PAGE, PAGE, PAGE
        if e == 0:
            start, count, slots = 0, sinks, sink_slots(sinks)
        query, d, sums, n_blocks = packed, d_k, acc, blocks
        if e == 0 or e > encoded:
            read_keys_tail(key_page, d_k, slots, keys, 0)
            read_values_tail(value_page, d_v, slots, values, 0)
        else:
            read_keys_page(key_page, page_k, slots, keys, extra_k)
            read_values_page(value_page, page_v, slots, values, extra_v)
            query, d, sums, n_blocks = packed_pages, page_k, acc_pages, blocks_pages
        if READ:
            turn_page(keys, turns, e)
        tokens = min(count, final + 1 - start)
        for tile in range(0, lines, TILE):
            tile_scores(query + tile * d * 4, d, keys, scores + tile * 256)
            for line in range(tile, tile + TILE):
                row, high = scores + line * 256, position + line % queries + 1
                low = max(high - window, 0) if window > 0 else 0
                if low >= start + count or high <= start:
                    for i in range(4):
                        store_f32(row + i * 64, splat(f(0)))
                else:
                    if low > start or high < start + PAGE or count < PAGE:
                        mask(row, start, count, low, high)
                    rescale(
                        row, acc + line * blocks * 128, blocks * 2,
                        acc_pages + line * blocks_pages * 128, apart, states + line * 8,
                    )  # fmt: skip
            tile_mix(
                scores + tile * 256, tokens, values, n_blocks,
                sums + tile * n_blocks * 128, n_blocks * 128,
            )  # fmt: skip


# ctx: record of the first query, queries, q, q_stride, d_k, d_v, n_kv, group, queries per block,
# window or 0, out, out_stride, scratch, scratch per worker, q for pages, its stride, d_k and d_v of
# pages, the matrices back of their values or 0, of the formats' extra float32 for keys and values
# address and bytes per KV head, the address of position_numba.py's numbers, and the distance of
# matrices
def attend_prompt(ctx, task, worker):
    """Attention of one block of consecutive queries of one sequence, for one KV head."""
    n_kv, group, per_block = scalar_i64(ctx + 48), scalar_i64(ctx + 56), scalar_i64(ctx + 64)
    d_k, d_v = scalar_i64(ctx + 32), scalar_i64(ctx + 40)
    h, first = task % n_kv, task // n_kv * per_block
    queries = min(per_block, scalar_i64(ctx + 8) - first)
    lines = (queries * group + TILE - 1) // TILE * TILE
    record = scalar_i64(ctx)
    position = scalar_i64(record + 40) + first
    q = scalar_i64(ctx + 16) + first * scalar_i64(ctx + 24) + h * group * d_k * 4
    out = scalar_i64(ctx + 80) + first * scalar_i64(ctx + 88) + h * group * d_v * 4
    page_k, page_v, matrix = scalar_i64(ctx + 128), scalar_i64(ctx + 136), scalar_i64(ctx + 144)
    blocks, blocks_pages = (d_v + 31) // 32, (page_v + 31) // 32
    # scratch: queries, those for pages, keys, values, scores, sums, those of pages, softmax states
    packed = scalar_i64(ctx + 96) + worker * scalar_i64(ctx + 104)
    packed_pages = packed + lines * d_k * 4
    keys = packed_pages + lines * page_k * 4
    values = keys + max(d_k, page_k) * 256
    scores = values + max(blocks, blocks_pages) * PAGE * 128
    acc = scores + lines * 256
    acc_pages = acc + lines * blocks * 128
    states = acc_pages + lines * blocks_pages * 128
    pack(q, scalar_i64(ctx + 24), queries, group, lines, d_k, packed)
    if scalar_i64(ctx + 112) == scalar_i64(ctx + 16):
        packed_pages = packed
    else:
        q = scalar_i64(ctx + 112) + first * scalar_i64(ctx + 120) + h * group * page_k * 4
        pack(q, scalar_i64(ctx + 120), queries, group, lines, page_k, packed_pages)
    if matrix == 0:
        acc_pages = acc
    else:
        for i in range(lines * blocks_pages * 2):
            store_f32(acc_pages + i * 64, splat(f(0)))
    for line in range(lines):
        put_f32(states + line * 8, MASKED)
        put_f32(states + line * 8 + 4, f(0))
    for i in range(lines * blocks * 2):
        store_f32(acc + i * 64, splat(f(0)))
    walk(
        record, h, position, queries, lines, d_k, d_v, page_k, page_v,
        scalar_i64(ctx + 152) + h * scalar_i64(ctx + 160),
        scalar_i64(ctx + 168) + h * scalar_i64(ctx + 176), scalar_i64(ctx + 184),
        scalar_i64(ctx + 72),
        packed, packed_pages, keys, values, scores, acc, acc_pages, states,
    )  # fmt: skip
    mapped = stack(ROW_BYTES)
    if matrix != 0:
        matrix += h * scalar_i64(ctx + 192)
    for line in range(queries * group):
        j, i = line // queries, line % queries
        at = out + i * scalar_i64(ctx + 88) + j * d_v * 4
        inverse = f(1) / scalar_f32(states + line * 8 + 4)
        if matrix != 0:
            times_matrix(acc_pages + line * blocks_pages * 128, page_v, matrix, d_v, mapped)
            for c in range(d_v):
                to = acc + line * blocks * 128 + c * 4
                put_f32(to, scalar_f32(to) + scalar_f32(mapped + c * 4))
        for c in range(d_v):
            put_f32(at + c * 4, scalar_f32(acc + line * blocks * 128 + c * 4) * inverse)


@device
def pack(q, q_stride, queries, group, lines, d, packed):
    """The block's queries, side by side; the lines that fill up a tile are zero."""
    for line in range(lines):
        j, i = line // queries, line % queries
        for c in range(d):
            value = f(0)
            if j < group:
                value = scalar_f32(q + i * q_stride + j * d * 4 + c * 4)
            put_f32(packed + (line * d + c) * 4, value)


def scratch_bytes(queries: int, group: int, d_k: int, d_v: int, page_k: int, page_v: int) -> int:
    """What `attend_prompt` needs for each worker."""
    lines = (queries * group + TILE - 1) // TILE * TILE
    width, width_pages = (d_v + 31) // 32 * 32, (page_v + 31) // 32 * 32
    floats = lines * (d_k + page_k + 64 + width + width_pages + 2)
    floats += max(d_k, page_k) * 64 + max(width, width_pages) * 64
    return (floats * 4 + 63) // 64 * 64
