"""What the GPU's encoders are made of: a page's values tile by tile, and numbers of groups.

A tile f32 [64, 32] is 32 channels of a page. Its rows are tokens, or halves of channels: row
2 c + h has the tokens 32 h and up of channel c. Groups that share a scale are its rows. `real` says
which of the values exist: a head's last tile may have fewer.
"""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.coded_triton import RUN, main_bits
from pykv.kernels.jit_triton import device
from pykv.kernels.plain_triton import PAGE

BLOCK = tl.constexpr(32)
RUNS = tl.constexpr(128)  # of a tile
MOST = tl.constexpr(65504.0)  # of a float16
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: a float32 plus this has no fraction


@device
def half(x):
    """Rounded to float16, kept as float32; larger values are clamped."""
    return tl.minimum(tl.maximum(x, -MOST), MOST).to(tl.float16).to(tl.float32)


@device
def rounded(x):
    """The nearest whole number, of two the even one; |x| at most 2**22."""
    return (x + ROUNDER) - ROUNDER


@device
def ratio(x, s):
    """x / s, and 0 where s is 0."""
    zero = s == 0
    return tl.where(zero, 0.0, tl.div_rn(x, tl.where(zero, 1.0, s)))


@device
def reciprocal(d):
    """1 / d, and 0 where that is not a finite float32."""
    inverse = tl.div_rn(1.0 + tl.zeros_like(d), tl.where(d == 0, 1.0, d))
    return tl.where((d == 0) | (tl.abs(inverse) > 3.4028234e38), 0.0, inverse)


@device
def extreme(x, real):
    """Of each row the value of largest magnitude, with its sign; the first of equals."""
    size = tl.where(real, tl.abs(x), -1.0)
    top = tl.max(size, 1, keep_dims=True)
    i = tl.arange(0, x.shape[1])[None, :] + tl.zeros_like(x).to(tl.int32)
    first = tl.min(tl.where(size == top, i, 1 << 20), 1, keep_dims=True)
    # -0.0 added to any value leaves it, a zero's sign included
    return tl.sum(tl.where(i == first, x, -0.0), 1, keep_dims=True)


@device
def least(x, real):
    """The smallest of a row's values that exist, 0 where none does; all are finite."""
    found = tl.min(tl.where(real, x, float("inf")), 1, keep_dims=True)
    return tl.where(found == float("inf"), 0.0, found)


@device
def largest(x, real):
    """The largest of a row's values that exist, 0 where none does; all are finite."""
    found = tl.max(tl.where(real, x, float("-inf")), 1, keep_dims=True)
    return tl.where(found == float("-inf"), 0.0, found)


@device
def nearest(x, levels, N: tl.constexpr):
    """The code of the level nearest to x, of two the upper one."""
    code = tl.zeros_like(x).to(tl.int32)
    for k in tl.static_range(N - 1):
        middle = tl.div_rn(tl.load(levels + k) + tl.load(levels + k + 1), 2.0)
        code += (x >= middle).to(tl.int32)
    return code


@device
def one_by_one(x):
    """[rows, 32] -> [rows, 1]: the sum of each, one float32 after the other."""
    parts = (x,)
    for k in tl.static_range(5):
        finer = ()
        for i in tl.static_range(1 << k):
            two = tl.reshape(parts[i], (x.shape[0], 2, 16 >> k))
            finer = finer + tl.split(tl.permute(two, (0, 2, 1)))
        parts = finer
    total = parts[0]
    for i in tl.static_range(1, 32):
        total += parts[i]
    return total


@device
def places(b, BY_CHANNEL: tl.constexpr):
    """Channels and tokens of tile b, i32 that make [64, 32] together."""
    row, column = tl.arange(0, PAGE)[:, None], tl.arange(0, BLOCK)[None, :]
    if BY_CHANNEL:
        c, t = row // 2 + b * BLOCK, row % 2 * BLOCK + column
    else:
        c, t = column + b * BLOCK, row
    return c, t


@device
def tile(
    source, b, D: tl.constexpr, KEYS: tl.constexpr, MAPPED: tl.constexpr, BY_CHANNEL: tl.constexpr
):
    """Tile b of a tail page at `source`, or of rows [64, D], and what of it is real."""
    c, t = places(b, BY_CHANNEL)
    if MAPPED:
        at = t * D + c
    elif KEYS:
        at = c * PAGE + t
    else:
        at = (c // BLOCK * PAGE + t) * BLOCK + c % BLOCK
    real = (c < D) & (t >= 0)
    return tl.load(source + at, real, 0.0).to(tl.float32), real


@device
def put_bits(set_, codes, b, shift: tl.constexpr, WIDTH: tl.constexpr, limit: tl.constexpr):
    """WIDTH bits of each code of tile b, from bit `shift` on, to a set of `limit` bytes.

    codes i32 in the order of a page's runs.
    """
    PER: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = RUNS // PER * RUN
    bits = tl.reshape((codes >> shift) & ((1 << WIDTH) - 1), (RUNS // PER, PER, RUN))
    at = tl.arange(0, PER)[None, :, None] * WIDTH
    units = tl.reshape(tl.sum(bits << at, 1), (BYTES,))
    place = tl.arange(0, BYTES) + b * BYTES
    tl.store(set_ + place, units.to(tl.uint8), place < limit)


@device
def put_codes(page, codes, b, BITS: tl.constexpr, N: tl.constexpr):
    """Tile b to the sets of a page of N runs."""
    W: tl.constexpr = main_bits(BITS)
    put_bits(page, codes, b, 0, W, N * 2 * W)
    if W != BITS:
        put_bits(page + N * 2 * W, codes, b, W, 1, (N + 7) // 8 * RUN)


@device
def put_halves(address, place, x, mask):
    """float32 to float16 at `address`, clamped."""
    tl.store(address.to(tl.pointer_type(tl.float16)) + place, half(x).to(tl.float16), mask)
