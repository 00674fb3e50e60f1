"""MXFP4 weights for the CPU: layout in formats/mxfp4.py."""

from __future__ import annotations

from pykv.formats.mxfp4 import TABLE
from pykv.kernels.jit_numba import device
from pykv.kernels.simd import (
    field,
    float_from_bits,
    lookup,
    to_f32,
)
from pykv.kernels.simd_memory import (
    load_u8,
    scalar_u8,
)

BLOCK_LEN, BLOCK_BYTES = 32, 17


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    exponent, codes = scalar_u8(block), load_u8(block + 1)
    # 2 ** (exponent - 128); the two smallest are subnormal
    bits = (exponent - 1) << 23 if exponent > 1 else 0x200000 << exponent
    scale = float_from_bits(bits)
    low = to_f32(lookup(field(codes, 0, 4), TABLE))
    return low * scale, to_f32(lookup(field(codes, 4, 4), TABLE)) * scale
