"""q5_1 cache pages for the GPU: layout in formats/coded.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.encode_triton import largest, least, reciprocal

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 2


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
