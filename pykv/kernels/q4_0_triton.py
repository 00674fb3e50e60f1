"""q4_0 pages and weights for the GPU: layouts in formats/q4_0.py and coded.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.encode_tiles_triton import extreme, reciprocal
from pykv.kernels.matvec_triton import half_of, nibble

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "block", "block", 1
BLOCK_LEN, BLOCK_BYTES = 32, 18


@triton.jit
def level(code, extra):
    """The code less 8."""
    return code.to(tl.float32) - 8.0


@triton.jit
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The value of largest magnitude gets code 0."""
    scale = extreme(x, real) * (-2 / (1 << BITS))
    return scale, scale, reciprocal(scale)


@triton.jit
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """From the scale before it was rounded."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    return tl.minimum(x * inverse + (HALF + 0.5), 2.0 * HALF - 1).to(tl.int32)


@triton.jit
def weight(block, j, table):
    """Value j of a block at that address; see matvec_triton.py."""
    return (nibble(block + 2, j) - 8).to(tl.float32) * half_of(block, 0)
