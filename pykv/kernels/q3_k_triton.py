"""q3_k weights for the GPU: layout in formats/q3_k.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.matvec_triton import byte_of, half_of

BLOCK_LEN, BLOCK_BYTES = 256, 110


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    part, lane = j % 128 // 32, j % 32
    code = byte_of(block + 32, j // 128 * 32 + lane) >> part * 2 & 3
    high = byte_of(block, lane) >> j // 128 * 4 + part & 1
    i = j // 128 * 8 + part * 2 + lane // 16
    scale = byte_of(block + 96, i % 8) >> i // 8 * 4 & 15
    scale |= (byte_of(block + 104, i % 4) >> i // 4 * 2 & 3) << 4
    x = (code + high * 4 - 4).to(tl.float32)
    return half_of(block, 108) * (scale - 32).to(tl.float32) * x
