"""q4_1 pages and weights for the GPU: layouts in formats/q4_1.py and coded.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.encode_tiles_triton import largest, least, reciprocal
from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "block", "block", 2
BLOCK_LEN, BLOCK_BYTES, LANES = 32, 20, 16


@device
def level(code, extra):
    """The code."""
    return code.to(tl.float32)


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The block's minimum and a share of its range."""
    minimum = least(x, real)
    span = largest(x, real) - minimum
    scale = tl.div_rn(span, tl.full(span.shape, (1 << BITS) - 1, tl.float32))
    return scale, minimum, reciprocal(scale)


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """From scale and minimum before they were rounded."""
    return tl.minimum((x - minimum) * inverse + 0.5, ((1 << BITS) - 1) * 1.0).to(tl.int32)


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    code = byte_of(block + 4, lane) >> plane * 4 & 15
    return code.to(tl.float32) * half_of(block, 0) + half_of(block, 2)
