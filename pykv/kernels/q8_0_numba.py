"""Q8_0 weights for the CPU: layout in formats/q8_0.py."""

from __future__ import annotations

import numpy as np

from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.quantize_numba import extreme, reciprocal
from pykv.kernels.simd import (
    fma,
    to_f32,
)
from pykv.kernels.simd_int import flip, load_2x32, spread_halves
from pykv.kernels.simd_memory import (
    load_f32,
    load_i8,
    put_u8,
    scalar_f16,
    scalar_f32,
)
from pykv.kernels.vnni_numba import NATURAL, OFFSETS_AT, SCALES_AT, products

BLOCK_LEN, BLOCK_BYTES = 32, 34


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    scale = scalar_f16(block)
    return to_f32(load_i8(block + 2)) * scale, to_f32(load_i8(block + 18)) * scale


# through byte products: see vnni_numba.py
LAYOUT, RANGE, ZERO = NATURAL, np.float32(1 << 20), np.float32(-128)


@inlined
def group_dot(acc, row, group, n_blocks, x, scales, place):
    """Four blocks; a code's sign is flipped away, which adds 128 to it."""
    b, last = group * 4, n_blocks - 1
    b0, b1 = row + b * BLOCK_BYTES, row + min(b + 1, last) * BLOCK_BYTES
    b2, b3 = row + min(b + 2, last) * BLOCK_BYTES, row + min(b + 3, last) * BLOCK_BYTES
    low = to_f32(products(flip(load_2x32(b0 + 2, b1 + 2), 128), x))
    high = to_f32(products(flip(load_2x32(b2 + 2, b3 + 2), 128), x + 64))
    low = fma(low, load_f32(x + SCALES_AT), load_f32(x + OFFSETS_AT))
    high = fma(high, load_f32(x + SCALES_AT + 64), load_f32(x + OFFSETS_AT + 64))
    acc = fma(low, spread_halves(b0, b1, b2, b3, 2, 0), acc)
    return fma(high, spread_halves(b0, b1, b2, b3, 2, 2), acc)


# pages of the cache: see coded_numba.py
F127, F2 = np.float32(127), np.float32(2)


@device
def quantize(x, step, n, codes, code_step, extra):
    """Signed bytes, halves rounded away from zero."""
    d = abs(extreme(x, step, n)) / F127
    inverse = reciprocal(d)
    for i in range(n):
        scaled = scalar_f32(x + i * step) * inverse
        whole = np.trunc(scaled)
        put_u8(codes + i * code_step, int(whole + np.trunc(F2 * (scaled - whole))))
    return d, d


@inlined
def load_level(address, extra):
    """Sixteen signed bytes."""
    return to_f32(load_i8(address))


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = cache_functions(
    "q8_0", 8, quantize, load_level
)
