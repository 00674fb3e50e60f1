"""q5_0 pages and weights for the GPU: layouts in formats/q5_0.py and coded.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.encode_triton import extreme, reciprocal
from pykv.kernels.matvec_triton import byte_of, half_of, nibble

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 1
BLOCK_LEN, BLOCK_BYTES = 32, 22


@triton.jit
def level(code, extra):
    """The code less 16."""
    return code.to(tl.float32) - 16.0


@triton.jit
def fit(x, real, extra, n, AXIS: tl.constexpr):
    """The value of largest magnitude gets code 0."""
    scale = extreme(x, real, AXIS) * (-1 / 16)
    return scale, scale, reciprocal(scale)


@triton.jit
def code(x, scale, minimum, inverse, extra):
    """From the scale before it was rounded."""
    return tl.minimum(x * inverse + 16.5, 31.0).to(tl.int32)


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    high = byte_of(block + 2, j // 8) >> j % 8 & 1
    return ((nibble(block + 6, j) | high << 4) - 16).to(tl.float32) * half_of(block, 0)
