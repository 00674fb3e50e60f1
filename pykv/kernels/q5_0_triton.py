"""q5_0 pages and weights for the GPU: layouts in formats/q5_0.py and coded.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of, short_of
from pykv.kernels.q4_0_triton import code, fit

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 1
BLOCK_LEN, BLOCK_BYTES, LANES = 32, 22, 16
__all__ = ["code", "fit"]


@device
def level(code, extra):
    """The code less 16."""
    return code.to(tl.float32) - 16.0


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    code = byte_of(block + 6, lane) >> plane * 4 & 15
    code |= (short_of(block, 2 + plane * 2) >> lane & 1) << 4
    return (code - 16).to(tl.float32) * half_of(block, 0)
