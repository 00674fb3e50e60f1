"""Q5_0 weights for the CPU: layout in formats/q5_0.py."""

from __future__ import annotations

import numpy as np
from numba import float32

from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.quantize_numba import centred
from pykv.kernels.simd import (
    bit_set,
    field,
    fma,
    shift_left,
    splat,
    to_f32,
)
from pykv.kernels.simd_codes import low_bits
from pykv.kernels.simd_int import add_where, bits, load_4x16, spread_halves
from pykv.kernels.simd_memory import (
    load_f32,
    load_u8,
    scalar_f16,
    scalar_u32,
)
from pykv.kernels.vnni_numba import HALVES, OFFSETS_AT, SCALES_AT, both_products

BLOCK_LEN, BLOCK_BYTES = 32, 22


@device
def five_bits(high, low):
    """32 codes as float32, from the address of their fifth bits and that of their nibbles."""
    fifth, codes = scalar_u32(high), load_u8(low)
    first = field(codes, 0, 4) | shift_left(bit_set(fifth, 0), 4)
    second = field(codes, 4, 4) | shift_left(bit_set(fifth, 16), 4)
    return to_f32(first), to_f32(second)


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    low, high = five_bits(block + 2, block + 6)
    d = scalar_f16(block)
    scale, zero = splat(d), splat(d * float32(-16))
    return fma(low, scale, zero), fma(high, scale, zero)


# through byte products: see vnni_numba.py
LAYOUT, RANGE, ZERO = HALVES, np.float32(1 << 22), np.float32(-16)


@inlined
def group_dot(acc, row, group, n_blocks, x, scales, place):
    """Four blocks."""
    b, last = group * 4, n_blocks - 1
    b0, b1 = row + b * BLOCK_BYTES, row + min(b + 1, last) * BLOCK_BYTES
    b2, b3 = row + min(b + 2, last) * BLOCK_BYTES, row + min(b + 3, last) * BLOCK_BYTES
    codes = load_4x16(b0 + 6, b1 + 6, b2 + 6, b3 + 6)
    q0, q1, q2, q3 = (
        scalar_u32(b0 + 2),
        scalar_u32(b1 + 2),
        scalar_u32(b2 + 2),
        scalar_u32(b3 + 2),
    )
    # the fifth bits of the first 16 weights of each block, and of the second 16
    first = q0 & 0xFFFF | (q1 & 0xFFFF) << 16 | (q2 & 0xFFFF) << 32 | q3 << 48
    second = q0 >> 16 | q1 >> 16 << 16 | q2 >> 16 << 32 | q3 >> 16 << 48
    low = add_where(bits(codes, 0, 4), first, 16)
    high = add_where(bits(codes, 4, 4), second, 16)
    sums = to_f32(both_products(low, high, x))
    centred = fma(sums, load_f32(x + SCALES_AT), load_f32(x + OFFSETS_AT))
    return fma(centred, spread_halves(b0, b1, b2, b3, 4, 0), acc)


FLOAT_HALF = np.float32(16)


# pages of the cache: see coded_numba.py


@device
def quantize(x, step, n, codes, code_step, extra):
    """Codes around 16."""
    return centred(x, step, n, codes, code_step, FLOAT_HALF)


@inlined
def level(x, extra):
    """code - 16."""
    return to_f32(low_bits(x, 5)) - FLOAT_HALF


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = cache_functions(
    "q5_0", 5, quantize, level
)
