"""q2_k weights for the GPU: layout in formats/q2_k.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.matvec_triton import byte_of, half_of

BLOCK_LEN, BLOCK_BYTES = 256, 84


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    part, lane = j % 128 // 32, j % 32
    code = byte_of(block + 16, j // 128 * 32 + lane) >> part * 2 & 3
    scale = byte_of(block, j // 128 * 8 + part * 2 + lane // 16)
    return (half_of(block, 80) * (scale & 15).to(tl.float32)) * code.to(tl.float32) - half_of(
        block, 82
    ) * (scale >> 4).to(tl.float32)
