"""Q2_K weights for the CPU: layout in formats/q2_k.py."""

from __future__ import annotations

from numba import float32

from pykv.kernels.jit_numba import device
from pykv.kernels.simd import (
    field,
    fma,
    shift_right,
    splat,
    to_f32,
)
from pykv.kernels.simd_memory import (
    load_u8,
    scalar_f16,
    scalar_u8,
)

BLOCK_LEN, BLOCK_BYTES = 256, 84


@device
def two_bits(address, part):
    """The part-th 32 codes of two bits, as two byte vectors, from 64 bytes at that address."""
    at, shift = address + (part >> 2) * 32, (part & 3) * 2
    low = field(shift_right(load_u8(at), shift), 0, 2)
    return low, field(shift_right(load_u8(at + 16), shift), 0, 2)


@device
def unpack(block, part):
    """The part-th 32 weights of the block at that address, in order, as two vectors."""
    low, high = two_bits(block + 16, part)
    d, m = scalar_f16(block + 80), -scalar_f16(block + 82)
    first, second = scalar_u8(block + part * 2), scalar_u8(block + part * 2 + 1)
    d0, d1 = splat(d * float32(first & 15)), splat(d * float32(second & 15))
    m0, m1 = splat(m * float32(first >> 4)), splat(m * float32(second >> 4))
    return fma(to_f32(low), d0, m0), fma(to_f32(high), d1, m1)
