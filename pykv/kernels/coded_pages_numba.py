"""Cache pages of codes: encoding them, and reading them as float32; see coded_numba.py.

Templates, bound by `cache_functions` there. Axes are 0 block, 1 channel, 2 token, 3 head.
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
    stack,
    store_f32,
)

MOST = np.float32(65504)
MOST_WIDTH = 640  # channels of the widest head
CODE_BYTES, ROW_BYTES = MOST_WIDTH * PAGE, MOST_WIDTH * 4
BITS = PARAMETERS = KEY_AXIS = VALUE_AXIS = 1
BY_BLOCK = True
_stub = inlined(lambda *args: None)
key_levels = value_levels = quantize = _stub


# pages as float32, for prompts


def _read_keys(page, d, slots, out, extra):
    scales, blocks = page + code_bytes_keys(d, BITS), (d + 31) // 32
    for i in range(d):
        v, w, x, y = key_levels(page, d, i)
        at = out + i * 256
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
        else:
            s = splat(scalar_f32(extra))
            v, w, x, y = v * s, w * s, x * s, y * s
        store_f32(at, v)
        store_f32(at + 64, w)
        store_f32(at + 128, x)
        store_f32(at + 192, y)


def _read_values(page, d, slots, out, extra):
    blocks, scales = (d + 31) // 32, page + code_bytes_values(d, BITS)
    for block in range(blocks):
        for t in range(0, PAGE, 4):
            u, v, w, x, y, z, k, m = value_levels(page, d, block, t)
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
                m = splat(scalar_f16(scales + ((blocks + block) * PAGE + t) * 2))
                low, high = low + m, high + m
            store_f32(at, low)
            store_f32(at + 64, high)


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
                if KEY_AXIS != 3:
                    put_parameters(scales + (block * PAGE + t) * 2, blocks * 128, PARAMETERS, s, m)
    pack(codes, d * 4, BITS, page)


def _encode_values(x, d, page, extra):
    codes, row, blocks = stack(CODE_BYTES), stack(ROW_BYTES), (d + 31) // 32
    bytes_, scales = stack(MOST_WIDTH), page + code_bytes_values(d, BITS)
    for i in range(blocks * PAGE * 4):
        put_i64(codes + i * 8, 0)
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
