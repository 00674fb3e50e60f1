"""q5_1 pages and weights for the GPU: layouts in formats/q5_1.py and coded.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.encode_triton import largest, least, reciprocal
from pykv.kernels.matvec_triton import byte_of, half_of, nibble

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 2
BLOCK_LEN, BLOCK_BYTES = 32, 24


@triton.jit
def level(code, extra):
    """The code."""
    return code.to(tl.float32)


@triton.jit
def fit(x, real, extra, n, AXIS: tl.constexpr):
    """The block's minimum and a share of its range."""
    minimum = least(x, real, AXIS)
    scale = tl.div_rn(largest(x, real, AXIS) - minimum, tl.full(minimum.shape, 31.0, tl.float32))
    return scale, minimum, reciprocal(scale)


@triton.jit
def code(x, scale, minimum, inverse, extra):
    """From scale and minimum before they were rounded."""
    return tl.minimum((x - minimum) * inverse + 0.5, 31.0).to(tl.int32)


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    high = byte_of(block + 4, j // 8) >> j % 8 & 1
    code = (nibble(block + 8, j) | high << 4).to(tl.float32)
    return code * half_of(block, 0) + half_of(block, 2)
