"""int8 cache pages for the GPU: layout in formats/coded.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.encode_tiles_triton import half, largest, ratio, rounded
from pykv.kernels.jit_triton import device

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 8, "token", "token", 1


@device
def level(code, extra):
    """The code as a signed byte."""
    return ((code ^ 128) - 128).to(tl.float32)


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The largest magnitude over 127, rounded."""
    top = largest(tl.abs(x), real)
    scale = half(tl.div_rn(top, tl.full(top.shape, 127.0, tl.float32)))
    return scale, scale, scale


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """Halves to even."""
    y = rounded(tl.minimum(tl.maximum(ratio(x, scale), -128.0), 128.0))
    return tl.minimum(tl.maximum(y, -127.0), 127.0).to(tl.int32) & 255
