"""Q8_0 weights for the CPU: layout in formats/q8_0.py."""

from __future__ import annotations

from pykv.kernels.jit_numba import device
from pykv.kernels.simd import load_i8, scalar_f16, to_f32

BLOCK_LEN, BLOCK_BYTES = 32, 34


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    scale = scalar_f16(block)
    return to_f32(load_i8(block + 2)) * scale, to_f32(load_i8(block + 18)) * scale
