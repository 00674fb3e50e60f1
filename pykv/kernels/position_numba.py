"""Keys that are stored before RoPE, and turned where they are read.

A page's tokens have consecutive positions: the query is turned back by the first one's angles, once
for the page, and token j's key by j positions, whose cosines and sines serve all pages. `turns` is
the address of int64: 0 cosines and 1 sines of the offsets, f32 [pairs][64]; 2 and 3 those of each
table entry's first position, f32 [entries][pairs]; 4 pairs, 5 the distance between the channels of
a pair, 6 that between pairs.  A magnitude that RoPE multiplies by is in the offsets' numbers.
"""

from __future__ import annotations

from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.simd_control import prefetch
from pykv.kernels.simd_group import add_products, store_group, zeros
from pykv.kernels.simd_memory import load_f32, put_f32, scalar_f32, scalar_i64, store_f32

GROUP = 1
HAS_OUTLIERS = False
_stub = inlined(lambda *args: None)
key_values = key_outliers = _stub


def _scores_read(q, q_stride, page, ahead, d, slots, out, out_stride, extra, turns):
    """Scores of keys before RoPE; q is turned back by the page's first position."""
    cosines, sines = scalar_i64(turns), scalar_i64(turns + 8)
    pairs, other, step = scalar_i64(turns + 32), scalar_i64(turns + 40), scalar_i64(turns + 48)
    a, b, c, e = zeros(GROUP), zeros(GROUP), zeros(GROUP), zeros(GROUP)
    for p in range(pairs):
        i = p * step
        j = i + other
        prefetch(ahead + p * 128)
        prefetch(ahead + p * 128 + 64)
        v, w, x, y = key_values(page, d, i, slots, extra)
        r, s, t, u = key_values(page, d, j, slots, extra)
        k, h = load_f32(cosines + p * 256), load_f32(sines + p * 256)
        a = add_products(a, q + i * 4, q_stride, v * k - r * h)
        a = add_products(a, q + j * 4, q_stride, v * h + r * k)
        k, h = load_f32(cosines + p * 256 + 64), load_f32(sines + p * 256 + 64)
        b = add_products(b, q + i * 4, q_stride, w * k - s * h)
        b = add_products(b, q + j * 4, q_stride, w * h + s * k)
        k, h = load_f32(cosines + p * 256 + 128), load_f32(sines + p * 256 + 128)
        c = add_products(c, q + i * 4, q_stride, x * k - t * h)
        c = add_products(c, q + j * 4, q_stride, x * h + t * k)
        k, h = load_f32(cosines + p * 256 + 192), load_f32(sines + p * 256 + 192)
        e = add_products(e, q + i * 4, q_stride, y * k - u * h)
        e = add_products(e, q + j * 4, q_stride, y * h + u * k)
    for i in range(2 * pairs, d):
        v, w, x, y = key_values(page, d, i, slots, extra)
        a = add_products(a, q + i * 4, q_stride, v)
        b = add_products(b, q + i * 4, q_stride, w)
        c = add_products(c, q + i * 4, q_stride, x)
        e = add_products(e, q + i * 4, q_stride, y)
    store_group(out, out_stride, a)
    store_group(out + 64, out_stride, b)
    store_group(out + 128, out_stride, c)
    store_group(out + 192, out_stride, e)
    if HAS_OUTLIERS:
        key_outliers(q, q_stride, page, d, out, out_stride, GROUP, extra, turns)


@device
def turn_back(q, d, heads, turns, entry, out):
    """Queries of some heads, f32 [heads][d], turned back by a table entry's first position."""
    pairs, other, step = scalar_i64(turns + 32), scalar_i64(turns + 40), scalar_i64(turns + 48)
    cosines = scalar_i64(turns + 16) + entry * pairs * 4
    sines = scalar_i64(turns + 24) + entry * pairs * 4
    for g in range(heads):
        x, y = q + g * d * 4, out + g * d * 4
        for p in range(pairs):
            i, j = p * step * 4, (p * step + other) * 4
            a, b = scalar_f32(x + i), scalar_f32(x + j)
            k, h = scalar_f32(cosines + p * 4), scalar_f32(sines + p * 4)
            put_f32(y + i, a * k + b * h)
            put_f32(y + j, b * k - a * h)
        for i in range(2 * pairs, d):
            put_f32(y + i * 4, scalar_f32(x + i * 4))


@device
def turn_page(keys, turns, entry):
    """Keys f32 [d][64] of a table entry, turned by their positions in place."""
    pairs, other, step = scalar_i64(turns + 32), scalar_i64(turns + 40), scalar_i64(turns + 48)
    first_cosines = scalar_i64(turns + 16) + entry * pairs * 4
    first_sines = scalar_i64(turns + 24) + entry * pairs * 4
    cosines, sines = scalar_i64(turns), scalar_i64(turns + 8)
    for p in range(pairs):
        i, j = keys + p * step * 256, keys + (p * step + other) * 256
        k, h = scalar_f32(first_cosines + p * 4), scalar_f32(first_sines + p * 4)
        for run in range(0, 256, 64):
            m, n = load_f32(cosines + p * 256 + run), load_f32(sines + p * 256 + run)
            cosine, sine = m * k - n * h, n * k + m * h
            a, b = load_f32(i + run), load_f32(j + run)
            store_f32(i + run, a * cosine - b * sine)
            store_f32(j + run, a * sine + b * cosine)
