"""Q5_K weights for the CPU: layout in formats/q5_k.py."""

from __future__ import annotations

from pykv.kernels.jit_numba import device
from pykv.kernels.q4_k_numba import scale_and_minimum
from pykv.kernels.simd import (
    field,
    fma,
    shift_left,
    shift_right,
    splat,
    to_f32,
)
from pykv.kernels.simd_memory import (
    load_u8,
)

BLOCK_LEN, BLOCK_BYTES = 256, 176


@device
def five_bits(low, high, low_shift, high_shift):
    """16 codes as float32, from the addresses of their nibbles and of their fifth bits."""
    nibbles = field(shift_right(load_u8(low), low_shift), 0, 4)
    fifth = field(shift_right(load_u8(high), high_shift), 0, 1)
    return to_f32(nibbles | shift_left(fifth, 4))


@device
def unpack(block, part):
    """The part-th 32 weights of the block at that address, in order, as two vectors."""
    at, shift = block + 48 + (part >> 1) * 32, (part & 1) * 4
    low = five_bits(at, block + 16, shift, part)
    high = five_bits(at + 16, block + 32, shift, part)
    d, m = scale_and_minimum(block, part)
    scale, least = splat(d), splat(m)
    return fma(low, scale, least), fma(high, scale, least)
