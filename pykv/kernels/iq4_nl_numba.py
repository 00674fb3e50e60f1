"""IQ4_NL weights for the CPU: layout in formats/iq4_nl.py."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pykv.formats.iq4_nl import TABLE
from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.quantize_numba import INFINITE, extreme, reciprocal
from pykv.kernels.simd import (
    field,
    lookup,
    to_f32,
)
from pykv.kernels.simd_codes import table_entry
from pykv.kernels.simd_memory import (
    load_u8,
    put_u8,
    scalar_f16,
    scalar_f32,
)

BLOCK_LEN, BLOCK_BYTES = 32, 18
f = np.float32


@device
def steps(address):
    """The table's entries for the 16 code bytes at that address, as two vectors of float32."""
    codes = load_u8(address)
    low = lookup(field(codes, 0, 4), TABLE)
    return to_f32(low), to_f32(lookup(field(codes, 4, 4), TABLE))


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    low, high = steps(block + 2)
    scale = scalar_f16(block)
    return low * scale, high * scale


# pages of the cache: see coded_numba.py
LEVELS = tuple(float(t) for t in TABLE)
MIDDLES = tuple(np.float32((a + b) / 2) for a, b in pairwise(TABLE))
FIRST, TINY = np.float32(TABLE[0]), np.float32(1e-15)


@device
def quantize(x, step, n, codes, code_step, extra):
    """Nearest steps for a first scale, then the scale that fits them best."""
    top = extreme(x, step, n)
    if abs(top) < TINY:
        for i in range(n):
            put_u8(codes + i * code_step, 0)
        return f(0), f(0)
    first = top / FIRST
    inverse = reciprocal(first)
    above = below = f(0)
    for i in range(n):
        v = scalar_f32(x + i * step)
        scaled, code = v * inverse, 0
        for middle in MIDDLES:
            code += scaled >= middle
        put_u8(codes + i * code_step, code)
        entry, weight = f(LEVELS[code]), v * v
        above += weight * entry * v
        below += weight * entry * entry
    d = above / below if below > 0 else f(0)
    # the squares of values past 1e19 overflow
    return (d if abs(d) <= INFINITE else first), f(0)


@inlined
def level(x, extra):
    """The table's step."""
    return table_entry(x, LEVELS)


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = cache_functions(
    "iq4_nl", 4, quantize, level
)
