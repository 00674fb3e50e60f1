"""Q4_1 weights for the CPU: layout in formats/q4_1.py."""

from __future__ import annotations

import numpy as np

from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.quantize_numba import counted
from pykv.kernels.simd import (
    field,
    fma,
    splat,
    to_f32,
)
from pykv.kernels.simd_codes import table_entry
from pykv.kernels.simd_int import bits, load_4x16, spread_halves
from pykv.kernels.simd_memory import (
    load_f32,
    load_u8,
    scalar_f16,
)
from pykv.kernels.vnni_numba import HALVES, OFFSETS_AT, SCALES_AT, both_products

BLOCK_LEN, BLOCK_BYTES = 32, 20
ZERO_F = np.float32(0)


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    codes = load_u8(block + 4)
    scale, least = splat(scalar_f16(block)), splat(scalar_f16(block + 2))
    low = fma(to_f32(field(codes, 0, 4)), scale, least)
    return low, fma(to_f32(field(codes, 4, 4)), scale, least)


# through byte products: see vnni_numba.py
LAYOUT, RANGE, ZERO = HALVES, np.float32(1 << 22), np.float32(1)


@inlined
def group_dot(acc, row, group, n_blocks, x, scales, place):
    """Four blocks."""
    b, last = group * 4, n_blocks - 1
    b0, b1 = row + b * BLOCK_BYTES, row + min(b + 1, last) * BLOCK_BYTES
    b2, b3 = row + min(b + 2, last) * BLOCK_BYTES, row + min(b + 3, last) * BLOCK_BYTES
    codes = load_4x16(b0 + 4, b1 + 4, b2 + 4, b3 + 4)
    sums = to_f32(both_products(bits(codes, 0, 4), bits(codes, 4, 4), x))
    scale = spread_halves(b0, b1, b2, b3, 4, 0)
    least = spread_halves(b0 + 2, b1 + 2, b2 + 2, b3 + 2, 4, 0)
    acc = fma(sums * load_f32(x + SCALES_AT), scale, acc)
    return fma(load_f32(x + OFFSETS_AT), least, acc)


LEVELS = tuple(float(i) for i in range(16))
MOST_CODE = np.float32(15)


# pages of the cache: see coded_numba.py


@device
def quantize(x, step, n, codes, code_step, extra):
    """Codes from the minimum."""
    return counted(x, step, n, codes, code_step, MOST_CODE)


@inlined
def level(x, extra):
    """The code itself."""
    return table_entry(x, LEVELS)


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = cache_functions(
    "q4_1", 4, quantize, level, parameters=2
)
