"""Weights times a few input rows, and weights decoded to float32, straight from GGUF blocks.

Templates: `unpack`, `BLOCK_LEN` and `BLOCK_BYTES` are a weight type's; ROWS is the number of input
rows that share one pass over the weights. Each row's sum is taken in the same order whatever ROWS
is, which is what `--deterministic` stands on.
"""

from __future__ import annotations

from pykv.kernels.jit_numba import device
from pykv.kernels.simd import (
    reduce_add,
)
from pykv.kernels.simd_group import (
    add_groups,
    add_row_products,
    zeros,
)
from pykv.kernels.simd_memory import (
    put_f32,
    scalar_f32,
    scalar_i32,
    scalar_i64,
    store_f32,
)

# bound per weight type by the loader
ROWS = BLOCK_LEN = BLOCK_BYTES = 1


@device
def unpack(block, part):
    """A weight type's own function takes this one's place."""
    return zeros(1)[0], zeros(1)[0]


# ctx: weights, row_bytes, n_blocks, x, x_stride, out, out_stride, n_rows, rows_per_task, add or 0
def matvec(ctx, task, worker):
    """out[i, r] = sum over c of w[r, c] * x[i, c], plus add[i, r], for the task's rows r."""
    w, row_bytes, n_blocks = scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16)
    x, x_stride = scalar_i64(ctx + 24), scalar_i64(ctx + 32)
    out, out_stride = scalar_i64(ctx + 40), scalar_i64(ctx + 48)
    n_rows, per_task, add = scalar_i64(ctx + 56), scalar_i64(ctx + 64), scalar_i64(ctx + 72)
    first = task * per_task
    for r in range(first, min(first + per_task, n_rows)):
        row = w + r * row_bytes
        a0, a1 = zeros(ROWS), zeros(ROWS)
        at = x
        for b in range(n_blocks):
            for part in range(BLOCK_LEN // 32):
                low, high = unpack(row + b * BLOCK_BYTES, part)
                a0 = add_row_products(a0, at, x_stride, low)
                a1 = add_row_products(a1, at + 64, x_stride, high)
                at += 128
        i = 0
        for total in add_groups(a0, a1):
            value = reduce_add(total)
            if add != 0:
                value += scalar_f32(add + i * out_stride + r * 4)
            put_f32(out + i * out_stride + r * 4, value)
            i += 1  # noqa: SIM113 - Numba cannot enumerate the members of a tuple


# ctx: weights, row_bytes, n_blocks, rows (addresses of int32 row numbers, or 0), out, out_stride,
# n_rows, rows_per_task
def panel(ctx, task, worker):
    """out[r] = row r of the weights (or row rows[r]) in float32, for the task's rows r."""
    w, row_bytes, n_blocks = scalar_i64(ctx), scalar_i64(ctx + 8), scalar_i64(ctx + 16)
    rows, out, out_stride = scalar_i64(ctx + 24), scalar_i64(ctx + 32), scalar_i64(ctx + 40)
    n_rows, per_task = scalar_i64(ctx + 48), scalar_i64(ctx + 56)
    first = task * per_task
    for r in range(first, min(first + per_task, n_rows)):
        row = w + (r if rows == 0 else scalar_i32(rows + r * 4)) * row_bytes
        at = out + r * out_stride
        for b in range(n_blocks):
            for part in range(BLOCK_LEN // 32):
                low, high = unpack(row + b * BLOCK_BYTES, part)
                store_f32(at, low)
                store_f32(at + 64, high)
                at += 128
