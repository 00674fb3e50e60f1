"""q8_0 pages and weights for the GPU: layouts in formats/q8_0.py and coded.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.encode_tiles_triton import largest, reciprocal
from pykv.kernels.jit_triton import device
from pykv.kernels.matvec_triton import byte_of, half_of, signed

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 8, "block", "block", 1
BLOCK_LEN, BLOCK_BYTES, LANES = 32, 34, 32


@device
def level(code, extra):
    """The code as a signed byte."""
    return ((code ^ 128) - 128).to(tl.float32)


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The largest magnitude over 127."""
    top = largest(tl.abs(x), real)
    scale = tl.div_rn(top, tl.full(top.shape, 127.0, tl.float32))
    return scale, scale, reciprocal(scale)


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """Halves away from zero, from the scale before it was rounded."""
    scaled = x * inverse
    whole = scaled.to(tl.int32)
    # twice the fraction is exact; adding a half to the value first would not be
    return (whole + (2 * (scaled - whole.to(tl.float32))).to(tl.int32)) & 255


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    return signed(byte_of(block + 2, lane)).to(tl.float32) * half_of(block, 0)
