"""q2_k weights for the GPU: layout in formats/q2_k.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of, short_of

BLOCK_LEN, BLOCK_BYTES, LANES = 256, 84, 16


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    code = byte_of(block + (16 + plane // 8 * 32 + plane % 2 * 16), lane) >> plane % 8 // 2 * 2 & 3
    scale = short_of(block, plane // 2 * 2) >> plane % 2 * 8
    scaled = half_of(block, 80) * (scale & 15).to(tl.float32) * code.to(tl.float32)
    return scaled - half_of(block, 82) * (scale >> 4 & 15).to(tl.float32)
