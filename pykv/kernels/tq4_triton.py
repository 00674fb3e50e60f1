"""tq4 cache pages for the GPU: layout in formats/tq4.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.formats import tq4
from pykv.kernels.encode_triton import nearest

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "token", "token", 1
LEVELS = tq4.FORMAT.levels  # for `extra`


@triton.jit
def level(code, extra):
    """The level, from the format's table."""
    return tl.load(extra + code)


@triton.jit
def fit(x, real, extra, n, BITS: tl.constexpr, AXIS: tl.constexpr):
    """The length over that of the codes' levels; lengths in float64."""
    y = tl.where(real, x, 0.0).to(tl.float64)
    length = tl.sqrt(tl.sum(y * y, AXIS, keep_dims=True))
    root = tl.sqrt(tl.full(length.shape, n, tl.float64))
    some = tl.where(length > 0, length, 1.0)
    # a length below 1e-38 has an inverse that float32 does not hold
    unit = tl.where(length > 0, tl.minimum(root / some, 3.4028234663852886e38), 0.0).to(tl.float32)
    steps = tl.load(extra + nearest(x * unit, extra, 1 << BITS)).to(tl.float64)
    steps = tl.where(real, steps, 0.0)
    scale = (length / tl.sqrt(tl.sum(steps * steps, AXIS, keep_dims=True))).to(tl.float32)
    return scale, scale, unit


@triton.jit
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """The nearest level of x times sqrt(n) over its length."""
    return nearest(x * inverse, extra, 1 << BITS)
