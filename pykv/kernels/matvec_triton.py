"""Matrix-vector products on the GPU that read a GGUF file's blocks as they lie.

A type gives BLOCK_LEN, BLOCK_BYTES and `weight(block, j, table)`: value j of the block that begins
at the address `block`, both tiles of one shape; `table` points to 16 f32, for types that have one.
Blocks of 18 or 34 bytes begin anywhere, so that bytes are loaded one at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def byte_of(address, i):
    """Byte i, as i32."""
    return tl.load(address + i).to(tl.int32)


@triton.jit
def signed(byte):
    """A byte's value as a signed one."""
    return (byte ^ 128) - 128


@triton.jit
def nibble(address, j):
    """Code j of 32: the low nibbles of 16 bytes, then the high ones."""
    return byte_of(address, j % 16) >> j // 16 * 4 & 15


@triton.jit
def half_of(block, at: tl.constexpr):
    """The float16 at byte `at`, as f32; it need not be aligned."""
    bits = tl.load(block + at).to(tl.int32) | tl.load(block + (at + 1)).to(tl.int32) << 8
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def six_bits(scales, i):
    """Scale and minimum i of eight, of 6 bits each, in 12 bytes (Q4_K and Q5_K)."""
    k = i % 4
    low, middle, high = byte_of(scales, k), byte_of(scales, k + 4), byte_of(scales, k + 8)
    scale = tl.where(i < 4, low & 63, high & 15 | low >> 6 << 4)
    return scale, tl.where(i < 4, middle & 63, high >> 4 | middle >> 6 << 4)


@triton.jit
def matvec(
    w, x, out, add, table, row_bytes, n_blocks, n_out, x_stride, out_stride,
    BLOCK_LEN: tl.constexpr, BLOCK_BYTES: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    X_ROWS: tl.constexpr, X_TILE: tl.constexpr, ADD: tl.constexpr, weight: tl.constexpr,
):  # fmt: skip
    """out[r, :] = w @ x[r] (+ add[r, :]), for X_ROWS rows of x f32; X_TILE rounds them up.

    A program takes ROWS rows of w, and STEP blocks of each at a time.
    """
    first = tl.program_id(0) * ROWS
    row, r = first + tl.arange(0, ROWS), tl.arange(0, X_TILE)
    i = tl.arange(0, STEP * BLOCK_LEN)
    address = w + row.to(tl.int64)[:, None] * row_bytes
    total = tl.zeros((ROWS, X_TILE), tl.float32)
    for b in range(0, n_blocks, STEP):
        block = b + i // BLOCK_LEN
        # beyond the ends the last block and row are read again, and count nothing
        near = tl.minimum(block, n_blocks - 1)
        places = tl.where((row < n_out)[:, None], address, w) + (near * BLOCK_BYTES)[None, :]
        values = weight(places, (i % BLOCK_LEN)[None, :] + row[:, None] * 0, table)
        mask = (r < X_ROWS)[:, None] & (block < n_blocks)[None, :]
        inputs = tl.load(x + r[:, None] * x_stride + (b * BLOCK_LEN + i)[None, :], mask, 0.0)
        total += tl.sum(values[:, None, :] * inputs[None, :, :], 2)
    place, mask = row[:, None] + r[None, :] * out_stride, (row < n_out)[:, None]
    mask &= (r < X_ROWS)[None, :]
    if ADD:
        total += tl.load(add + place, mask, 0.0)
    tl.store(out + place, total, mask)
