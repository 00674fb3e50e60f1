"""IQ4_NL weights for the CPU: layout in formats/iq4_nl.py."""

from __future__ import annotations

from pykv.formats.iq4_nl import TABLE
from pykv.kernels.jit_numba import device
from pykv.kernels.simd import (
    field,
    lookup,
    to_f32,
)
from pykv.kernels.simd_memory import (
    load_u8,
    scalar_f16,
)

BLOCK_LEN, BLOCK_BYTES = 32, 18


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
