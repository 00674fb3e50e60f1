"""nuq4 cache pages for the GPU: layout in formats/nuq4.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.encode_tiles_triton import half, largest, least, nearest, ratio
from pykv.kernels.jit_triton import device
from pykv.kernels.levels_triton import looked_up

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "range", "token", 2


@device
def level(code, extra):
    """The layer's level."""
    return looked_up(extra, code)


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """A token's own range: half its width, and its centre."""
    low, high = least(x, real), largest(x, real)
    # halved by a product: the GPU divides exactly only where it is told to
    centre = half(low * 0.5 + high * 0.5)
    scale = half(tl.maximum(high - centre, centre - low))
    return scale, centre, scale


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """The level nearest to the value's place in its range."""
    return nearest(ratio(x - minimum, scale), extra, 1 << BITS)
