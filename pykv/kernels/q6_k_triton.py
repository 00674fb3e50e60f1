"""q6_k weights for the GPU: layout in formats/q6_k.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.matvec_triton import byte_of, half_of, signed

BLOCK_LEN, BLOCK_BYTES = 256, 210


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    part, lane = j % 128 // 32, j % 32
    low = byte_of(block, j // 128 * 64 + part % 2 * 32 + lane) >> part // 2 * 4 & 15
    high = byte_of(block + 128, j // 128 * 32 + lane) >> part * 2 & 3
    scale = signed(byte_of(block + 192, j // 128 * 8 + part * 2 + lane // 16))
    x = ((low | high << 4) - 32).to(tl.float32)
    return half_of(block, 208) * scale.to(tl.float32) * x
