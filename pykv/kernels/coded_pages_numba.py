"""Cache pages of codes: encoding them, and reading them as float32; see coded_numba.py.

Templates, bound by `cache_functions` there. Axes are 0 block, 1 channel, 2 token, 3 head, 4 range:
a scale and a centre per channel that lie outside the page.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.planes_numba import code_bytes_keys, code_bytes_values, pack
from pykv.kernels.simd import splat
from pykv.kernels.simd_memory import (
    load_f16,
    load_f32,
    put_f16,
    put_f32,
    put_i64,
    put_u8,
    scalar_f16,
    scalar_f32,
    scalar_u8,
    scalar_u16,
    stack,
    store_f32,
)

MOST = np.float32(65504)
MOST_WIDTH = 640  # channels of the widest head
CODE_BYTES, ROW_BYTES = MOST_WIDTH * PAGE, MOST_WIDTH * 4
# a format with levels of its own keeps in `extra`: 16 levels, the numbers of outliers of a page and
# of values at each end of a token that may be one, and for keys a scale and a centre per channel
OUTLIERS_AT, ENDS_AT, RANGES_AT, UNUSED = 64, 68, 128, 0xFFFF
BITS = PARAMETERS = KEY_AXIS = VALUE_AXIS = 1
BY_BLOCK = HAS_OUTLIERS = True
_stub = inlined(lambda *args: None)
key_levels = value_levels = key_values = quantize = _stub
take_key_outliers = take_value_outliers = _stub


# pages as float32, for prompts


def _key_values(page, d, i, slots, extra):
    """The 64 keys of channel i, as four vectors."""
    scales, blocks = page + code_bytes_keys(d, BITS), (d + 31) // 32
    v, w, x, y = key_levels(page, d, i, extra)
    if KEY_AXIS == 0:  # block
        s = scales + i // 32 * 128
        v, w = v * load_f16(s), w * load_f16(s + 32)
        x, y = x * load_f16(s + 64), y * load_f16(s + 96)
        if PARAMETERS == 2:
            m = s + blocks * 128
            v, w = v + load_f16(m), w + load_f16(m + 32)
            x, y = x + load_f16(m + 64), y + load_f16(m + 96)
    elif KEY_AXIS == 1:  # channel
        s, m = scales + i * 2, scales + (2 * d + i) * 2
        first, second = splat(scalar_f16(s)), splat(scalar_f16(s + d * 2))
        low, high = splat(scalar_f16(m)), splat(scalar_f16(m + d * 2))
        v, w, x, y = v * first + low, w * first + low, x * second + high, y * second + high
    elif KEY_AXIS == 2:  # token
        v, w = v * load_f16(scales), w * load_f16(scales + 32)
        x, y = x * load_f16(scales + 64), y * load_f16(scales + 96)
    elif KEY_AXIS == 3:  # head
        s = splat(scalar_f32(extra))
        v, w, x, y = v * s, w * s, x * s, y * s
    else:  # range
        s = splat(scalar_f32(extra + RANGES_AT + i * 4))
        m = splat(scalar_f32(extra + RANGES_AT + (d + i) * 4))
        v, w, x, y = v * s + m, w * s + m, x * s + m, y * s + m
    return v, w, x, y


def _read_keys(page, d, slots, out, extra):
    for i in range(d):
        v, w, x, y = key_values(page, d, i, slots, extra)
        at = out + i * 256
        store_f32(at, v)
        store_f32(at + 64, w)
        store_f32(at + 128, x)
        store_f32(at + 192, y)
    if HAS_OUTLIERS:
        at, n = page + code_bytes_keys(d, BITS), outliers_of(extra)
        for k in range(n):
            place = scalar_u16(at + k * 2)
            if place != UNUSED:
                put_f32(out + place * 4, scalar_f16(at + (n + k) * 2))


@device
def outliers_of(extra):
    """Entries for outliers in each page."""
    return int(scalar_f32(extra + OUTLIERS_AT))


def _read_values(page, d, slots, out, extra):
    blocks, scales = (d + 31) // 32, page + code_bytes_values(d, BITS)
    for block in range(blocks):
        for t in range(0, PAGE, 4):
            u, v, w, x, y, z, k, m = value_levels(page, d, block, t, extra)
            at = out + (block * PAGE + t) * 128
            store_f32(at, u)
            store_f32(at + 64, v)
            store_f32(at + 128, w)
            store_f32(at + 192, x)
            store_f32(at + 256, y)
            store_f32(at + 320, z)
            store_f32(at + 384, k)
            store_f32(at + 448, m)
        for t in range(PAGE):
            at = out + (block * PAGE + t) * 128
            if VALUE_AXIS == 3:
                s = splat(scalar_f32(extra))
            else:
                s = splat(scalar_f16(scales + ((block if BY_BLOCK else 0) * PAGE + t) * 2))
            low, high = load_f32(at) * s, load_f32(at + 64) * s
            if PARAMETERS == 2:
                first = blocks + block if BY_BLOCK else 1
                m = splat(scalar_f16(scales + (first * PAGE + t) * 2))
                low, high = low + m, high + m
            store_f32(at, low)
            store_f32(at + 64, high)
    if HAS_OUTLIERS:
        at, n = scales + 4 * PAGE, outliers_of(extra)
        for k in range(n):
            place = scalar_u16(at + k * 2)
            if place != UNUSED:
                put_f32(out + place * 4, scalar_f16(at + (n + k) * 2))


# encoders


@device
def put_parameters(at, distance, parameters, scale, minimum):
    """A group's scale, and its minimum `distance` bytes on; clamped to what f16 holds."""
    put_f16(at, min(max(scale, -MOST), MOST))
    if parameters == 2:
        put_f16(at + distance, min(max(minimum, -MOST), MOST))


def _encode_keys(x, d, page, extra):
    codes, blocks = stack(CODE_BYTES), (d + 31) // 32
    scales = page + code_bytes_keys(d, BITS)
    if HAS_OUTLIERS:
        take_key_outliers(x, d, scales, extra)
    if KEY_AXIS == 1:
        for half in range(2):
            for i in range(d):
                at = i * PAGE + half * 32
                s, m = quantize(x + at * 4, 4, 32, codes + at, 1, extra)
                put_parameters(scales + (half * d + i) * 2, d * 4, PARAMETERS, s, m)
    else:
        width = 32 if KEY_AXIS == 0 else d
        for block in range((d + width - 1) // width):
            n = min(width, d - block * width)
            for t in range(PAGE):
                at = block * width * PAGE + t
                s, m = quantize(x + at * 4, PAGE * 4, n, codes + at, PAGE, extra)
                if KEY_AXIS < 3:
                    put_parameters(scales + (block * PAGE + t) * 2, blocks * 128, PARAMETERS, s, m)
    pack(codes, d * 4, BITS, page)


def _encode_values(x, d, page, extra):
    codes, row, blocks = stack(CODE_BYTES), stack(ROW_BYTES), (d + 31) // 32
    bytes_, scales = stack(MOST_WIDTH), page + code_bytes_values(d, BITS)
    for i in range(blocks * PAGE * 4):
        put_i64(codes + i * 8, 0)
    if HAS_OUTLIERS:
        take_value_outliers(x, d, scales + 4 * PAGE, extra)
    if VALUE_AXIS == 0:
        for block in range(blocks):
            n = min(32, d - block * 32)
            for t in range(PAGE):
                at = (block * PAGE + t) * 32
                s, m = quantize(x + at * 4, 4, n, codes + at, 1, extra)
                put_parameters(scales + (block * PAGE + t) * 2, blocks * 128, PARAMETERS, s, m)
    else:
        for t in range(PAGE):
            for i in range(d):
                at = (i // 32 * PAGE + t) * 32 + i % 32
                put_f32(row + i * 4, scalar_f32(x + at * 4))
            s, m = quantize(row, 4, d, bytes_, 1, extra)
            for i in range(d):
                put_u8(codes + (i // 32 * PAGE + t) * 32 + i % 32, scalar_u8(bytes_ + i))
            if VALUE_AXIS != 3:
                put_parameters(scales + t * 2, 128, PARAMETERS, s, m)
    pack(codes, blocks * PAGE * 2, BITS, page)
