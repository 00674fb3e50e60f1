"""kivi4 cache pages for the GPU: layout in formats/coded.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.encode_tiles_triton import half, largest, least, ratio, rounded
from pykv.kernels.jit_triton import device

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "channel", "block", 2


@device
def level(code, extra):
    """The code."""
    return code.to(tl.float32)


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The group's minimum and a share of its range, both rounded."""
    low = least(x, real)
    minimum = half(low)
    span = largest(x, real) - minimum
    scale = half(tl.div_rn(span, tl.full(span.shape, (1 << BITS) - 1, tl.float32)))
    return scale, minimum, scale


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """Halves to even."""
    MOST: tl.constexpr = (1 << BITS) - 1
    # a little beyond both ends first: `rounded` takes no large numbers
    y = rounded(tl.minimum(tl.maximum(ratio(x - minimum, scale), -1.0), MOST + 1.0))
    return tl.minimum(tl.maximum(y, 0.0), MOST * 1.0).to(tl.int32)
