"""IQ4_XS weights for the CPU: layout in formats/iq4_xs.py."""

from __future__ import annotations

from numba import float32

from pykv.kernels.iq4_nl_numba import steps
from pykv.kernels.jit_numba import device
from pykv.kernels.simd_memory import (
    scalar_f16,
    scalar_u8,
    scalar_u16,
)

BLOCK_LEN, BLOCK_BYTES = 256, 136


@device
def unpack(block, part):
    """The part-th 32 weights of the block at that address, in order, as two vectors."""
    nibble = (scalar_u8(block + 4 + (part >> 1)) >> ((part & 1) * 4)) & 15
    upper = (scalar_u16(block + 2) >> (part * 2)) & 3
    low, high = steps(block + 8 + part * 16)
    scale = scalar_f16(block) * float32((nibble | upper << 4) - 32)
    return low * scale, high * scale
