"""What policies ask for: how much attention tokens got, queries, and pages made of other pages.

`column_sums` reads the chunks that attention_numba.py left in scratch of each task's own. `gather`
is a template: `read` and `encode` are those of one side's formats of old and new pages, KEYS says
which side, and SEAL whether old pages are of the tail and new ones are mapped by `turn_page`.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.attention_numba import CHUNK, MASKED, RECORD, entry_of
from pykv.kernels.jit_numba import device
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.simd import splat
from pykv.kernels.simd_memory import (
    load_f32,
    put_f32,
    scalar_f32,
    scalar_i32,
    scalar_i64,
    store_f32,
)

f = np.float32
ROW = PAGE * 4  # bytes of a page's scores
KEYS = SEAL = False
_stub = device(lambda *args: None)
read = encode = turn_page = _stub


@device
def share(stats, chunks, c):
    """By what a chunk's exponentials are multiplied to be probabilities."""
    m, total = MASKED, f(0)
    for i in range(chunks):
        m = max(m, scalar_f32(stats + i * 8))
    for i in range(chunks):
        total += scalar_f32(stats + i * 8 + 4) * np.exp(scalar_f32(stats + i * 8) - m)
    return np.exp(scalar_f32(stats + c * 8) - m) / total


# ctx: records, rows (int32), KV heads, group, first head of the launch's tiles, tiles per KV head,
# heads of a tile, chunks, scratch, its bytes per task, stats, whether to add to what is there, and
# f32 [rows, query heads, capacity, 64] for each head's own, or 0: the sums go where records say
def column_sums(ctx, task, worker):
    """Attention of one row to one chunk's tokens, for a KV head's query heads of one launch."""
    n_kv, group, first_head = scalar_i64(ctx + 16), scalar_i64(ctx + 24), scalar_i64(ctx + 32)
    tiles, heads, chunks = scalar_i64(ctx + 40), scalar_i64(ctx + 48), scalar_i64(ctx + 56)
    c, rest = task % chunks, task // chunks
    h, i = rest % n_kv, rest // n_kv
    record = scalar_i64(ctx) + scalar_i32(scalar_i64(ctx + 8) + i * 4) * RECORD
    capacity, sinks, last = (
        scalar_i64(record + 16),
        scalar_i64(record + 24),
        scalar_i64(record + 40),
    )
    if scalar_i64(record + 64) != 0:
        last = scalar_i64(scalar_i64(record + 64) + h * 16)
    first = c * CHUNK if c > 0 or sinks > 0 else 1
    count = min(entry_of(last, sinks), c * CHUNK + CHUNK - 1) + 1 - first
    own = scalar_i64(ctx + 96)
    out = scalar_i64(record + 80) + (h * capacity + first) * ROW
    add = scalar_i64(ctx + 88) != 0
    for tile in range(tiles):
        place = ((i * n_kv + h) * tiles + tile) * chunks + c
        scratch = scalar_i64(ctx + 64) + place * scalar_i64(ctx + 72)
        for g in range(heads):
            head = (i * n_kv + h) * group + first_head + tile * heads + g
            weight = splat(share(scalar_i64(ctx + 80) + head * chunks * 8, chunks, c))
            if own != 0:
                out, add = own + (head * capacity + first) * ROW, False
            for at in range(0, count * ROW, 64):
                value = weight * load_f32(scratch + g * CHUNK * ROW + at)
                if add:
                    value = value + load_f32(out + at)
                store_f32(out + at, value)
            add = True


# ctx: records, rows (int32), q, its stride, floats of a row
def keep_query(ctx, task, worker):
    """Copy a row's queries to where its record says."""
    number = scalar_i32(scalar_i64(ctx + 8) + task * 4)
    to = scalar_i64(scalar_i64(ctx) + number * RECORD + 88)
    if to != 0:
        x = scalar_i64(ctx + 16) + number * scalar_i64(ctx + 24)
        for i in range(scalar_i64(ctx + 32)):
            put_f32(to + i * 4, scalar_f32(x + i * 4))


@device
def pick(source, to, slots, number, d, keys):
    """Copy the slots that are taken from a source, f32 of one page to another."""
    for t in range(PAGE):
        slot = scalar_i32(slots + t * 4)
        if slot // PAGE == number and slot >= 0:
            slot -= number * PAGE
            if keys:
                for i in range(d):
                    put_f32(to + i * ROW + t * 4, scalar_f32(source + i * ROW + slot * 4))
            else:
                for block in range((d + 31) // 32):
                    x, y = source + (block * PAGE + slot) * 128, to + (block * PAGE + t) * 128
                    store_f32(y, load_f32(x))
                    store_f32(y + 64, load_f32(x + 64))


# ctx: pages, heads, sources (all int64), sources of a page, picks (int32), d of old pages, scratch,
# scratch per worker, matrices or 0, d of new pages, the distance of matrices, and of the formats'
# extra float32 address and bytes per KV head, for old and for new pages
def gather(ctx, task, worker):
    """Make one page of tokens of others; see base.Move."""
    h, many = scalar_i64(scalar_i64(ctx + 8) + task * 8), scalar_i64(ctx + 24)
    d, r, matrix = scalar_i64(ctx + 40), scalar_i64(ctx + 72), scalar_i64(ctx + 64)
    size = (max(d, r) + 31) // 32 * 32 * ROW
    source = scalar_i64(ctx + 48) + worker * scalar_i64(ctx + 56)
    new = source + size
    for at in range(0, size, 64):
        store_f32(new + at, splat(f(0)))
    slots = scalar_i64(ctx + 32) + task * ROW
    for number in range(many):
        page = scalar_i64(scalar_i64(ctx + 16) + (task * many + number) * 8)
        if page != 0:
            read(page, d, PAGE, source, scalar_i64(ctx + 88) + h * scalar_i64(ctx + 96))
            pick(source, new, slots, number, d, KEYS)
    if SEAL and matrix != 0:
        turn_page(new, d, matrix + h * scalar_i64(ctx + 80), r, source)
        new = source
    extra = scalar_i64(ctx + 104) + h * scalar_i64(ctx + 112)
    encode(new, r, scalar_i64(scalar_i64(ctx) + task * 8), extra)
