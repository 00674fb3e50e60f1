"""Outliers of a page of codes: what they change beside the codes' own products.

Templates, bound by `cache_functions`. Each outlier stands in the place of a decoded value, so that
their difference is added.  The layout is that of formats/coded.py.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.coded_pages_numba import ENDS_AT, MOST, RANGES_AT, UNUSED, outliers_of
from pykv.kernels.jit_numba import device
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.planes_numba import code_bytes_keys, code_bytes_values
from pykv.kernels.simd_memory import (
    put_f16,
    put_f32,
    put_i64,
    put_u8,
    scalar_f16,
    scalar_f32,
    scalar_i64,
    scalar_u8,
    scalar_u16,
    stack,
)

f, INFINITY = np.float32, np.float32(np.inf)
# room for a quarter of the values of a page of the widest head that has outliers
PLACE_BYTES, DISTANCE_BYTES, LIMIT_BYTES = 131072, 65536, 65536
BITS = 4


@device
def bits_at(planes, place, width):
    """The bits of one code in a set of that width."""
    run, lane, per_unit = place // 16, place % 16, 8 // width
    byte = scalar_u8(planes + run // per_unit * 16 + lane)
    return byte >> (run % per_unit * width) & ((1 << width) - 1)


@device
def code_at(page, place, bits, set_bytes):
    """One code of a page, whose first set has `set_bytes` bytes."""
    if bits == 3:
        return bits_at(page, place, 2) | bits_at(page + set_bytes, place, 1) << 2
    return bits_at(page, place, bits)


def _key_outliers(q, q_stride, page, d, out, out_stride, heads, extra, turns):
    """Add to the scores of a page of keys before RoPE."""
    at, n = page + code_bytes_keys(d, BITS), outliers_of(extra)
    cosines, sines = scalar_i64(turns), scalar_i64(turns + 8)
    pairs, other, step = scalar_i64(turns + 32), scalar_i64(turns + 40), scalar_i64(turns + 48)
    for k in range(n):
        place = scalar_u16(at + k * 2)
        if place == UNUSED:
            continue
        i, t = place // PAGE, place % PAGE
        level = scalar_f32(extra + code_at(page, place, BITS, d * 16) * 4)
        scale = scalar_f32(extra + RANGES_AT + i * 4)
        centre = scalar_f32(extra + RANGES_AT + (d + i) * 4)
        more = scalar_f16(at + (n + k) * 2) - (level * scale + centre)
        if i >= 2 * pairs:
            for g in range(heads):
                to = out + g * out_stride + t * 4
                put_f32(to, scalar_f32(to) + scalar_f32(q + g * q_stride + i * 4) * more)
            continue
        # the pair of this channel, and whether it is the second of it
        second = i // other % 2 if step == 1 else i % 2
        first = i - second * other
        p = first // step
        c, s = scalar_f32(cosines + (p * 64 + t) * 4), scalar_f32(sines + (p * 64 + t) * 4)
        for g in range(heads):
            x = q + g * q_stride + first * 4
            a, b = scalar_f32(x), scalar_f32(x + other * 4)
            turned = b * c - a * s if second == 1 else a * c + b * s
            to = out + g * out_stride + t * 4
            put_f32(to, scalar_f32(to) + turned * more)


def _value_outliers(p, p_stride, page, d, out, out_stride, heads, extra):
    """Add to the sums of a page of values."""
    scales = page + code_bytes_values(d, BITS)
    at, n = scales + 4 * PAGE, outliers_of(extra)
    for k in range(n):
        place = scalar_u16(at + k * 2)
        if place == UNUSED:
            continue
        block, rest = place // (PAGE * 32), place % (PAGE * 32)
        t, i = rest // 32, block * 32 + rest % 32
        level = scalar_f32(extra + code_at(page, place, BITS, (d + 31) // 32 * 512) * 4)
        decoded = level * scalar_f16(scales + t * 2) + scalar_f16(scales + (PAGE + t) * 2)
        more = scalar_f16(at + (n + k) * 2) - decoded
        for g in range(heads):
            to = out + g * out_stride + i * 4
            put_f32(to, scalar_f32(to) + scalar_f32(p + g * p_stride + t * 4) * more)


@device
def insert(distance, place, places, distances, count, n):
    """Keep the n farthest, sorted, of equally far ones the earlier; returns how many there are."""
    if count == n and distance <= scalar_f32(distances + (n - 1) * 4):
        return count
    k = min(count, n - 1)
    while k > 0 and scalar_f32(distances + (k - 1) * 4) < distance:
        put_f32(distances + k * 4, scalar_f32(distances + (k - 1) * 4))
        put_i64(places + k * 8, scalar_i64(places + (k - 1) * 8))
        k -= 1
    put_f32(distances + k * 4, distance)
    put_i64(places + k * 8, place)
    return min(count + 1, n)


@device
def put_outliers(x, places, count, n, slots):
    """Write the slots of a page, by rising place."""
    for i in range(1, count):  # sorted by insertion: they are few
        place, k = scalar_i64(places + i * 8), i
        while k > 0 and scalar_i64(places + (k - 1) * 8) > place:
            put_i64(places + k * 8, scalar_i64(places + (k - 1) * 8))
            k -= 1
        put_i64(places + k * 8, place)
    for i in range(n):
        place, value = UNUSED, f(0)
        if i < count:
            place = scalar_i64(places + i * 8)
            value = min(max(scalar_f32(x + place * 4), -MOST), MOST)
        put_u8(slots + i * 2, place)
        put_u8(slots + i * 2 + 1, place >> 8)
        put_f16(slots + (n + i) * 2, value)


@device
def take_key_outliers(x, d, slots, extra):
    """The keys [d][64] farthest beyond their channels' ranges."""
    n = outliers_of(extra)
    if n == 0:
        return
    places, distances, count = stack(PLACE_BYTES), stack(DISTANCE_BYTES), 0
    for i in range(d):
        scale = scalar_f32(extra + RANGES_AT + i * 4)
        centre = scalar_f32(extra + RANGES_AT + (d + i) * 4)
        for t in range(PAGE):
            place = i * PAGE + t
            distance = abs(scalar_f32(x + place * 4) - centre) - scale
            if distance > 0:
                count = insert(distance, place, places, distances, count, n)
    put_outliers(x, places, count, n, slots)


@device
def ends(x, d, block_step, n, out):
    """The n + 1 least and largest of a token's d values: `out` is f32 [2][n + 1], rising."""
    for end in range(2):
        row, count = out + end * (n + 1) * 4, 0
        for i in range(d):
            v = scalar_f32(x + i // 32 * block_step + i % 32 * 4)
            v = v if end == 0 else -v
            if count == n + 1 and v >= scalar_f32(row + n * 4):
                continue
            k = min(count, n)
            while k > 0 and scalar_f32(row + (k - 1) * 4) > v:
                put_f32(row + k * 4, scalar_f32(row + (k - 1) * 4))
                k -= 1
            put_f32(row + k * 4, v)
            count = min(count + 1, n + 1)


@device
def take_value_outliers(x, d, slots, extra):
    """The values [blocks][64][32] farthest beyond the rest of their tokens; those are limited."""
    n, n_ends = outliers_of(extra), int(scalar_f32(extra + ENDS_AT))
    if n == 0:
        return
    places, distances, count = stack(PLACE_BYTES), stack(DISTANCE_BYTES), 0
    limits = stack(LIMIT_BYTES)
    row = 2 * (n_ends + 1) * 4
    for t in range(PAGE):
        ends(x + t * 128, d, PAGE * 128, n_ends, limits + t * row)
    for block in range((d + 31) // 32):
        for t in range(PAGE):
            low = scalar_f32(limits + t * row + n_ends * 4)
            high = -scalar_f32(limits + t * row + (2 * n_ends + 1) * 4)
            for i in range(min(32, d - block * 32)):
                place = (block * PAGE + t) * 32 + i
                v = scalar_f32(x + place * 4)
                distance = max(v - high, low - v)
                if distance > 0:
                    count = insert(distance, place, places, distances, count, n)
    put_outliers(x, places, count, n, slots)
    for k in range(count):  # marked: what is left of their tokens limits them
        place = scalar_i64(places + k * 8)
        at, t = x + place * 4, place // 32 % PAGE
        high = -scalar_f32(limits + t * row + (2 * n_ends + 1) * 4)
        put_f32(at, INFINITY if scalar_f32(at) > high else -INFINITY)
    for t in range(PAGE):
        low, high, marked = INFINITY, -INFINITY, False
        for i in range(d):
            v = scalar_f32(x + t * 128 + i // 32 * PAGE * 128 + i % 32 * 4)
            if abs(v) < INFINITY:
                low, high = min(low, v), max(high, v)
            else:
                marked = True
        if marked:
            for i in range(d):
                at = x + t * 128 + i // 32 * PAGE * 128 + i % 32 * 4
                put_f32(at, max(min(scalar_f32(at), high), low))
