"""Q3_K weights for the CPU: layout in formats/q3_k.py."""

from __future__ import annotations

from numba import float32

from pykv.kernels.jit_numba import device
from pykv.kernels.q2_k_numba import two_bits
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
    scalar_f16,
    scalar_u8,
)

BLOCK_LEN, BLOCK_BYTES = 256, 110


@device
def six_bit_scale(scales, run):
    """The scale of a run of 16 weights, -32 to 31, as float32."""
    low = (scalar_u8(scales + (run & 7)) >> ((run >> 3) * 4)) & 15
    high = (scalar_u8(scales + 8 + (run & 3)) >> ((run >> 2) * 2)) & 3
    return float32((low | high << 4) - 32)


@device
def unpack(block, part):
    """The part-th 32 weights of the block at that address, in order, as two vectors."""
    low, high = two_bits(block + 32, part)
    third0 = field(shift_right(load_u8(block), part), 0, 1)
    third1 = field(shift_right(load_u8(block + 16), part), 0, 1)
    q0 = to_f32(low | shift_left(third0, 2))
    q1 = to_f32(high | shift_left(third1, 2))
    d = scalar_f16(block + 108)
    d0 = d * six_bit_scale(block + 96, part * 2)
    d1 = d * six_bit_scale(block + 96, part * 2 + 1)
    first = fma(q0, splat(d0), splat(d0 * float32(-4)))
    return first, fma(q1, splat(d1), splat(d1 * float32(-4)))
