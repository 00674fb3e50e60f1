"""Q4_1 weights for the CPU: layout in formats/q4_1.py."""

from __future__ import annotations

from pykv.kernels.jit_numba import device
from pykv.kernels.simd import field, fma, load_u8, scalar_f16, splat, to_f32

BLOCK_LEN, BLOCK_BYTES = 32, 20


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    codes = load_u8(block + 4)
    scale, least = splat(scalar_f16(block)), splat(scalar_f16(block + 2))
    low = fma(to_f32(field(codes, 0, 4)), scale, least)
    return low, fma(to_f32(field(codes, 4, 4)), scale, least)
