"""Encoding full tail pages on the GPU: layout in formats/coded.py, bytes those of its codecs.

A format gives, beside what coded_triton.py asks for,
    fit(x, real, extra, n, BITS, AXIS) -> scale, minimum, inverse    along AXIS of x, kept as 1
    code(x, scale, minimum, inverse, extra, BITS) -> i32
where `real` says which of the values exist and n how many a group of theirs has. `inverse` is
whatever else codes are made with. Compile with `enable_fp_fusion=False`: a product and a sum that
are rounded once choose other codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.coded_triton import (
    RANGES_AT,
    code_bytes_keys,
    code_bytes_values,
    main_bits,
)
from pykv.kernels.plain_triton import ALIGN, PAGE, page_at

BLOCK = tl.constexpr(32)
MOST = tl.constexpr(65504.0)  # of a float16
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: a float32 plus this has no fraction


@triton.jit
def half(x):
    """Rounded to float16, kept as float32; larger values are clamped."""
    return tl.minimum(tl.maximum(x, -MOST), MOST).to(tl.float16).to(tl.float32)


@triton.jit
def rounded(x):
    """The nearest whole number, of two the even one; |x| at most 2**22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def ratio(x, s):
    """x / s, and 0 where s is 0."""
    zero = s == 0
    return tl.where(zero, 0.0, tl.div_rn(x, tl.where(zero, 1.0, s)))


@triton.jit
def reciprocal(d):
    """1 / d, and 0 where that is not a finite float32."""
    inverse = tl.div_rn(1.0 + tl.zeros_like(d), tl.where(d == 0, 1.0, d))
    return tl.where((d == 0) | (tl.abs(inverse) > 3.4028234e38), 0.0, inverse)


@triton.jit
def index_along(x, AXIS: tl.constexpr):
    """0, 1, 2 ... along AXIS of a tile with three axes."""
    if AXIS == 0:
        return tl.arange(0, x.shape[0])[:, None, None] + tl.zeros_like(x).to(tl.int32)
    if AXIS == 1:
        return tl.arange(0, x.shape[1])[None, :, None] + tl.zeros_like(x).to(tl.int32)
    return tl.arange(0, x.shape[2])[None, None, :] + tl.zeros_like(x).to(tl.int32)


@triton.jit
def extreme(x, real, AXIS: tl.constexpr):
    """The value of largest magnitude, with its sign; the first of equals."""
    size = tl.where(real, tl.abs(x), -1.0)
    top, i = tl.max(size, AXIS, keep_dims=True), index_along(x, AXIS)
    first = tl.min(tl.where(size == top, i, 1 << 20), AXIS, keep_dims=True)
    # -0.0 added to any value leaves it, a zero's sign included
    return tl.sum(tl.where(i == first, x, -0.0), AXIS, keep_dims=True)


@triton.jit
def least(x, real, AXIS: tl.constexpr):
    """The smallest of the values that exist, 0 where none does; all are finite."""
    found = tl.min(tl.where(real, x, float("inf")), AXIS, keep_dims=True)
    return tl.where(found == float("inf"), 0.0, found)


@triton.jit
def largest(x, real, AXIS: tl.constexpr):
    """The largest of the values that exist, 0 where none does; all are finite."""
    found = tl.max(tl.where(real, x, float("-inf")), AXIS, keep_dims=True)
    return tl.where(found == float("-inf"), 0.0, found)


@triton.jit
def nearest(x, levels, N: tl.constexpr):
    """The code of the level nearest to x, of two the upper one."""
    code = tl.zeros_like(x).to(tl.int32)
    for k in tl.static_range(N - 1):
        middle = tl.div_rn(tl.load(levels + k) + tl.load(levels + k + 1), 2.0)
        code += (x >= middle).to(tl.int32)
    return code


@triton.jit
def one_by_one(x, AXIS: tl.constexpr):
    """The sum along AXIS, one float32 after the other."""
    i = index_along(x, AXIS)
    total = tl.sum(tl.where(i == 0, x, 0.0), AXIS, keep_dims=True)
    for k in range(1, x.shape[AXIS]):
        total += tl.sum(tl.where(i == k, x, 0.0), AXIS, keep_dims=True)
    return total


@triton.jit
def put_bits(page, codes, RUNS: tl.constexpr, shift: tl.constexpr, WIDTH: tl.constexpr, limit):
    """WIDTH bits of each code, from bit `shift` on, to a set of `limit` bytes.

    codes i32, RUNS runs of 16, one after the other.
    """
    PER: tl.constexpr = 8 // WIDTH
    bits = tl.reshape((codes >> shift) & ((1 << WIDTH) - 1), (RUNS // PER, PER, 16))
    at = tl.arange(0, PER)[None, :, None] * WIDTH
    units = tl.reshape(tl.sum(bits << at, 1), (RUNS // PER * 16,))
    place = tl.arange(0, RUNS // PER * 16)
    tl.store(page + place, units.to(tl.uint8), place < limit)


@triton.jit
def put_codes(page, codes, RUNS: tl.constexpr, BITS: tl.constexpr, n):
    """The page's sets of bits, of n real runs."""
    W: tl.constexpr = main_bits(BITS)
    put_bits(page, codes, RUNS, 0, W, n * 2 * W)
    if W != BITS:
        put_bits(page + n * 2 * W, codes, RUNS, W, 1, (n + 7) // 8 * 16)


@triton.jit
def put_halves(address, place, x, mask):
    """float32 to float16 at `address`, clamped."""
    tl.store(address.to(tl.pointer_type(tl.float16)) + place, half(x).to(tl.float16), mask)


@triton.jit
def encode_keys(
    x, page, extra, D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, AXIS: tl.constexpr,
    PARAMETERS: tl.constexpr, fit: tl.constexpr, code: tl.constexpr,
):  # fmt: skip
    """x f32 [WIDTH, 64] to a key page."""
    scales = page + code_bytes_keys(D, BITS)
    if AXIS == "channel":
        # channel, 32-token group, token
        y = tl.reshape(x, (WIDTH, 2, BLOCK))
        c, group = tl.arange(0, WIDTH)[:, None, None], tl.arange(0, 2)[None, :, None]
        real = (c < D) & (group + tl.arange(0, BLOCK)[None, None, :] >= 0)
        s, m, inverse = fit(y, real, extra, BLOCK, BITS, 2)
        place = tl.where(c < D, group * D + c, 2 * D)
        COUNT: tl.constexpr = 2 * D
    else:
        # block of channels, channel, token; one block of all where a token has one scale
        BLOCKS: tl.constexpr = WIDTH // BLOCK if AXIS == "block" else 1
        COUNT: tl.constexpr = (D + 31) // 32 * PAGE if AXIS == "block" else PAGE
        y = tl.reshape(x, (BLOCKS, WIDTH // BLOCKS, PAGE))
        block, t = tl.arange(0, BLOCKS)[:, None, None], tl.arange(0, PAGE)[None, None, :]
        c = block * (WIDTH // BLOCKS) + tl.arange(0, WIDTH // BLOCKS)[None, :, None]
        real = (c < D) & (t >= 0)
        if AXIS == "range":
            s = tl.load(extra + RANGES_AT + c, c < D, 0.0)
            m = tl.load(extra + RANGES_AT + D + c, c < D, 0.0)
            inverse = s
        else:
            s, m, inverse = fit(y, real, extra, BLOCK if AXIS == "block" else D, BITS, 1)
        place = block * PAGE + t
    if PARAMETERS > 0 and AXIS != "range":
        put_halves(scales, place, s, place < COUNT)
    if PARAMETERS == 2 and AXIS != "range":
        put_halves(scales + COUNT * 2, place, m, place < COUNT)
    codes = code(y, s, m, inverse, extra, BITS)
    codes = tl.where(real, codes, 0)
    put_codes(page, codes, WIDTH * 4, BITS, D * 4)


@triton.jit
def encode_values(
    x, page, extra, D: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr, AXIS: tl.constexpr,
    PARAMETERS: tl.constexpr, fit: tl.constexpr, code: tl.constexpr,
):  # fmt: skip
    """x f32 [BLOCKS, 64, 32] to a value page; BLOCKS is a power of two."""
    scales = page + code_bytes_values(D, BITS)
    block, t = tl.arange(0, BLOCKS)[:, None, None], tl.arange(0, PAGE)[None, :, None]
    lane = tl.arange(0, BLOCK)[None, None, :]
    real = (block * 32 + lane < D) & (t >= 0)
    COUNT: tl.constexpr = (D + 31) // 32 * PAGE if AXIS == "block" else PAGE
    if AXIS == "block":
        s, m, inverse = fit(x, real, extra, BLOCK, BITS, 2)
        codes, place = code(x, s, m, inverse, extra, BITS), block * PAGE + t
    else:
        # a token's channels lie along the first axis and the last: bring them together
        y = tl.reshape(tl.permute(x, (1, 0, 2)), (1, PAGE, BLOCKS * BLOCK))
        c = tl.arange(0, BLOCKS * BLOCK)[None, None, :]
        s, m, inverse = fit(y, (c < D) & (t >= 0), extra, D, BITS, 2)
        codes, place = code(y, s, m, inverse, extra, BITS), t
        codes = tl.permute(tl.reshape(codes, (PAGE, BLOCKS, BLOCK)), (1, 0, 2))
    if PARAMETERS > 0:
        put_halves(scales, place, s, place < COUNT)
    if PARAMETERS == 2:
        put_halves(scales + COUNT * 2, place, m, place < COUNT)
    codes = tl.where(real, codes, 0)
    put_codes(page, codes, BLOCKS * 128, BITS, (D + 31) // 32 * 128)


@triton.jit
def encode_pages(
    pool, moves, extra, extra_stride, heads,
    KEYS: tl.constexpr, TAIL: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, PARAMETERS: tl.constexpr,
    fit: tl.constexpr, code: tl.constexpr,
):  # fmt: skip
    """One side of a layer: tail pages to pages, and the tables' entries with them.

    moves i64 [n, 2]: the address of a table's entry, and the new page's place; entries of a layer's
    KV heads follow each other. WIDTH: D, for values filled up to blocks, up to a power of two.
    """
    i = tl.program_id(0)
    entry = tl.load(moves + i * 2).to(tl.pointer_type(tl.int64))
    place, of_head = tl.load(moves + i * 2 + 1), extra + i % heads * extra_stride
    tail, page = page_at(pool, entry).to(tl.pointer_type(TAIL)), pool + place * ALIGN
    if KEYS:
        c, t = tl.arange(0, WIDTH)[:, None], tl.arange(0, PAGE)[None, :]
        x = tl.load(tail + c * PAGE + t, (c < D) & (t >= 0), 0.0).to(tl.float32)
        encode_keys(x, page, of_head, D, WIDTH, BITS, AXIS, PARAMETERS, fit, code)
    else:
        at = tl.arange(0, WIDTH * PAGE)
        x = tl.load(tail + at, at < (D + 31) // 32 * 32 * PAGE, 0.0).to(tl.float32)
        x = tl.reshape(x, (WIDTH // BLOCK, PAGE, BLOCK))
        encode_values(x, page, of_head, D, WIDTH // BLOCK, BITS, AXIS, PARAMETERS, fit, code)
    tl.store(entry, place)
