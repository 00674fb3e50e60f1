"""Cache pages of codes for the CPU: layout in formats/coded.py, the functions in plain_numba.py.

Templates, put together by `cache_functions`. A format gives its bits, what its codes stand for
(`level`, int32 lanes -> float32 lanes; for 8 bits `load_level`, 16 bytes at an address), which axes
its scales lie along, and
    quantize(x, step, n, codes, code_step, extra) -> scale, minimum
which chooses the codes, a byte each at `codes + i * code_step`, of the n float32 at `x + i * step`.
`extra` is the address of what lies outside the pages: a head's scale, where the axis is "head".

A scale that goes with a token multiplies its score, or its weight before the values are summed; one
that goes with a channel multiplies the query. So each code is multiplied once, by the product.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv.kernels import coded_pages_numba as pages
from pykv.kernels import outliers_numba, position_numba
from pykv.kernels.coded_pages_numba import MOST_WIDTH
from pykv.kernels.jit_numba import bind, device, inlined
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.planes_numba import KEYS, VALUES, code_bytes_keys, code_bytes_values
from pykv.kernels.simd import fma, reduce_add, splat
from pykv.kernels.simd_control import prefetch
from pykv.kernels.simd_group import (
    add_group_times,
    add_groups,
    add_products,
    add_row_products,
    load_group,
    store_group,
    zeros,
)
from pykv.kernels.simd_memory import (
    load_f16,
    load_f32,
    put_f32,
    scalar_f16,
    scalar_f32,
    scalar_i64,
    stack,
    store_f32,
)

f = np.float32
BITS = GROUP = PARAMETERS = 1
STEP = 8  # bytes of a key page, its scales included, over its channels
BY_BLOCK = HAS_OUTLIERS = True
SCALED_BYTES = 8 * 4 * MOST_WIDTH  # a query for each half of a page and each head
LEAST_BYTES = 2 * 4 * MOST_WIDTH  # a vector for each block of 32 and each head
_stub = inlined(lambda *args: None)
key_levels = value_levels = key_values = value_outliers = _stub


# scores: the query times codes, then the scales


def _scores_block(q, q_stride, page, ahead, d, slots, out, out_stride, extra):
    scales, blocks = page + code_bytes_keys(d, BITS), (d + 31) // 32
    sums = stack(64)  # of the query over a block, for each head
    for block in range(blocks):
        a, b, c, e = zeros(GROUP), zeros(GROUP), zeros(GROUP), zeros(GROUP)
        last = min(block * 32 + 32, d)
        for i in range(block * 32, last):
            prefetch(ahead + i * STEP)
            v, w, x, y = key_levels(page, d, i, extra)
            a = add_products(a, q + i * 4, q_stride, v)
            b = add_products(b, q + i * 4, q_stride, w)
            c = add_products(c, q + i * 4, q_stride, x)
            e = add_products(e, q + i * 4, q_stride, y)
        at, start = scales + block * 128, zeros(GROUP)
        if STEP > 64:  # two of 34 cache lines that the loop leaves out
            prefetch(ahead + block * 32 * STEP + 1024)
            prefetch(ahead + block * 32 * STEP + 2112)
        s, t, u, z = start, start, start, start
        if block > 0:
            s, t = load_group(start, out, out_stride), load_group(start, out + 64, out_stride)
            u = load_group(start, out + 128, out_stride)
            z = load_group(start, out + 192, out_stride)
        if PARAMETERS == 2:
            for g in range(GROUP):
                put_f32(sums + g * 4, sum_of(q + g * q_stride + block * 128, last - block * 32))
            m = at + blocks * 128
            s, t = add_products(s, sums, 4, load_f16(m)), add_products(t, sums, 4, load_f16(m + 32))
            u = add_products(u, sums, 4, load_f16(m + 64))
            z = add_products(z, sums, 4, load_f16(m + 96))
        store_group(out, out_stride, add_group_times(s, a, load_f16(at)))
        store_group(out + 64, out_stride, add_group_times(t, b, load_f16(at + 32)))
        store_group(out + 128, out_stride, add_group_times(u, c, load_f16(at + 64)))
        store_group(out + 192, out_stride, add_group_times(z, e, load_f16(at + 96)))


@device
def sum_of(x, n):
    """The sum of n float32, n at most 32."""
    if n == 32:
        return reduce_add(load_f32(x) + load_f32(x + 64))
    total = f(0)
    for i in range(n):
        total += scalar_f32(x + i * 4)
    return total


def _scores_token(q, q_stride, page, ahead, d, slots, out, out_stride, extra):
    scales = page + code_bytes_keys(d, BITS)
    a, b, c, e = zeros(GROUP), zeros(GROUP), zeros(GROUP), zeros(GROUP)
    prefetch(ahead + scales - page)
    prefetch(ahead + scales - page + 64)
    for i in range(d):
        prefetch(ahead + i * 8 * BITS)
        v, w, x, y = key_levels(page, d, i, extra)
        a = add_products(a, q + i * 4, q_stride, v)
        b = add_products(b, q + i * 4, q_stride, w)
        c = add_products(c, q + i * 4, q_stride, x)
        e = add_products(e, q + i * 4, q_stride, y)
    none = zeros(GROUP)
    store_group(out, out_stride, add_group_times(none, a, load_f16(scales)))
    store_group(out + 64, out_stride, add_group_times(none, b, load_f16(scales + 32)))
    store_group(out + 128, out_stride, add_group_times(none, c, load_f16(scales + 64)))
    store_group(out + 192, out_stride, add_group_times(none, e, load_f16(scales + 96)))


def _scores_head(q, q_stride, page, ahead, d, slots, out, out_stride, extra):
    a, b, c, e = zeros(GROUP), zeros(GROUP), zeros(GROUP), zeros(GROUP)
    for i in range(d):
        prefetch(ahead + i * 8 * BITS)
        v, w, x, y = key_levels(page, d, i, extra)
        a = add_products(a, q + i * 4, q_stride, v)
        b = add_products(b, q + i * 4, q_stride, w)
        c = add_products(c, q + i * 4, q_stride, x)
        e = add_products(e, q + i * 4, q_stride, y)
    none, scale = zeros(GROUP), splat(scalar_f32(extra))
    store_group(out, out_stride, add_group_times(none, a, scale))
    store_group(out + 64, out_stride, add_group_times(none, b, scale))
    store_group(out + 128, out_stride, add_group_times(none, c, scale))
    store_group(out + 192, out_stride, add_group_times(none, e, scale))


def _scores_channel(q, q_stride, page, ahead, d, slots, out, out_stride, extra):
    # the query times each half's scales, and its product with the minima
    scaled, scales = stack(SCALED_BYTES), page + code_bytes_keys(d, BITS)
    row, offsets, sums = d * 4, stack(64), stack(256)
    for half in range(2):
        s = scales + half * d * 2
        m, to, whole = s + d * 4, scaled + half * GROUP * row, d // 16 * 16
        totals = zeros(GROUP)
        for i in range(0, whole, 16):
            scale, minimum = load_f16(s + i * 2), load_f16(m + i * 2)
            totals = add_row_products(totals, q + i * 4, q_stride, minimum)
            for g in range(GROUP):
                store_f32(to + g * row + i * 4, load_f32(q + g * q_stride + i * 4) * scale)
        store_group(sums, 64, totals)
        for g in range(GROUP):
            x, offset = q + g * q_stride, reduce_add(load_f32(sums + g * 64))
            for i in range(whole, d):
                v = scalar_f32(x + i * 4)
                put_f32(to + g * row + i * 4, v * scalar_f16(s + i * 2))
                offset += v * scalar_f16(m + i * 2)
            put_f32(offsets + (half * GROUP + g) * 4, offset)
    one, none = splat(f(1)), zeros(GROUP)
    a = add_products(none, offsets, 4, one)
    c = add_products(none, offsets + GROUP * 4, 4, one)
    b, e = a, c
    low, high = scaled, scaled + GROUP * row
    for i in range(d):
        prefetch(ahead + i * STEP)
        v, w, x, y = key_levels(page, d, i, extra)
        a = add_products(a, low + i * 4, row, v)
        b = add_products(b, low + i * 4, row, w)
        c = add_products(c, high + i * 4, row, x)
        e = add_products(e, high + i * 4, row, y)
    store_group(out, out_stride, a)
    store_group(out + 64, out_stride, b)
    store_group(out + 128, out_stride, c)
    store_group(out + 192, out_stride, e)


def _scores_range(q, q_stride, page, ahead, d, slots, out, out_stride, extra):
    a, b, c, e = zeros(GROUP), zeros(GROUP), zeros(GROUP), zeros(GROUP)
    for i in range(d):
        prefetch(ahead + i * 8 * BITS)
        v, w, x, y = key_values(page, d, i, slots, extra)
        a = add_products(a, q + i * 4, q_stride, v)
        b = add_products(b, q + i * 4, q_stride, w)
        c = add_products(c, q + i * 4, q_stride, x)
        e = add_products(e, q + i * 4, q_stride, y)
    store_group(out, out_stride, a)
    store_group(out + 64, out_stride, b)
    store_group(out + 128, out_stride, c)
    store_group(out + 192, out_stride, e)


# values: the weights times the scales, then times the codes


# Pages are taken from end to end, since a run of a kilobyte from each for a block at a time is too
# short for the CPU's own prefetching; the sums of a block go to memory and back for each page.


def _mix_scaled(p, p_stride, entries, count, tokens, slots, d, out, out_stride, extra, after):
    scaled, least, blocks = stack(1024), stack(LEAST_BYTES), (d + 31) // 32
    if PARAMETERS == 2:
        for i in range(blocks * GROUP):
            store_f32(least + i * 64, splat(f(0)))
    for i in range(count):
        page = scalar_i64(entries + i * 8)
        ahead = scalar_i64(entries + (i + 1) * 8) if i + 1 < count else after
        for block in range(blocks):
            at, none = out + block * 128, zeros(GROUP)
            a, b = load_group(none, at, out_stride), load_group(none, at + 64, out_stride)
            c, e = none, none
            of_block = code_bytes_values(d, BITS) + (block * 128 if BY_BLOCK else 0)
            scales = page + of_block
            prefetch(ahead + of_block)
            prefetch(ahead + of_block + 64)
            for j in range(4):
                to, from_ = j * 64, p + i * 256 + j * 64
                scale = load_f16(scales + j * 32)
                for g in range(GROUP):
                    store_f32(scaled + g * 256 + to, load_f32(from_ + g * p_stride) * scale)
                if PARAMETERS == 2:
                    minimum = load_f16(scales + (blocks if BY_BLOCK else 1) * 128 + j * 32)
                    for g in range(GROUP):
                        sums = least + (block * GROUP + g) * 64
                        more = fma(load_f32(from_ + g * p_stride), minimum, load_f32(sums))
                        store_f32(sums, more)
            if PARAMETERS == 2:
                prefetch(ahead + of_block + (blocks if BY_BLOCK else 1) * 128)
                prefetch(ahead + of_block + (blocks if BY_BLOCK else 1) * 128 + 64)
            codes = ahead + block * 256 * BITS
            for t in range(0, PAGE, 4):
                prefetch(codes + t * 4 * BITS)
                if BITS == 8:
                    prefetch(codes + t * 4 * BITS + 64)
                u, v, w, x, y, z, k, m = value_levels(page, d, block, t, extra)
                a = add_products(a, scaled + t * 4, 256, u)
                b = add_products(b, scaled + t * 4, 256, v)
                c = add_products(c, scaled + t * 4 + 4, 256, w)
                e = add_products(e, scaled + t * 4 + 4, 256, x)
                a = add_products(a, scaled + t * 4 + 8, 256, y)
                b = add_products(b, scaled + t * 4 + 8, 256, z)
                c = add_products(c, scaled + t * 4 + 12, 256, k)
                e = add_products(e, scaled + t * 4 + 12, 256, m)
            store_group(at, out_stride, add_groups(a, c))
            store_group(at + 64, out_stride, add_groups(b, e))
    if PARAMETERS == 2:
        for block in range(blocks):
            for g in range(GROUP):
                at, sums = out + block * 128 + g * out_stride, least + (block * GROUP + g) * 64
                total = splat(reduce_add(load_f32(sums)))
                store_f32(at, load_f32(at) + total)
                store_f32(at + 64, load_f32(at + 64) + total)
    if HAS_OUTLIERS:
        for i in range(count):
            value_outliers(p + i * 256, p_stride, scalar_i64(entries + i * 8), d, out, out_stride,
                           GROUP, extra)  # fmt: skip


def _mix_head(p, p_stride, entries, count, tokens, slots, d, out, out_stride, extra, after):
    scale = splat(scalar_f32(extra))
    for i in range(count):
        page = scalar_i64(entries + i * 8)
        ahead = scalar_i64(entries + (i + 1) * 8) if i + 1 < count else after
        from_ = p + i * 256
        for block in range((d + 31) // 32):
            at, none, codes = out + block * 128, zeros(GROUP), ahead + block * 256 * BITS
            a, b, c, e = none, none, none, none
            for t in range(0, PAGE, 4):
                prefetch(codes + t * 32)
                prefetch(codes + t * 32 + 64)
                u, v, w, x, y, z, k, m = value_levels(page, d, block, t, extra)
                a = add_products(a, from_ + t * 4, p_stride, u)
                b = add_products(b, from_ + t * 4, p_stride, v)
                c = add_products(c, from_ + t * 4 + 4, p_stride, w)
                e = add_products(e, from_ + t * 4 + 4, p_stride, x)
                a = add_products(a, from_ + t * 4 + 8, p_stride, y)
                b = add_products(b, from_ + t * 4 + 8, p_stride, z)
                c = add_products(c, from_ + t * 4 + 12, p_stride, k)
                e = add_products(e, from_ + t * 4 + 12, p_stride, m)
            before = load_group(none, at, out_stride)
            store_group(at, out_stride, add_group_times(before, add_groups(a, c), scale))
            before = load_group(none, at + 64, out_stride)
            store_group(at + 64, out_stride, add_group_times(before, add_groups(b, e), scale))


AXES = {"block": 0, "channel": 1, "token": 2, "head": 3, "range": 4}
_SCORES = (_scores_block, _scores_channel, _scores_token, _scores_head, _scores_range)


def cache_functions(
    name: str,
    bits: int,
    quantize: Any,
    level: Any,
    key_axis: str = "block",
    value_axis: str = "block",
    parameters: int = 1,
    quantize_value: Any = None,
    outliers: bool = False,
) -> tuple[Any, ...]:
    """encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read of a format.

    Those of GROUP query heads, `scores`, `mix` and `scores_read`, still lack it.

    `level` is `load_level` for codes of eight bits; `quantize_value` chooses the codes of values
    where keys are encoded in another way.
    """

    def make(template: Any, **more: Any) -> Any:
        return bind(template, f"{name}{template.__name__}", **more)

    keys, values = AXES[key_axis], AXES[value_axis]
    names: dict[str, Any] = {
        "BITS": bits,
        "STEP": 8 * bits + (4 * parameters if key_axis in ("block", "channel") else 0),
        "PARAMETERS": parameters,
        "KEY_AXIS": keys,
        "VALUE_AXIS": values,
        "BY_BLOCK": value_axis == "block",
        "HAS_OUTLIERS": outliers,
        "quantize": quantize,
    }
    own = {"level": level, "load_level": level}
    names["key_levels"] = inlined(make(KEYS[bits], **own))
    names["value_levels"] = inlined(make(VALUES[bits], **own))
    names["key_values"] = inlined(make(pages._key_values, **names))
    if outliers:
        names["take_key_outliers"] = outliers_numba.take_key_outliers
        names["take_value_outliers"] = outliers_numba.take_value_outliers
        names["key_outliers"] = device(make(outliers_numba._key_outliers, **names))
        names["value_outliers"] = device(make(outliers_numba._value_outliers, **names))
    mix = _mix_head if value_axis == "head" else _mix_scaled
    of_values = {**names, "quantize": quantize_value or quantize}
    return (
        device(make(pages._encode_keys, **names)),
        device(make(pages._encode_values, **of_values)),
        make(_SCORES[keys], **names),
        make(mix, **names),
        device(make(pages._read_keys, **names)),
        device(make(pages._read_values, **names)),
        make(position_numba._scores_read, **names),
    )
