"""Q6_K weights for the CPU: layout in formats/q6_k.py."""

from __future__ import annotations

import numpy as np
from numba import float32

from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.q2_k_numba import two_bits
from pykv.kernels.simd import (
    field,
    fma,
    shift_left,
    shift_right,
    splat,
    to_f32,
)
from pykv.kernels.simd_int import bits, either, load_64, spread, twice, two_bits_up
from pykv.kernels.simd_memory import (
    load_f32,
    load_i8,
    load_u8,
    scalar_f16,
    scalar_i8,
    store_f32,
)
from pykv.kernels.vnni_numba import NATURAL, OFFSETS_AT, SCALES_AT, products

BLOCK_LEN, BLOCK_BYTES = 256, 210


@device
def unpack(block, part):
    """The part-th 32 weights of the block at that address, in order, as two vectors."""
    at = block + (part >> 2) * 64 + (part & 1) * 32
    shift = (part >> 1 & 1) * 4
    low = field(shift_right(load_u8(at), shift), 0, 4)
    high = field(shift_right(load_u8(at + 16), shift), 0, 4)
    upper0, upper1 = two_bits(block + 128, part)
    q0 = to_f32(low | shift_left(upper0, 4))
    q1 = to_f32(high | shift_left(upper1, 4))
    d = scalar_f16(block + 208)
    d0 = d * float32(scalar_i8(block + 192 + part * 2))
    d1 = d * float32(scalar_i8(block + 193 + part * 2))
    first = fma(q0, splat(d0), splat(d0 * float32(-32)))
    return first, fma(q1, splat(d1), splat(d1 * float32(-32)))


# through byte products: see vnni_numba.py
LAYOUT, RANGE, ZERO = NATURAL, np.float32(1 << 22), np.float32(-32)
QUARTERS = 2  # blocks in four groups


@inlined
def group_scales(row, first, count, out):
    """The 16 scales of each block."""
    for b in range(count):
        block = row + (first + b) * BLOCK_BYTES
        store_f32(out + b * 64, to_f32(load_i8(block + 192)) * scalar_f16(block + 208))


@inlined
def group_dot(acc, row, group, n_blocks, x, scales, place):
    """Half a block."""
    block, half, at = row + (group >> 1) * BLOCK_BYTES, group & 1, scales + place * 32
    codes, upper = load_64(block + half * 64), twice(block + 128 + half * 32)
    low = to_f32(products(either(bits(codes, 0, 4), two_bits_up(upper, 0, 2)), x))
    high = to_f32(products(either(bits(codes, 4, 4), two_bits_up(upper, 4, 6)), x + 64))
    low = fma(low, load_f32(x + SCALES_AT), load_f32(x + OFFSETS_AT))
    high = fma(high, load_f32(x + SCALES_AT + 64), load_f32(x + OFFSETS_AT + 64))
    return fma(high, spread(at + 16, 4, 1, 0), fma(low, spread(at, 4, 1, 0), acc))
