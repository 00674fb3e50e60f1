"""Q6_K weights for the CPU: layout in formats/q6_k.py."""

from __future__ import annotations

from numba import float32

from pykv.kernels.jit_numba import device
from pykv.kernels.q2_k_numba import two_bits
from pykv.kernels.simd import (
    field,
    fma,
    load_u8,
    scalar_f16,
    scalar_i8,
    shift_left,
    shift_right,
    splat,
    to_f32,
)

BLOCK_LEN, BLOCK_BYTES = 256, 210


@device
def unpack(block, part):
    """The part-th 32 weights of the block at that address, in order, as two vectors."""
    at = block + (part >> 2) * 64 + (part & 1) * 32
    shift = (part >> 1 & 1) * 4
    low = field(shift_right(load_u8(at), shift), 0, 4)
    high = field(shift_right(load_u8(at + 16), shift), 0, 4)
    upper0, upper1 = two_bits(block + 128, part)
    q0 = to_f32(low | shift_left(upper0, 4))
    q1 = to_f32(high | shift_left(upper1, 4))
    d = scalar_f16(block + 208)
    d0 = d * float32(scalar_i8(block + 192 + part * 2))
    d1 = d * float32(scalar_i8(block + 193 + part * 2))
    first = fma(q0, splat(d0), splat(d0 * float32(-32)))
    return first, fma(q1, splat(d1), splat(d1 * float32(-32)))
