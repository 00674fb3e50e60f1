"""Choosing a page's outliers on the GPU; formats/coded.py and nuq4.py say which they are.

The farthest values are found by their distances' bits, which order as they do: eight bits at a time
a histogram says where the last one to be taken lies. A page is read once for each.
"""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.coded_triton import RANGES_AT
from pykv.kernels.encode_tiles_triton import BLOCK, places, put_halves, tile
from pykv.kernels.jit_triton import device
from pykv.kernels.outliers_triton import UNUSED
from pykv.kernels.plain_triton import PAGE

DIGITS = tl.constexpr(256)


@device
def ends(source, D: tl.constexpr, MAPPED: tl.constexpr, N: tl.constexpr):
    """Least and largest of each token's D values, f32 [64, 1], without N at either end."""
    low = tl.full((PAGE, 1), float("-inf"), tl.float32)
    high = tl.full((PAGE, 1), float("inf"), tl.float32)
    n_low, n_high = tl.zeros((PAGE, 1), tl.int32), tl.zeros((PAGE, 1), tl.int32)
    for _ in range(N + 1):
        # the next value inwards, and how many there are of it, of each column first
        up = tl.full((PAGE, BLOCK), float("inf"), tl.float32)
        down = tl.full((PAGE, BLOCK), float("-inf"), tl.float32)
        n_up, n_down = tl.zeros((PAGE, BLOCK), tl.int32), tl.zeros((PAGE, BLOCK), tl.int32)
        for b in range((D + 31) // 32):
            x, real = tile(source, b, D, False, MAPPED, False)
            y = tl.where(real & (x > low), x, float("inf"))
            n_up = tl.where(y < up, 1, n_up + (y == up).to(tl.int32))
            up = tl.minimum(up, y)
            z = tl.where(real & (x < high), x, float("-inf"))
            n_down = tl.where(z > down, 1, n_down + (z == down).to(tl.int32))
            down = tl.maximum(down, z)
        next_low, next_high = tl.min(up, 1, keep_dims=True), tl.max(down, 1, keep_dims=True)
        n_up = tl.sum(tl.where(up == next_low, n_up, 0), 1, keep_dims=True)
        n_down = tl.sum(tl.where(down == next_high, n_down, 0), 1, keep_dims=True)
        low, high = tl.where(n_low <= N, next_low, low), tl.where(n_high <= N, next_high, high)
        n_low += tl.where(n_low <= N, n_up, 0)
        n_high += tl.where(n_high <= N, n_down, 0)
    return low, high


@device
def beyond(x, real, b, extra, low, high, D: tl.constexpr, KEYS: tl.constexpr):
    """How far outside their ranges values are, as the bits of a float32; 0 where they are not."""
    if KEYS:
        c, _ = places(b, True)
        scale = tl.load(extra + RANGES_AT + c, c < D, 0.0)
        distance = tl.abs(x - tl.load(extra + RANGES_AT + D + c, c < D, 0.0)) - scale
    else:
        distance = tl.maximum(x - high, low - x)
    return tl.where(real & (distance > 0), distance.to(tl.int32, bitcast=True), 0)


@device
def last_taken(
    source, extra, low, high, D: tl.constexpr, KEYS: tl.constexpr, MAPPED: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The N-th largest distance's bits, and how many of those that have them are taken.

    Where fewer than N values lie beyond their ranges the first is below 0.
    """
    found, left, digit = 0, N, tl.arange(0, DIGITS)
    for k in range(4):
        shift = 24 - k * 8
        counts = tl.zeros((DIGITS,), tl.int32)
        for b in range((D + 31) // 32):
            x, real = tile(source, b, D, KEYS, MAPPED, KEYS)
            bits = tl.reshape(beyond(x, real, b, extra, low, high, D, KEYS), (PAGE * BLOCK,))
            mask = (bits > 0) & (bits >> shift >> 8 == found)
            counts += tl.histogram(bits >> shift & (DIGITS - 1), DIGITS, mask)
        from_here_on = tl.sum(counts) - tl.cumsum(counts) + counts
        last = tl.sum((from_here_on >= left).to(tl.int32)) - 1
        left -= tl.sum(tl.where(digit == last, from_here_on - counts, 0))
        found = found * DIGITS + last
    return found, left


@device
def take(
    source, slots, extra, low, high, D: tl.constexpr, KEYS: tl.constexpr, MAPPED: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Write a page's N outliers; the ranges f32 [64, 1] that values have without them."""
    last, left = last_taken(source, extra, low, high, D, KEYS, MAPPED, N)
    rest_low = tl.full((PAGE, BLOCK), float("inf"), tl.float32)
    rest_high = tl.full((PAGE, BLOCK), float("-inf"), tl.float32)
    above, equal = 0, 0  # before this tile
    for b in range((D + 31) // 32):
        x, real = tile(source, b, D, KEYS, MAPPED, KEYS)
        bits = tl.reshape(beyond(x, real, b, extra, low, high, D, KEYS), (PAGE * BLOCK,))
        is_above, is_equal = (bits > tl.maximum(last, 0)).to(tl.int32), (bits == last).to(tl.int32)
        # both in one sum; a tile has fewer than 2**15 values
        both = is_above | is_equal << 16
        before = tl.cumsum(both, 0) - both
        equal_before = (before >> 16) + equal
        taken = (is_above == 1) | ((is_equal == 1) & (equal_before < left))
        slot = (before & 0xFFFF) + above + tl.minimum(equal_before, left)
        put(slots, slot, tl.arange(0, PAGE * BLOCK) + b * (PAGE * BLOCK),
            tl.reshape(x, (PAGE * BLOCK,)), taken, N)  # fmt: skip
        above += tl.sum(is_above)
        equal += tl.sum(is_equal)
        rest = real & (tl.reshape(taken.to(tl.int32), (PAGE, BLOCK)) == 0)
        rest_low = tl.minimum(rest_low, tl.where(rest, x, float("inf")))
        rest_high = tl.maximum(rest_high, tl.where(rest, x, float("-inf")))
    i = tl.arange(0, PAGE * BLOCK)
    for first in range(0, N, PAGE * BLOCK):
        slot = i + first
        unused = (slot >= above + tl.minimum(equal, left)) & (slot < N)
        put(slots, slot, i * 0 + UNUSED, i * 0.0, unused, N)
    return tl.min(rest_low, 1, keep_dims=True), tl.max(rest_high, 1, keep_dims=True)


@device
def put(slots, slot, place, value, mask, N: tl.constexpr):
    """Entries of a page's N outliers."""
    tl.store(slots.to(tl.pointer_type(tl.uint16)) + slot, place.to(tl.uint16), mask)
    put_halves(slots + 2 * N, slot, value, mask)
