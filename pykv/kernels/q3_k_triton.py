"""q3_k weights for the GPU: layout in formats/q3_k.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of, short_of

BLOCK_LEN, BLOCK_BYTES, LANES = 256, 110, 16


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    code = byte_of(block + (32 + plane // 8 * 32 + plane % 2 * 16), lane) >> plane % 8 // 2 * 2 & 3
    high = byte_of(block + plane % 2 * 16, lane) >> plane // 2 & 1
    scale = short_of(block, 96 + plane % 8 // 2 * 2) >> plane % 2 * 8 + plane // 8 * 4 & 15
    scale |= (short_of(block, 104 + plane % 4 // 2 * 2) >> plane % 2 * 8 + plane // 4 * 2 & 3) << 4
    x = (code + high * 4 - 4).to(tl.float32)
    return half_of(block, 108) * (scale - 32).to(tl.float32) * x
