"""Q4_K weights for the CPU: layout in formats/q4_k.py."""

from __future__ import annotations

from numba import float32

from pykv.kernels.jit_numba import device
from pykv.kernels.simd import (
    field,
    fma,
    load_u8,
    scalar_f16,
    scalar_u8,
    shift_right,
    splat,
    to_f32,
)

BLOCK_LEN, BLOCK_BYTES = 256, 144


@device
def scale_and_minimum(block, part):
    """A run's d * s and -dmin * m as float32; the 12 bytes of s and m stand after d and dmin."""
    at = block + 4 + (part & 3)
    first, second, last = scalar_u8(at), scalar_u8(at + 4), scalar_u8(at + 8)
    if part < 4:
        s, m = first & 63, second & 63
    else:
        s, m = last & 15 | first >> 6 << 4, last >> 4 | second >> 6 << 4
    return scalar_f16(block) * float32(s), scalar_f16(block + 2) * float32(-m)


@device
def unpack(block, part):
    """The part-th 32 weights of the block at that address, in order, as two vectors."""
    at, shift = block + 16 + (part >> 1) * 32, (part & 1) * 4
    low = field(shift_right(load_u8(at), shift), 0, 4)
    high = field(shift_right(load_u8(at + 16), shift), 0, 4)
    d, m = scale_and_minimum(block, part)
    scale, least = splat(d), splat(m)
    return fma(to_f32(low), scale, least), fma(to_f32(high), scale, least)
