"""Attention over layers whose values are the first channels of their keys; see backends/latent.py.

Templates. `read_*` are the key functions of the page's and of the tail's format (plain_numba.py);
`encode` and `write_key` likewise. A page is decoded once into a float32 tile [channels][64], which
scores and sums both read, for all query heads of a task: so values need no second copy.

A task is a block of query heads of some consecutive rows ("lines": line j * queries + i is head j
of query i) over a span of table entries, with a running softmax. In decode the span is a chunk of
eight entries whatever the threads or the batch, as in attention_numba.py; a prompt's rows share a
task, which walks over all entries. A line's numbers depend on no other line.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.attention_numba import MASKED, RECORD, entry_of, mask, sink_slots
from pykv.kernels.cache_numba import check
from pykv.kernels.jit_numba import device
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.prompt_numba import TILE, pack, rescale, tile_scores
from pykv.kernels.simd import splat
from pykv.kernels.simd_channels import channel_sums
from pykv.kernels.simd_memory import (
    load_f32,
    put_f32,
    put_i64,
    scalar_f32,
    scalar_i32,
    scalar_i64,
    stack,
    store_f32,
)
from pykv.kernels.turn_numba import ROW_BYTES, times_matrix, turn_keys

f = np.float32
LIMIT_K = np.float32(1)
EXTRA_BYTES = 4  # of one part's number outside the pages
BLOCK = 1  # channels of a block, where a transform maps each by the same matrix
_stub = device(lambda *args: None)
read_keys_page = read_keys_tail = read_tail = encode = write_key = walk = _stub


@device
def clear(keys, d, tokens):
    """Zeros in the place of a tile's tokens from `tokens` on, which were never written."""
    whole = (tokens + 15) // 16
    for i in range(d):
        at = keys + i * 256
        for t in range(tokens, whole * 16):
            put_f32(at + t * 4, f(0))
        for run in range(whole, 4):
            store_f32(at + run * 64, splat(f(0)))


@device
def mix(p, keys, width, sums, stride):
    """sums[4][width] += p[4][64] . keys[width][64]."""
    for block in range((width + 15) // 16):
        for line in range(TILE):
            at = sums + line * stride + block * 64
            store_f32(at, load_f32(at) + channel_sums(keys + block * 4096, p + line * 256))


def walk_entries(
    records, rows, queries, lines, first, last, d_k, d_v, page_k, page_v, second, extra,
    packed, packed_pages, keys, scores, acc, acc_pages, states,
):  # fmt: skip
    """Run over table entries `first` to `last`; `second` is where a page's second part begins."""
    record = records + scalar_i32(rows) * RECORD
    table, sinks, encoded = scalar_i64(record), scalar_i64(record + 24), scalar_i64(record + 32)
    position = scalar_i64(record + 40)
    final = position + queries - 1
    blocks, blocks_pages = (d_v + 31) // 32, (page_v + 31) // 32
    apart = blocks_pages * 2 if acc_pages != acc else 0
    for e in range(first, last + 1):
        page = scalar_i64(table + e * 8)
        start, count, slots = sinks + (e - 1) * PAGE, PAGE, PAGE
        if e == 0:
            start, count, slots = 0, sinks, sink_slots(sinks)
        query, d, width, n_blocks, sums = packed, d_k, d_v, blocks, acc
        if e == 0 or e > encoded:
            read_keys_tail(page, d_k, slots, keys, 0)
        else:
            read_keys_page(page, page_v, slots, keys, extra)
            turning = keys + page_v * 256
            read_keys_page(page + second, d_k - d_v, slots, turning, extra + EXTRA_BYTES)
            query, d, width, n_blocks, sums = packed_pages, page_k, page_v, blocks_pages, acc_pages
        tokens = min(count, final + 1 - start)
        if tokens < PAGE:
            clear(keys, d, tokens)
        for tile in range(0, lines, TILE):
            tile_scores(query + tile * d * 4, d, keys, scores + tile * 256)
            for line in range(tile, tile + TILE):
                i = line % queries
                row, high = scores + line * 256, position + i + 1
                low = scalar_i64(records + scalar_i32(rows + i * 4) * RECORD + 48)
                if low >= start + count or high <= start:
                    for run in range(4):
                        store_f32(row + run * 64, splat(f(0)))
                else:
                    if low > start or high < start + PAGE or count < PAGE:
                        mask(row, start, count, low, high)
                    rescale(
                        row, acc + line * blocks * 128, blocks * 2,
                        acc_pages + line * blocks_pages * 128, apart, states + line * 8,
                    )  # fmt: skip
            mix(scores + tile * 256, keys, width, sums + tile * n_blocks * 128, n_blocks * 128)


# ctx: records, rows (int32), n_rows, q, q_stride, q for pages, its stride, d_k, d_v, those of
# pages, chunks, heads, heads per block, queries per block, entries per chunk, partial, stats,
# scratch, scratch per worker, whether pages are mapped, address of the parts' extra float32, bytes
# of a page's first part
def attend(ctx, task, worker):
    """One chunk for one block: partial sums, maximum and total, as attention_numba.combine's."""
    d_k, d_v = scalar_i64(ctx + 56), scalar_i64(ctx + 64)
    page_k, page_v = scalar_i64(ctx + 72), scalar_i64(ctx + 80)
    chunks, heads = scalar_i64(ctx + 88), scalar_i64(ctx + 96)
    per_block, at_once, span = (
        scalar_i64(ctx + 104), scalar_i64(ctx + 112), scalar_i64(ctx + 120),
    )  # fmt: skip
    n_blocks = (heads + per_block - 1) // per_block
    c, rest = task % chunks, task // chunks
    head, row = rest % n_blocks * per_block, rest // n_blocks * at_once
    n_heads, queries = min(per_block, heads - head), min(at_once, scalar_i64(ctx + 16) - row)
    lines = (queries * n_heads + TILE - 1) // TILE * TILE
    records, rows = scalar_i64(ctx), scalar_i64(ctx + 8) + row * 4
    number = scalar_i32(rows)
    record = records + number * RECORD
    sinks, final = scalar_i64(record + 24), scalar_i64(record + 40) + queries - 1
    first = max(entry_of(scalar_i64(record + 48), sinks), c * span)
    last = min(entry_of(final, sinks), c * span + span - 1)
    if sinks == 0:
        first = max(first, 1)
    mapped = scalar_i64(ctx + 160) != 0
    width, width_pages = (d_v + 31) // 32 * 32, (page_v + 31) // 32 * 32
    # scratch: the tile, scores, sums, those of pages, softmax states, queries, those for pages
    keys = scalar_i64(ctx + 144) + worker * scalar_i64(ctx + 152)
    scores = keys + (max(d_k, page_k) + 32) * 256
    acc = scores + lines * 256
    acc_pages = acc + lines * width * 4 if mapped else acc
    states = acc_pages + lines * width_pages * 4
    packed = states + lines * 8
    packed_pages = packed + lines * d_k * 4
    for line in range(lines):
        put_f32(states + line * 8, MASKED)
        put_f32(states + line * 8 + 4, f(0))
    if first <= last:
        q = scalar_i64(ctx + 24) + number * scalar_i64(ctx + 32) + head * d_k * 4
        pack(q, scalar_i64(ctx + 32), queries, n_heads, lines, d_k, packed)
        if mapped:
            q = scalar_i64(ctx + 40) + number * scalar_i64(ctx + 48) + head * page_k * 4
            pack(q, scalar_i64(ctx + 48), queries, n_heads, lines, page_k, packed_pages)
        else:
            packed_pages = packed
        for i in range((states - acc) // 64):
            store_f32(acc + i * 64, splat(f(0)))
        walk(
            records, rows, queries, lines, first, last, d_k, d_v, page_k, page_v,
            scalar_i64(ctx + 176), scalar_i64(ctx + 168),
            packed, packed_pages, keys, scores, acc, acc_pages, states,
        )  # fmt: skip
    size = width + width_pages if mapped else width
    for line in range(queries * n_heads):
        j, i = line // queries, line % queries
        place = ((row + i) * heads + head + j) * chunks + c
        put_f32(scalar_i64(ctx + 136) + place * 8, scalar_f32(states + line * 8))
        put_f32(scalar_i64(ctx + 136) + place * 8 + 4, scalar_f32(states + line * 8 + 4))
        if first <= last:
            to = scalar_i64(ctx + 128) + place * size * 4
            for b in range(0, width * 4, 64):
                store_f32(to + b, load_f32(acc + line * width * 4 + b))
            if mapped:
                for b in range(0, width_pages * 4, 64):
                    more = load_f32(acc_pages + line * width_pages * 4 + b)
                    store_f32(to + width * 4 + b, more)


def scratch_bytes(lines: int, d_k: int, d_v: int, page_k: int, page_v: int) -> int:
    """What `attend` needs for each worker."""
    lines = (lines + TILE - 1) // TILE * TILE
    width, width_pages = (d_v + 31) // 32 * 32, (page_v + 31) // 32 * 32
    floats = (max(d_k, page_k) + 32) * 64
    floats += lines * (64 + width + width_pages + 2 + d_k + page_k)
    return (floats * 4 + 63) // 64 * 64 + 64


# ctx: records, rows (int32), n_rows, k, k_stride, d, flags
def write(ctx, task, worker):
    """Store the new tokens' keys in the tail."""
    d, flags = scalar_i64(ctx + 40), scalar_i64(ctx + 48)
    for i in range(scalar_i64(ctx + 16)):
        number = scalar_i32(scalar_i64(ctx + 8) + i * 4)
        record = scalar_i64(ctx) + number * RECORD
        sinks, position = scalar_i64(record + 24), scalar_i64(record + 40)
        e = entry_of(position, sinks)
        slot, slots = (position - sinks) % PAGE, PAGE
        if e == 0:
            slot, slots = position, sink_slots(sinks)
        k = scalar_i64(ctx + 24) + number * scalar_i64(ctx + 32)
        check(k, d, LIMIT_K, flags, position)
        write_key(k, scalar_i64(scalar_i64(record) + e * 8), d, slots, slot)


# ctx: moves (int64 [n][2]: address of the table entry, address of the new page), d_k, d_v, d_v of
# pages, bytes of a page's first part, scratch, scratch per worker, matrix or 0, address of the
# parts' extra float32
def encode_page(ctx, task, worker):
    """Encode one full tail page into the two parts of its new page, and put that in its table."""
    move = scalar_i64(ctx) + task * 16
    entry, page = scalar_i64(move), scalar_i64(move + 8)
    d_k, d_v, r = scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 24)
    matrix, extra = scalar_i64(ctx + 56), scalar_i64(ctx + 64)
    scratch = scalar_i64(ctx + 40) + worker * scalar_i64(ctx + 48)
    read_tail(scalar_i64(entry), d_k, PAGE, scratch, 0)
    latent = scratch
    if matrix != 0:
        latent = scratch + d_k * 256
        turn_keys(scratch, d_v, matrix, r, latent)
    encode(latent, r, page, extra)
    encode(scratch + d_v * 256, d_k - d_v, page + scalar_i64(ctx + 32), extra + EXTRA_BYTES)
    put_i64(entry, page)


def _times_blocks(x, d, matrix, r, out):
    """As `times_matrix`, of a matrix that is the same block again and again; r is d."""
    for at in range(0, d * 4, BLOCK * 4):
        times_matrix(x + at, BLOCK, matrix, BLOCK, out + at)


# ctx: x, d_k, d_v, matrix, d_v of pages, out
def turn(ctx, task, worker):
    """Map one head of one row: its latent by the matrix, the channels that turn as they are."""
    d_k, d_v, r = scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 32)
    rest, mapped = d_k - d_v, stack(ROW_BYTES)
    x = scalar_i64(ctx) + task * d_k * 4
    out = scalar_i64(ctx + 40) + task * (r + rest) * 4
    times_matrix(x, d_v, scalar_i64(ctx + 24), r, mapped)
    for i in range(r):
        put_f32(out + i * 4, scalar_f32(mapped + i * 4))
    for i in range(rest):
        put_f32(out + (r + i) * 4, scalar_f32(x + (d_v + i) * 4))
