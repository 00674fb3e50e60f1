"""Keys and values on their way into the pages: the tail's new tokens, and full tails encoded.

Templates. `write_*` are the tail types' functions and LIMIT_* their largest values; `read_*_tail`,
`encode_*` are those of one side's tail and page formats, `turn_page` maps one side's pages. Records
are those of attention_numba.py.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.attention_numba import RECORD, entry_of, sink_slots
from pykv.kernels.jit_numba import device
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.simd_control import (
    fetch_add,
)
from pykv.kernels.simd_memory import (
    put_f32,
    put_i64,
    scalar_f32,
    scalar_i32,
    scalar_i64,
)

f = np.float32
LIMIT_K = LIMIT_V = np.float32(1)
INFINITE = np.float32(3.4028234663852886e38)
_stub = device(lambda *args: None)
write_key = write_value = read_tail = encode = turn_page = _stub


@device
def check(x, d, limit, flags, position):
    """Clamp finite values to the tail's range, counting them; note the first that is not finite."""
    clamped = 0
    for i in range(d):
        value = scalar_f32(x + i * 4)
        # written so that a NaN takes the branch
        if not (-INFINITE <= value <= INFINITE):
            if fetch_add(flags, 1) == 0:
                put_i64(flags + 8, position)
            put_f32(x + i * 4, f(0))
        elif value > limit or value < -limit:
            put_f32(x + i * 4, limit if value > 0 else -limit)
            clamped += 1
    if clamped > 0:
        fetch_add(flags + 16, clamped)


# ctx: records, rows (int32), n_rows, k, k_stride, v, v_stride, d_k, d_v, n_kv, flags
def write(ctx, task, worker):
    """Store the keys and values of one KV head's new tokens in the tail."""
    n_rows, d_k, d_v = scalar_i64(ctx + 16), scalar_i64(ctx + 56), scalar_i64(ctx + 64)
    h, flags = task, scalar_i64(ctx + 80)
    for i in range(n_rows):
        number = scalar_i32(scalar_i64(ctx + 8) + i * 4)
        record = scalar_i64(ctx) + number * RECORD
        sinks, position = scalar_i64(record + 24), scalar_i64(record + 40)
        shown, kept = position, scalar_i64(record + 64)
        if kept != 0:
            position, shown = scalar_i64(kept + h * 16), scalar_i64(record + 56)
        e = entry_of(position, sinks)
        at = (h * scalar_i64(record + 16) + e) * 8
        slot, slots = (position - sinks) % PAGE, PAGE
        if e == 0:
            slot, slots = position, sink_slots(sinks)
        k = scalar_i64(ctx + 24) + number * scalar_i64(ctx + 32) + h * d_k * 4
        v = scalar_i64(ctx + 40) + number * scalar_i64(ctx + 48) + h * d_v * 4
        check(k, d_k, LIMIT_K, flags, shown)
        check(v, d_v, LIMIT_V, flags, shown)
        write_key(k, scalar_i64(scalar_i64(record) + at), d_k, slots, slot)
        write_value(v, scalar_i64(scalar_i64(record + 8) + at), d_v, slots, slot)


# ctx: moves (int64 [n][2]: address of the table entry, address of the new page; KV heads in turn),
# d, scratch, scratch per worker, matrices or 0, d of the new page, KV heads, of the format's extra
# float32 address and bytes per KV head, and the distance of matrices
def encode_page(ctx, task, worker):
    """Encode one full tail page into its new page, and put that in its table."""
    move = scalar_i64(ctx) + task * 16
    entry, page = scalar_i64(move), scalar_i64(move + 8)
    d, matrix, r = scalar_i64(ctx + 8), scalar_i64(ctx + 32), scalar_i64(ctx + 40)
    extra = scalar_i64(ctx + 56) + task % scalar_i64(ctx + 48) * scalar_i64(ctx + 64)
    scratch = scalar_i64(ctx + 16) + worker * scalar_i64(ctx + 24)
    read_tail(scalar_i64(entry), d, PAGE, scratch, 0)
    if matrix != 0:
        matrix += task % scalar_i64(ctx + 48) * scalar_i64(ctx + 72)
        mapped = scratch + (d + 31) // 32 * 32 * PAGE * 4
        turn_page(scratch, d, matrix, r, mapped)
        scratch = mapped
    encode(scratch, r, page, extra)
    put_i64(entry, page)
