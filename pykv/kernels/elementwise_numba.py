"""Norms, RoPE, activations and row copies.

Rows are contiguous float32. Buffers end on slack, so that the last vector of a buffer may run over.
"""

from __future__ import annotations

import numpy as np

from pykv.kernels.jit_numba import device
from pykv.kernels.math_numba import exp16, sigmoid16
from pykv.kernels.simd import (
    divide,
    fma,
    fma_scalar,
    reduce_add,
    splat,
)
from pykv.kernels.simd_memory import (
    load_f32,
    put_f32,
    scalar_f32,
    scalar_i32,
    scalar_i64,
    store_f32,
)

f = np.float32


# ctx: x, weight, out, n, rows per task, rows, eps
def rms_norm(ctx, task, worker):
    """out = x / sqrt(mean(x**2) + eps) * weight for rows of n values."""
    n, per_task = scalar_i64(ctx + 24), scalar_i64(ctx + 32)
    weight, eps = scalar_i64(ctx + 8), scalar_f32(ctx + 48)
    for row in range(task * per_task, min(task * per_task + per_task, scalar_i64(ctx + 40))):
        x, out = scalar_i64(ctx) + row * n * 4, scalar_i64(ctx + 16) + row * n * 4
        total, whole = splat(f(0)), n // 16 * 16
        for i in range(0, whole, 16):
            v = load_f32(x + i * 4)
            total = fma(v, v, total)
        squares = reduce_add(total)
        for i in range(whole, n):
            squares = fma_scalar(scalar_f32(x + i * 4), scalar_f32(x + i * 4), squares)
        scale = f(1) / np.sqrt(squares / f(n) + eps)
        for i in range(0, whole, 16):
            store_f32(out + i * 4, load_f32(x + i * 4) * scale * load_f32(weight + i * 4))
        for i in range(whole, n):
            put_f32(out + i * 4, scalar_f32(x + i * 4) * scale * scalar_f32(weight + i * 4))


# ctx: x, heads, d, n_rot, step between the two of a pair, step between pairs, cos, sin
# (f32 [rows][n_rot / 2]), scale, first channel that turns
def rope(ctx, task, worker):
    """Turn one row's heads in place, and multiply them by `scale`."""
    heads, d, n_rot = scalar_i64(ctx + 8), scalar_i64(ctx + 16), scalar_i64(ctx + 24)
    other, step, scale = scalar_i64(ctx + 32) * 4, scalar_i64(ctx + 40) * 4, scalar_f32(ctx + 64)
    half = n_rot // 2
    cos, sin = scalar_i64(ctx + 48) + task * half * 4, scalar_i64(ctx + 56) + task * half * 4
    x, first = scalar_i64(ctx) + task * heads * d * 4, scalar_i64(ctx + 72)
    for h in range(heads):
        head = x + h * d * 4
        for i in range(half):
            at = head + first * 4 + i * step
            a, b = scalar_f32(at), scalar_f32(at + other)
            c, s = scalar_f32(cos + i * 4), scalar_f32(sin + i * 4)
            put_f32(at, (a * c - b * s) * scale)
            put_f32(at + other, (a * s + b * c) * scale)
        if scale != f(1):
            for i in range(first):
                put_f32(head + i * 4, scalar_f32(head + i * 4) * scale)
            for i in range(first + n_rot, d):
                put_f32(head + i * 4, scalar_f32(head + i * 4) * scale)


# ctx: gate, up, out, values, values per task (a multiple of 16)
def swiglu(ctx, task, worker):
    """out = gate * sigmoid(gate) * up."""
    per_task = scalar_i64(ctx + 32)
    first = task * per_task
    gate, up, out = scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16)
    for i in range(first, min(first + per_task, scalar_i64(ctx + 24)), 16):
        g = load_f32(gate + i * 4)
        store_f32(out + i * 4, g * sigmoid16(g) * load_f32(up + i * 4))


@device
def gelu16(x):
    """The tanh form of GELU, as x * sigmoid(2u)."""
    u = fma(x * x * x, splat(f(0.044715)), x) * f(0.7978845608028654)
    return divide(x, splat(f(1.0)) + exp16(u * f(-2.0)))


# ctx as for swiglu
def geglu(ctx, task, worker):
    """out = gelu(gate) * up."""
    per_task = scalar_i64(ctx + 32)
    first = task * per_task
    gate, up, out = scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16)
    for i in range(first, min(first + per_task, scalar_i64(ctx + 24)), 16):
        store_f32(out + i * 4, gelu16(load_f32(gate + i * 4)) * load_f32(up + i * 4))


# ctx: x, y, out, values, factor
def add(ctx, task, worker):
    """out = x * factor + y, or x * factor where y is 0."""
    x, y, out = scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16)
    factor = splat(scalar_f32(ctx + 32))
    for i in range(0, scalar_i64(ctx + 24), 16):
        more = splat(f(0))
        if y != 0:
            more = load_f32(y + i * 4)
        store_f32(out + i * 4, fma(load_f32(x + i * 4), factor, more))


# ctx: x, out, values, limit
def softcap(ctx, task, worker):
    """out = limit * tanh(x / limit)."""
    x, out, limit = scalar_i64(ctx), scalar_i64(ctx + 8), scalar_f32(ctx + 24)
    for i in range(0, scalar_i64(ctx + 16), 16):
        # tanh(u) = 1 - 2 / (e**2u + 1)
        e = exp16(load_f32(x + i * 4) * (f(2) / limit)) + f(1.0)
        store_f32(out + i * 4, (splat(f(1.0)) - divide(splat(f(2.0)), e)) * limit)


# ctx: x, row numbers (int32), out, bytes per row
def take_rows(ctx, task, worker):
    """out[task] = x[rows[task]]."""
    size = scalar_i64(ctx + 24)
    x = scalar_i64(ctx) + scalar_i32(scalar_i64(ctx + 8) + task * 4) * size
    out = scalar_i64(ctx + 16) + task * size
    for i in range(0, size, 4):
        put_f32(out + i, scalar_f32(x + i))


# ctx: x, bias, out, n
def bias(ctx, task, worker):
    """out = x + bias, for row `task` of n values."""
    n = scalar_i64(ctx + 24)
    x, out = scalar_i64(ctx) + task * n * 4, scalar_i64(ctx + 16) + task * n * 4
    for i in range(n):
        put_f32(out + i * 4, scalar_f32(x + i * 4) + scalar_f32(scalar_i64(ctx + 8) + i * 4))


# ctx: x, out, values per row of x, values per row of out
def resize_rows(ctx, task, worker):
    """out[task] = x[task], cut or filled up with zeros."""
    n, m = scalar_i64(ctx + 16), scalar_i64(ctx + 24)
    x, out = scalar_i64(ctx) + task * n * 4, scalar_i64(ctx + 8) + task * m * 4
    for i in range(m):
        put_f32(out + i * 4, scalar_f32(x + i * 4) if i < n else f(0))
