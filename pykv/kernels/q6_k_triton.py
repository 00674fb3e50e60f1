"""q6_k weights for the GPU: layout in formats/q6_k.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of, short_of, signed

BLOCK_LEN, BLOCK_BYTES, LANES = 256, 210, 16


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    # of each 128 values, 32 at a time
    part, half = plane % 8 // 2, plane // 8
    low = byte_of(block + (half * 64 + part % 2 * 32 + plane % 2 * 16), lane) >> part // 2 * 4 & 15
    high = byte_of(block + (128 + half * 32 + plane % 2 * 16), lane) >> part * 2 & 3
    scale = signed(short_of(block, 192 + plane // 2 * 2) >> plane % 2 * 8 & 255)
    x = ((low | high << 4) - 32).to(tl.float32)
    return half_of(block, 208) * scale.to(tl.float32) * x
