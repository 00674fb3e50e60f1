"""Products of heads, each with a matrix of its own, and channels that are copied.

Templates: `unpack`, `BLOCK_LEN` and `BLOCK_BYTES` are a weight type's, as in matvec_numba.py.
"""

from __future__ import annotations

from pykv.kernels.jit_numba import device
from pykv.kernels.simd import reduce_add
from pykv.kernels.simd_group import add_groups, add_row_products, zeros
from pykv.kernels.simd_memory import put_f32, scalar_f32, scalar_i64

# bound per weight type by the loader
BLOCK_LEN = BLOCK_BYTES = 1


@device
def unpack(block, part):
    """A weight type's own function takes this one's place."""
    return zeros(1)[0], zeros(1)[0]


# ctx: weights, bytes of a row, blocks of a row, x [rows][heads][blocks], out [rows][heads][n_out],
# rows, heads, n_out, outputs per task, values of a row of x
def heads(ctx, task, worker):
    """out[i, h] = the weights of head h times x[i, h], for the task's outputs of one head."""
    row_bytes, n_blocks = scalar_i64(ctx + 8), scalar_i64(ctx + 16)
    rows, heads, n_out = scalar_i64(ctx + 40), scalar_i64(ctx + 48), scalar_i64(ctx + 56)
    per_task, width = scalar_i64(ctx + 64), scalar_i64(ctx + 72)
    parts = (n_out + per_task - 1) // per_task
    h, first = task // parts, task % parts * per_task
    weights = scalar_i64(ctx) + h * n_out * row_bytes
    x, out = scalar_i64(ctx + 24) + h * width * 4, scalar_i64(ctx + 32) + h * n_out * 4
    for r in range(first, min(first + per_task, n_out)):
        for i in range(rows):
            a0, a1 = zeros(1), zeros(1)
            at = x + i * heads * width * 4
            for b in range(n_blocks):
                block = weights + r * row_bytes + b * BLOCK_BYTES
                for part in range(BLOCK_LEN // 32):
                    low, high = unpack(block, part)
                    a0 = add_row_products(a0, at, 0, low)
                    a1 = add_row_products(a1, at + 64, 0, high)
                    at += 128
            total = reduce_add(add_groups(a0, a1)[0])
            put_f32(out + (i * heads * n_out + r) * 4, total)


# ctx: x, values of its rows, first channel, out, values of its rows, first channel there, channels,
# rows, rows per task
def copy_columns(ctx, task, worker):
    """Some channels of x to some of out."""
    n, per_task = scalar_i64(ctx + 48), scalar_i64(ctx + 64)
    for row in range(task * per_task, min(task * per_task + per_task, scalar_i64(ctx + 56))):
        x = scalar_i64(ctx) + (row * scalar_i64(ctx + 8) + scalar_i64(ctx + 16)) * 4
        out = scalar_i64(ctx + 24) + (row * scalar_i64(ctx + 32) + scalar_i64(ctx + 40)) * 4
        for i in range(n):
            put_f32(out + i * 4, scalar_f32(x + i * 4))
