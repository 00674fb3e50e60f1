"""Q5_1 weights for the CPU: layout in formats/q5_1.py."""

from __future__ import annotations

from pykv.kernels.jit_numba import device
from pykv.kernels.q5_0_numba import five_bits
from pykv.kernels.simd import (
    fma,
    splat,
)
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
