"""Q5_0 weights for the CPU: layout in formats/q5_0.py."""

from __future__ import annotations

from numba import float32

from pykv.kernels.jit_numba import device
from pykv.kernels.simd import (
    bit_set,
    field,
    fma,
    load_u8,
    scalar_f16,
    scalar_u32,
    shift_left,
    splat,
    to_f32,
)

BLOCK_LEN, BLOCK_BYTES = 32, 22


@device
def five_bits(high, low):
    """32 codes as float32, from the address of their fifth bits and that of their nibbles."""
    fifth, codes = scalar_u32(high), load_u8(low)
    first = field(codes, 0, 4) | shift_left(bit_set(fifth, 0), 4)
    second = field(codes, 4, 4) | shift_left(bit_set(fifth, 16), 4)
    return to_f32(first), to_f32(second)


@device
def unpack(block, part):
    """The 32 weights of the block at that address, in order, as two vectors."""
    low, high = five_bits(block + 2, block + 6)
    d = scalar_f16(block)
    scale, zero = splat(d), splat(d * float32(-16))
    return fma(low, scale, zero), fma(high, scale, zero)
