"""iq4_nl pages and weights for the GPU: layouts in formats/iq4_nl.py and coded.py."""

from __future__ import annotations

import triton.language as tl

from pykv.formats import iq4_nl
from pykv.kernels.encode_tiles_triton import extreme, largest, nearest, one_by_one, reciprocal
from pykv.kernels.jit_triton import device
from pykv.kernels.levels_triton import looked_up
from pykv.kernels.matvec_triton import byte_of, half_of

BITS, KEY_AXIS, VALUE_AXIS, PARAMETERS = 4, "block", "block", 1

LEVELS = iq4_nl.TABLE  # for `extra`
BLOCK_LEN, BLOCK_BYTES, LANES = 32, 18, 16


@device
def level(code, extra):
    """The step, from the table."""
    return looked_up(extra, code)


@device
def fit(x, real, extra, n, BITS: tl.constexpr):
    """The scale that fits the nearest steps of a first one best."""
    x = tl.where(real, x, 0.0)
    value = extreme(x, real)
    first = tl.div_rn(value, tl.full(value.shape, -127.0, tl.float32))
    tiny = largest(tl.abs(x), real) < 1e-15
    inverse = reciprocal(first)
    steps = tl.load(extra + nearest(x * inverse, extra, 16))
    weighted = x * x * steps
    above, below = one_by_one(weighted * x), one_by_one(weighted * steps)
    fits = (below > 0) & (tiny == 0)
    scale = tl.where(fits, tl.div_rn(above, tl.where(fits, below, 1.0)), 0.0)
    # the squares of values past 1e19 overflow
    scale = tl.where(tl.abs(scale) <= 3.4028234e38, scale, first)
    return scale, tiny.to(tl.float32), inverse


@device
def code(x, scale, minimum, inverse, extra, BITS: tl.constexpr):
    """The first scale's nearest steps; 0 where values are tiny, which stands for `minimum`."""
    return tl.where(minimum > 0, 0, nearest(x * inverse, extra, 16))


@device
def weight(block, plane: tl.constexpr, lane, table):
    """Values of a plane of the blocks at these addresses; see matvec_triton.py."""
    return tl.load(table + (byte_of(block + 2, lane) >> plane * 4 & 15)) * half_of(block, 0)
