"""q4_k weights for the GPU: layout in formats/q4_k.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.matvec_triton import byte_of, half_of, six_bits

BLOCK_LEN, BLOCK_BYTES = 256, 144


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    i, lane = j // 32, j % 32
    code = byte_of(block + 16, i // 2 * 32 + lane) >> i % 2 * 4 & 15
    scale, minimum = six_bits(block + 4, i)
    scaled = half_of(block, 0) * scale.to(tl.float32) * code.to(tl.float32)
    return scaled - half_of(block, 2) * minimum.to(tl.float32)
