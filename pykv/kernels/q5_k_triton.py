"""q5_k weights for the GPU: layout in formats/q5_k.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of, six_bits

BLOCK_LEN, BLOCK_BYTES, LANES = 256, 176, 32


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    code = byte_of(block + (48 + plane // 2 * 32), lane) >> plane % 2 * 4 & 15
    code |= (byte_of(block + 16, lane) >> plane & 1) << 4
    scale, minimum = six_bits(block + 4, plane)
    scaled = half_of(block, 0) * scale.to(tl.float32) * code.to(tl.float32)
    return scaled - half_of(block, 2) * minimum.to(tl.float32)
