"""q4_0 pages and weights for the GPU: layouts in formats/q4_0.py and coded.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.encode_tiles_triton import extreme, reciprocal
from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "block", "block", 1
BLOCK_LEN, BLOCK_BYTES, LANES = 32, 18, 16


@device
def level(code, extra):
    """The code less 8."""
    return code.to(tl.float32) - 8.0


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The value of largest magnitude gets code 0."""
    scale = extreme(x, real) * (-2 / (1 << BITS))
    return scale, scale, reciprocal(scale)


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """From the scale before it was rounded."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    return tl.minimum(x * inverse + (HALF + 0.5), 2.0 * HALF - 1).to(tl.int32)


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    code = byte_of(block + 2, lane) >> plane * 4 & 15
    return (code - 8).to(tl.float32) * half_of(block, 0)
