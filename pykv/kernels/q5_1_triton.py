"""q5_1 pages and weights for the GPU: layouts in formats/q5_1.py and coded.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.matvec_triton import byte_of, half_of, nibble
from pykv.kernels.q4_1_triton import code, fit, level

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 2
BLOCK_LEN, BLOCK_BYTES = 32, 24
__all__ = ["code", "fit", "level"]


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    high = byte_of(block + 4, j // 8) >> j % 8 & 1
    code = (nibble(block + 8, j) | high << 4).to(tl.float32)
    return code * half_of(block, 0) + half_of(block, 2)
