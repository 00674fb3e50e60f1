"""Weights times an input row through exact byte products, for CPUs with AVX-512 VNNI.

The input row is written as integers of 20 or 22 bits with a scale for each 32 values, an integer as
three signed bytes. A weight's code is a byte as it stands in the file, so the products of codes and
bytes add up exactly; only the scales are applied in float32. A value is off by 2**-21 or 2**-23 of
the largest of its 32 neighbours, which is what float32 sums of that length lose as well.

A group is 128 inputs, 640 bytes: two vectors of 64 bytes for each of three digits (the highest
first), then for two int32 sums 16 scales each, then for each 16 offsets: ZERO times the sum of 16
inputs, in the first of their lanes (of 32 for HALVES). Which inputs stand in which vector is the
type's LAYOUT:
NATURAL  inputs 0-63 | 64-127
HALVES   of each of 4 blocks of 32 the inputs 0-15 | 16-31 (one int32 sum for both)
PAIRS    inputs 0-31, 64-95 | 32-63, 96-127

Templates, bound in `four_rows`, that as `rows` in `row_tile`, that as `tile` in `matvec`. A weight
type gives LAYOUT, RANGE (of the integers), ZERO, and for its blocks
    group_scales(row, first, count, out)    float32 scales of a row's blocks `first` onwards
    group_dot(acc, row, group, n_blocks, x, scales, place)
                                            acc + the products of a group of a row of n_blocks; its
                                            scales are the place-th of those in `scales`
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.jit_numba import inlined as device
from pykv.kernels.simd import (
    absolute,
    all_finite,
    maximum,
    nearest,
    reduce_add,
    reduce_max,
    splat,
    to_i32,
)
from pykv.kernels.simd_control import (
    prefetch,
)
from pykv.kernels.simd_int import (
    digit,
    dot,
    no_sums,
    store_digit,
    sum_lanes,
    times_two_to,
    without_digit,
)
from pykv.kernels.simd_memory import (
    load_f32,
    put_f32,
    scalar_f32,
    scalar_i64,
    stack,
    store_f32,
)

f = np.float32
NATURAL, HALVES, PAIRS = 0, 1, 2
GROUP_INPUTS, GROUP_BYTES = 128, 640
SCALES_AT, OFFSETS_AT = 384, 512
TINY = np.float32(1e-30)  # inputs below it count as zero: the reciprocal would overflow
CHUNK = 32  # groups whose scales are unpacked at a time
AHEAD_BYTES = 8192  # how far ahead of a row its successors are asked for
SCALES_BYTES = 2048  # room for the scales of so many groups, and slack
STACK_BYTES = 4 * SCALES_BYTES + 64
LAYOUT = QUARTERS = 1  # QUARTERS: blocks in four groups
RANGE = ZERO = np.float32(1)
_stub = device(lambda *args: None)
group_scales = group_dot = rows = tile = _stub


@device
def place(layout, block):
    """Where a block of 32 goes: byte of its first and second 16 inputs, sum, lane in that sum."""
    if layout == NATURAL:
        return block * 32, block * 32 + 16, block // 2, block % 2 * 8
    if layout == HALVES:
        return block * 16, 64 + block * 16, 0, block * 4
    return (
        block % 2 * 64 + block // 2 * 32,
        block % 2 * 64 + block // 2 * 32 + 16,
        (block % 2),
        block // 2 * 8,
    )


@device
def digits(out, x):
    """The three digits of 16 integers, at `out`, `out + 128`, `out + 256`, the highest first."""
    low = digit(x)
    rest = without_digit(x, low)
    middle = digit(rest)
    store_digit(out + 256, low)
    store_digit(out + 128, middle)
    store_digit(out, without_digit(rest, middle))


@device
def quantize_block(x, group, block, layout, most, zero):
    """32 inputs at `x` into a group."""
    a, b = load_f32(x), load_f32(x + 64)
    low, high, which, lane = place(layout, block)
    scale = f(0)
    top = reduce_max(maximum(absolute(a), absolute(b)))
    if not (all_finite(a) and all_finite(b)):
        scale = f(np.nan)  # whatever is multiplied by it shows that something is wrong
        a, b = splat(f(0)), splat(f(0))
    elif top > TINY:
        inverse = most / top
        scale = top / most
        a, b = nearest(a * inverse), nearest(b * inverse)
    else:
        a, b = splat(f(0)), splat(f(0))
    i, j = to_i32(a), to_i32(b)
    digits(group + low, i)
    digits(group + high, j)
    at = group + (which * 16 + lane) * 4
    for k in range(4 if layout == HALVES else 8):
        put_f32(at + k * 4 + SCALES_AT, scale)
        put_f32(at + k * 4 + OFFSETS_AT, f(0))
    if layout == HALVES:
        put_f32(at + OFFSETS_AT, f(sum_lanes(i + j)) * scale * zero)
    else:
        put_f32(at + OFFSETS_AT, f(sum_lanes(i)) * scale * zero)
        put_f32(at + 16 + OFFSETS_AT, f(sum_lanes(j)) * scale * zero)


# ctx: x, x_stride, n_blocks (of 32), out, out_stride
def quantize(ctx, task, worker):
    """Write one input row as groups; blocks that fill up the last group are zero."""
    x = scalar_i64(ctx) + task * scalar_i64(ctx + 8)
    n_blocks, out = scalar_i64(ctx + 16), scalar_i64(ctx + 24) + task * scalar_i64(ctx + 32)
    for g in range((n_blocks + 3) // 4):
        group = out + g * GROUP_BYTES
        if g * 4 + 4 > n_blocks:
            for i in range(GROUP_BYTES // 64):
                store_f32(group + i * 64, splat(f(0)))
        for b in range(min(4, n_blocks - g * 4)):
            quantize_block(x + (g * 4 + b) * 128, group, b, LAYOUT, RANGE, ZERO)


@device
def products(codes, x):
    """Exact sums of codes times the integers whose first digits are at `x`."""
    t = dot(no_sums(), codes, x)
    t = dot(times_two_to(t, 8), codes, x + 128)
    return dot(times_two_to(t, 8), codes, x + 256)


@device
def both_products(low, high, x):
    """Like `products`, for two vectors of codes whose sums go to the same lanes."""
    t = dot(dot(no_sums(), low, x), high, x + 64)
    t = dot(dot(times_two_to(t, 8), low, x + 128), high, x + 192)
    return dot(dot(times_two_to(t, 8), low, x + 256), high, x + 320)


# a type whose scales lie beside its codes needs no room for them
@device
def no_scales(row, first, count, out):
    """Nothing."""


def four_rows(w, row_bytes, row, last, n_groups, n_blocks, x, scales, sums):
    """The products of four rows with one input; together, so that latencies hide each other.

    Rows beyond `last` are the last row again. The four float32 go to `sums`.
    """
    w0, w1 = w + row * row_bytes, w + min(row + 1, last) * row_bytes
    w2, w3 = w + min(row + 2, last) * row_bytes, w + min(row + 3, last) * row_bytes
    a0, a1, a2, a3 = splat(f(0)), splat(f(0)), splat(f(0)), splat(f(0))
    # the rows to come are asked for little by little: a burst would fill up the core's buffers
    ahead, step = w0 + AHEAD_BYTES, (4 * row_bytes + n_groups - 1) // n_groups
    for start in range(0, n_groups, CHUNK):
        first = start * QUARTERS >> 2
        count = min(CHUNK * QUARTERS >> 2, n_blocks - first)
        group_scales(w0, first, count, scales)
        group_scales(w1, first, count, scales + SCALES_BYTES)
        group_scales(w2, first, count, scales + 2 * SCALES_BYTES)
        group_scales(w3, first, count, scales + 3 * SCALES_BYTES)
        for g in range(start, min(start + CHUNK, n_groups)):
            at, k = x + g * GROUP_BYTES, g - start
            for i in range(0, step, 64):
                prefetch(ahead + g * step + i)
            a0 = group_dot(a0, w0, g, n_blocks, at, scales, k)
            a1 = group_dot(a1, w1, g, n_blocks, at, scales + SCALES_BYTES, k)
            a2 = group_dot(a2, w2, g, n_blocks, at, scales + 2 * SCALES_BYTES, k)
            a3 = group_dot(a3, w3, g, n_blocks, at, scales + 3 * SCALES_BYTES, k)
    put_f32(sums, reduce_add(a0))
    put_f32(sums + 4, reduce_add(a1))
    put_f32(sums + 8, reduce_add(a2))
    put_f32(sums + 12, reduce_add(a3))


def row_tile(ctx, row, last, scales):
    """Rows `row` to `row` + 3, as far as `last`, for all inputs."""
    out, add = scalar_i64(ctx + 48), scalar_i64(ctx + 80)
    sums = scales + 4 * SCALES_BYTES
    for i in range(scalar_i64(ctx + 40)):
        x = scalar_i64(ctx + 24) + i * scalar_i64(ctx + 32)
        rows(
            scalar_i64(ctx), scalar_i64(ctx + 8), row, last,
            scalar_i64(ctx + 16), scalar_i64(ctx + 88), x, scales, sums,
        )  # fmt: skip
        at = i * scalar_i64(ctx + 56) + row * 4
        for k in range(min(4, last + 1 - row)):
            value = scalar_f32(sums + k * 4)
            if add != 0:
                value += scalar_f32(add + at + k * 4)
            put_f32(out + at + k * 4, value)


# ctx: weights, row_bytes, n_groups, x (groups), x_stride, n_x, out, out_stride, n_rows,
# rows_per_task (a multiple of 4), add or 0, n_blocks
def matvec(ctx, task, worker):
    """out[i, r] = sum over c of w[r, c] * x[i, c], plus add[i, r], for the task's rows r."""
    scales, per_task = stack(STACK_BYTES), scalar_i64(ctx + 72)
    last = min(task * per_task + per_task, scalar_i64(ctx + 64)) - 1
    for row in range(task * per_task, last + 1, 4):
        tile(ctx, row, last, scales)
