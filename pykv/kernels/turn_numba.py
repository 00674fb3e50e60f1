"""Linear maps of heads: queries on their way to pages that hold mapped keys, pages, and outputs.

A matrix is f32 [d][r], its rows filled up with zeros to a multiple of 16 columns; a head x becomes
x times it. KV heads have a matrix each, or the distance between theirs is 0 bytes.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.jit_numba import device
from pykv.kernels.plain_numba import PAGE
from pykv.kernels.simd import fma, splat
from pykv.kernels.simd_memory import (
    load_f32,
    put_f32,
    scalar_f32,
    scalar_i64,
    stack,
    store_f32,
)

f = np.float32
ROW_BYTES = 2560  # of the widest head


@device
def columns(r):
    """Columns of a matrix's rows."""
    return (r + 15) // 16 * 16


@device
def times_matrix(x, d, matrix, r, out):
    """out[r] = x[d] times the matrix; written in whole vectors."""
    row = columns(r) * 4
    for j in range(0, row, 256):
        a, b, c, e = splat(f(0)), splat(f(0)), splat(f(0)), splat(f(0))
        if j + 256 <= row:
            for i in range(d):
                v, at = splat(scalar_f32(x + i * 4)), matrix + i * row + j
                a, b = fma(v, load_f32(at), a), fma(v, load_f32(at + 64), b)
                c, e = fma(v, load_f32(at + 128), c), fma(v, load_f32(at + 192), e)
            store_f32(out + j, a)
            store_f32(out + j + 64, b)
            store_f32(out + j + 128, c)
            store_f32(out + j + 192, e)
        else:
            for k in range(j, row, 64):
                a = splat(f(0))
                for i in range(d):
                    a = fma(splat(scalar_f32(x + i * 4)), load_f32(matrix + i * row + k), a)
                store_f32(out + k, a)


# ctx: x, x_stride, heads, d, matrices, r, out, out_stride, distance of matrices, heads of a KV head
def turn(ctx, task, worker):
    """Map one head of one row."""
    heads, d, r = scalar_i64(ctx + 16), scalar_i64(ctx + 24), scalar_i64(ctx + 40)
    row, h, mapped = task // heads, task % heads, stack(ROW_BYTES)
    x = scalar_i64(ctx) + row * scalar_i64(ctx + 8) + h * d * 4
    out = scalar_i64(ctx + 48) + row * scalar_i64(ctx + 56) + h * r * 4
    matrix = scalar_i64(ctx + 32) + h // scalar_i64(ctx + 72) * scalar_i64(ctx + 64)
    times_matrix(x, d, matrix, r, mapped)
    for i in range(r):
        put_f32(out + i * 4, scalar_f32(mapped + i * 4))


@device
def turn_keys(x, d, matrix, r, out):
    """f32 [d][64] -> [r][64]."""
    row = columns(r) * 4
    for j in range(r):
        a, b, c, e = splat(f(0)), splat(f(0)), splat(f(0)), splat(f(0))
        for i in range(d):
            v, at = splat(scalar_f32(matrix + i * row + j * 4)), x + i * 256
            a, b = fma(v, load_f32(at), a), fma(v, load_f32(at + 64), b)
            c, e = fma(v, load_f32(at + 128), c), fma(v, load_f32(at + 192), e)
        to = out + j * 256
        store_f32(to, a)
        store_f32(to + 64, b)
        store_f32(to + 128, c)
        store_f32(to + 192, e)


@device
def turn_values(x, d, matrix, r, out):
    """f32 [ceil(d / 32)][64][32] -> [ceil(r / 32)][64][32]."""
    head, mapped = stack(ROW_BYTES), stack(ROW_BYTES)
    blocks = (r + 31) // 32
    for i in range(blocks * 2):
        store_f32(mapped + i * 64, splat(f(0)))
    for t in range(PAGE):
        for block in range((d + 31) // 32):
            at = x + (block * PAGE + t) * 128
            store_f32(head + block * 128, load_f32(at))
            store_f32(head + block * 128 + 64, load_f32(at + 64))
        times_matrix(head, d, matrix, r, mapped)
        for block in range(blocks):
            to = out + (block * PAGE + t) * 128
            store_f32(to, load_f32(mapped + block * 128))
            store_f32(to + 64, load_f32(mapped + block * 128 + 64))
