"""tq4 cache pages for the GPU: layout in formats/tq4.py, the functions in coded_triton.py."""

from __future__ import annotations

import triton.language as tl

from pykv.formats import tq4
from pykv.kernels.encode_tiles_triton import nearest
from pykv.kernels.jit_triton import device
from pykv.kernels.levels_triton import looked_up

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "token", "token", 1
LEVELS = tq4.FORMAT.levels  # for `extra`
LENGTHS = True  # a token's scale makes it as long as it was


@device
def level(code, extra):
    """The level, from the format's table."""
    return looked_up(extra, code)


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The length of x, whose squares are given, and what makes that sqrt(n); in float64."""
    length = tl.sqrt(x)
    root = tl.sqrt(tl.full(length.shape, n, tl.float64))
    some = tl.where(length > 0, length, 1.0)
    # a length below 1e-38 has an inverse that float32 does not hold
    unit = tl.where(length > 0, tl.minimum(root / some, 3.4028234663852886e38), 0.0).to(tl.float32)
    return length, length, unit


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """The nearest level of x times sqrt(n) over its length."""
    return nearest(x * inverse, extra, 1 << BITS)
