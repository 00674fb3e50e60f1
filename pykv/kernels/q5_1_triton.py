"""q5_1 pages and weights for the GPU: layouts in formats/q5_1.py and coded.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of, short_of
from pykv.kernels.q4_1_triton import code, fit, level

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 2
BLOCK_LEN, BLOCK_BYTES, LANES = 32, 24, 16
__all__ = ["code", "fit", "level"]


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    code = byte_of(block + 8, lane) >> plane * 4 & 15
    code |= (short_of(block, 4 + plane * 2) >> lane & 1) << 4
    return code.to(tl.float32) * half_of(block, 0) + half_of(block, 2)
