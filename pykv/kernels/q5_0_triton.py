"""q5_0 pages and weights for the GPU: layouts in formats/q5_0.py and coded.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.matvec_triton import byte_of, half_of, nibble
from pykv.kernels.q4_0_triton import code, fit

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 1
BLOCK_LEN, BLOCK_BYTES = 32, 22
__all__ = ["code", "fit"]


@triton.jit
def level(code, extra):
    """The code less 16."""
    return code.to(tl.float32) - 16.0


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    high = byte_of(block + 2, j // 8) >> j % 8 & 1
    return ((nibble(block + 6, j) | high << 4) - 16).to(tl.float32) * half_of(block, 0)
