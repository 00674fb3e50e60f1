"""Q5_1 weights for the CPU: layout in formats/q5_1.py."""

from __future__ import annotations

import numpy as np

from pykv.kernels.coded_numba import cache_functions
from pykv.kernels.jit_numba import device, inlined
from pykv.kernels.q5_0_numba import five_bits
from pykv.kernels.quantize_numba import counted
from pykv.kernels.simd import (
    fma,
    splat,
    to_f32,
)
from pykv.kernels.simd_codes import low_bits
from pykv.kernels.simd_memory import (
    scalar_f16,
)

BLOCK_LEN, BLOCK_BYTES = 32, 24


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    low, high = five_bits(block + 4, block + 8)
    scale, least = splat(scalar_f16(block)), splat(scalar_f16(block + 2))
    return fma(low, scale, least), fma(high, scale, least)


MOST_CODE = np.float32(31)


# pages of the cache: see coded_numba.py


@device
def quantize(x, step, n, codes, code_step, extra):
    """Codes from the minimum."""
    return counted(x, step, n, codes, code_step, MOST_CODE)


@inlined
def level(x, extra):
    """The code itself."""
    return to_f32(low_bits(x, 5))


encode_keys, encode_values, scores, mix, read_keys, read_values, scores_read = cache_functions(
    "q5_1", 5, quantize, level, parameters=2
)
