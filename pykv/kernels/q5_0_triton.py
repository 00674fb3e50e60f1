"""q5_0 cache pages for the GPU: layout in formats/coded.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.encode_triton import extreme, reciprocal

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 5, "block", "block", 1


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
