"""Q4_K weights for the CPU: layout in formats/q4_k.py."""

from __future__ import annotations

import numpy as np
from numba import float32

from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.simd import (
    field,
    fma,
    shift_right,
    splat,
    to_f32,
)
from pykv.kernels.simd_int import bits, bytes_of, load_64, spread, two_halves
from pykv.kernels.simd_memory import (
    load_f32,
    load_u8,
    scalar_f16,
    scalar_u8,
    scalar_u32,
    store_f32,
)
from pykv.kernels.vnni_numba import OFFSETS_AT, PAIRS, SCALES_AT, products

BLOCK_LEN, BLOCK_BYTES = 256, 144


@device
def scale_and_minimum(block, part):
    """A run's d * s and -dmin * m as float32; the 12 bytes of s and m stand after d and dmin."""
    at = block + 4 + (part & 3)
    first, second, last = scalar_u8(at), scalar_u8(at + 4), scalar_u8(at + 8)
    if part < 4:
        s, m = first & 63, second & 63
    else:
        s, m = last & 15 | first >> 6 << 4, last >> 4 | second >> 6 << 4
    return scalar_f16(block) * float32(s), scalar_f16(block + 2) * float32(-m)


@device
def unpack(block, part):
    """The part-th 32 weights of the block at that address, in order, as two vectors."""
    at, shift = block + 16 + (part >> 1) * 32, (part & 1) * 4
    low = field(shift_right(load_u8(at), shift), 0, 4)
    high = field(shift_right(load_u8(at + 16), shift), 0, 4)
    d, m = scale_and_minimum(block, part)
    scale, least = splat(d), splat(m)
    return fma(to_f32(low), scale, least), fma(to_f32(high), scale, least)


# through byte products: see vnni_numba.py
LAYOUT, RANGE, ZERO = PAIRS, np.float32(1 << 22), np.float32(1)
QUARTERS = 2  # blocks in four groups


@inlined
def group_scales(row, first, count, out):
    """8 scales d * s and 8 minima -dmin * m of each block."""
    for b in range(count):
        block, at = row + (first + b) * BLOCK_BYTES, out + b * 64
        x, y, z = scalar_u32(block + 4), scalar_u32(block + 8), scalar_u32(block + 12)
        # four six-bit numbers at a time: those of the first four runs, then of the last four
        s = x & 0x3F3F3F3F | (z & 0x0F0F0F0F | x >> 2 & 0x30303030) << 32
        m = y & 0x3F3F3F3F | (z >> 4 & 0x0F0F0F0F | y >> 2 & 0x30303030) << 32
        scales = two_halves(scalar_f16(block), -scalar_f16(block + 2))
        store_f32(at, bytes_of(s, m) * scales)


@inlined
def group_dot(acc, row, group, n_blocks, x, scales, place):
    """Half a block: runs 0 and 2 of it in the low nibbles, 1 and 3 in the high ones."""
    block, half = row + (group >> 1) * BLOCK_BYTES, group & 1
    at = scales + (place >> 1) * 64 + half * 16
    codes = load_64(block + 16 + half * 64)
    low = to_f32(products(bits(codes, 0, 4), x)) * load_f32(x + SCALES_AT)
    high = to_f32(products(bits(codes, 4, 4), x + 64)) * load_f32(x + SCALES_AT + 64)
    acc = fma(low, spread(at, 2, 2, 0), fma(high, spread(at, 2, 2, 1), acc))
    acc = fma(load_f32(x + OFFSETS_AT), spread(at + 32, 2, 2, 0), acc)
    return fma(load_f32(x + OFFSETS_AT + 64), spread(at + 32, 2, 2, 1), acc)
