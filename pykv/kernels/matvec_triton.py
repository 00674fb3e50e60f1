"""Products with GGUF blocks on the GPU, which reads them as they lie in the file.

A type gives BLOCK_LEN, BLOCK_BYTES, LANES and `weight(block, plane, lane, table)`: of the blocks
that begin at the addresses `block` [R, S, 1], the values plane * LANES + lane, lane [1, 1, LANES];
`table` points to 16 f32, for types that have one. Planes of the same bytes are unpacked from one
load of them, and a scale is loaded once for a block. How wide loads are follows from what is known
of the addresses: 16 bytes for blocks of 144 or 176, two for those of 18, 34 or 210.

A row of a product has the same bits whatever the number of rows, if X_TILE is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from pykv.kernels.elementwise_triton import ACTIVATIONS
from pykv.kernels.launch_triton import SURE_ROWS, panel_sizes, product


@triton.jit
def byte_of(address, i):
    """Byte i, as i32."""
    return tl.load(address + i).to(tl.int32)


@triton.jit
def signed(byte):
    """A byte's value as a signed one."""
    return (byte ^ 128) - 128


@triton.jit
def short_of(block, at: tl.constexpr):
    """The two bytes at byte `at`, which is even, as i32."""
    return tl.load((block + at).to(tl.pointer_type(tl.int16))).to(tl.int32) & 0xFFFF


@triton.jit
def half_of(block, at: tl.constexpr):
    """The float16 at byte `at`, which is even, as f32."""
    return tl.load((block + at).to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def six_bits(scales, i: tl.constexpr):
    """Scale and minimum i of eight, of 6 bits each, in 12 bytes (Q4_K and Q5_K)."""
    words = scales.to(tl.pointer_type(tl.int32))
    low, middle, high = tl.load(words), tl.load(words + 1), tl.load(words + 2)
    if i < 4:
        return low >> i * 8 & 63, middle >> i * 8 & 63
    k = i * 8 - 32
    scale = high >> k & 15 | low >> k + 2 & 48
    return scale, high >> k + 4 & 15 | middle >> k + 2 & 48


@triton.jit
def places(w, row, n_blocks, b, BYTES: tl.constexpr, STEP: tl.constexpr):
    """Addresses [R, STEP, 1] of blocks from b on of the rows [R], and the blocks' numbers.

    Beyond a row's end its last block is taken again.
    """
    block = b + tl.arange(0, STEP)
    near = tl.minimum(block, n_blocks - 1) * BYTES
    address = w + row.to(tl.int64)[:, None] * (n_blocks * BYTES) + near[None, :]
    return address[:, :, None], block


@triton.jit
def dots(
    w, row, x, r, real, norm, table, n_in,
    ROWS: tl.constexpr, X_TILE: tl.constexpr, NORM: tl.constexpr,
    SIZES: tl.constexpr, weight: tl.constexpr,
):  # fmt: skip
    """[ROWS, X_TILE]: w's rows `row` times the rows r of x, and [X_TILE]: sums of x's squares.

    NORM: x is multiplied by `norm` first. Only `real` rows of x exist.
    """
    LEN: tl.constexpr = SIZES[0]
    LANES: tl.constexpr = SIZES[2]
    STEP: tl.constexpr = SIZES[3]
    lane, n_blocks = tl.arange(0, LANES)[None, None, :], n_in // LEN
    total = tl.zeros((ROWS, X_TILE, STEP, LANES), tl.float32)
    squares = tl.zeros((X_TILE, STEP, LANES), tl.float32)
    for b in range(0, n_blocks, STEP):
        address, block = places(w, row, n_blocks, b, SIZES[1], STEP)
        there = (block < n_blocks)[None, :, None]
        at = (block * LEN)[None, :, None] + lane
        p_x, mask = x + r[:, None, None] * n_in + at, real[:, None, None] & there
        for plane in tl.static_range(LEN // LANES):
            values = weight(address, plane, lane, table)
            inputs = tl.load(p_x + plane * LANES, mask, 0.0)
            if NORM:
                squares += inputs * inputs
                inputs *= tl.load(norm + at + plane * LANES, there, 0.0)
            total += values[:, None, :, :] * inputs[None, :, :, :]
    return tl.sum(tl.sum(total, 3), 2), tl.sum(tl.sum(squares, 2), 1)


@triton.jit
def rows_of(n_rows, X_TILE: tl.constexpr):
    """The numbers of a program's rows of x, the last again beyond the end, and which are real."""
    r = tl.program_id(1) * X_TILE + tl.arange(0, X_TILE)
    return tl.minimum(r, n_rows - 1), r < n_rows


@triton.jit
def normed(
    w, row, x, r, real, norm, table, n_in, eps,
    ROWS: tl.constexpr, X_TILE: tl.constexpr, NORM: tl.constexpr,
    SIZES: tl.constexpr, weight: tl.constexpr,
):  # fmt: skip
    """As `dots`, of the rows of x after RMS normalisation if NORM."""
    total, squares = dots(w, row, x, r, real, norm, table, n_in, ROWS, X_TILE, NORM, SIZES, weight)
    if NORM:
        total *= (1.0 / tl.sqrt_rn(squares / n_in + eps))[None, :]
    return total


@triton.jit
def put(out, add, total, row, r, real, n_out, ADD: tl.constexpr):
    """Store [ROWS, X_TILE] in out [rows of x, n_out], plus `add` of that shape."""
    place, mask = r[None, :] * n_out + row[:, None], (row < n_out)[:, None] & real[None, :]
    if ADD:
        total += tl.load(add + place, mask, 0.0)
    tl.store(out + place, total, mask)


@triton.jit(do_not_specialize=["n_rows"])
def matvec(
    x, norm, add, w0, w1, w2, out0, out1, out2, table0, table1, table2, n_out0, n_out1, n_out2,
    n_in, n_rows, eps,
    COUNT: tl.constexpr, ROWS: tl.constexpr, X_TILE: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, SIZES0: tl.constexpr, SIZES1: tl.constexpr, SIZES2: tl.constexpr,
    weight0: tl.constexpr, weight1: tl.constexpr, weight2: tl.constexpr,
):  # fmt: skip
    """out = x @ w.T (+ add) for x f32 [n_rows, n_in] and COUNT weights, ROWS rows of one a program.

    SIZES: BLOCK_LEN, BLOCK_BYTES and LANES of a weight's type, and blocks read at a time.
    """
    number = tl.program_id(0)
    r, real = rows_of(n_rows, X_TILE)
    i, first1 = tl.arange(0, ROWS), tl.cdiv(n_out0, ROWS)
    first2 = first1 + tl.cdiv(n_out1, ROWS)
    if number < first1:
        row = number * ROWS + i
        total = normed(
            w0, tl.minimum(row, n_out0 - 1), x, r, real, norm, table0, n_in, eps,
            ROWS, X_TILE, NORM, SIZES0, weight0,
        )  # fmt: skip
        put(out0, add, total, row, r, real, n_out0, ADD)
    if COUNT > 1:  # noqa: SIM102
        if (number >= first1) & (number < first2):
            row = (number - first1) * ROWS + i
            total = normed(
                w1, tl.minimum(row, n_out1 - 1), x, r, real, norm, table1, n_in, eps,
                ROWS, X_TILE, NORM, SIZES1, weight1,
            )  # fmt: skip
            put(out1, add, total, row, r, real, n_out1, False)
    if COUNT > 2:  # noqa: SIM102
        if number >= first2:
            row = (number - first2) * ROWS + i
            total = normed(
                w2, tl.minimum(row, n_out2 - 1), x, r, real, norm, table2, n_in, eps,
                ROWS, X_TILE, NORM, SIZES2, weight2,
            )  # fmt: skip
            put(out2, add, total, row, r, real, n_out2, False)


@triton.jit(do_not_specialize=["n_rows"])
def matvec_gated(
    x, norm, out, w0, w1, table0, table1, n_out, n_in, n_rows, eps,
    ROWS: tl.constexpr, X_TILE: tl.constexpr, NORM: tl.constexpr, SIZES0: tl.constexpr,
    SIZES1: tl.constexpr, weight0: tl.constexpr, weight1: tl.constexpr, act: tl.constexpr,
):  # fmt: skip
    """out = act(x @ w0.T) * (x @ w1.T), for x f32 [n_rows, n_in]."""
    r, real = rows_of(n_rows, X_TILE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.minimum(row, n_out - 1)
    gate = normed(
        w0, near, x, r, real, norm, table0, n_in, eps, ROWS, X_TILE, NORM, SIZES0, weight0
    )
    up = normed(w1, near, x, r, real, norm, table1, n_in, eps, ROWS, X_TILE, NORM, SIZES1, weight1)
    put(out, out, act(gate) * up, row, r, real, n_out, False)


@triton.jit
def decode_rows(
    w, numbers, first, out, flag, table, n, n_in,
    ROWS: tl.constexpr, SIZES: tl.constexpr, LISTED: tl.constexpr, CHECKED: tl.constexpr,
    weight: tl.constexpr,
):  # fmt: skip
    """out [n, n_in] = rows of w: from `first` on, or those in `numbers` if LISTED.

    CHECKED: `flag`, i32, becomes 1 where a value is too large for a float16.
    """
    LEN: tl.constexpr = SIZES[0]
    LANES: tl.constexpr = SIZES[2]
    i, n_blocks = tl.program_id(0) * ROWS + tl.arange(0, ROWS), n_in // LEN
    near = tl.minimum(i, n - 1)
    row = tl.load(numbers + near).to(tl.int64) if LISTED else (first + near).to(tl.int64)
    b = tl.program_id(1) * SIZES[3]
    address, block = places(w, row, n_blocks, b, SIZES[1], SIZES[3])
    lane = tl.arange(0, LANES)[None, None, :]
    mask = (i < n)[:, None, None] & (block < n_blocks)[None, :, None] & (lane >= 0)
    p_out = out + i.to(tl.int64)[:, None, None] * n_in + (block * LEN)[None, :, None] + lane
    for plane in tl.static_range(LEN // LANES):
        values = weight(address, plane, lane, table)
        if CHECKED:
            # written so that a NaN counts
            large = 1 - (tl.abs(values) <= 65504.0).to(tl.int32)
            most = tl.max(tl.max(tl.max(large, 2), 1), 0)
            tl.atomic_max(flag, most, mask=most > 0)
        tl.store(p_out + plane * LANES, values.to(out.dtype.element_ty), mask)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, where a program costs about a millisecond."""
    return not isinstance(matvec, triton.JITFunction)


def products(
    x: Any,
    weights: Sequence[Any],
    outs: Sequence[Any],
    add: Any = None,
    norm: tuple[Any, float] | None = None,
    deterministic: bool = False,
) -> None:
    """outs[i] [T, n_out of it] = x [T, n_in] @ weights[i].T, for one to three weights.

    add: of the shape of the only output. norm: the weight [n_in] and epsilon of an RMS
    normalisation of x. deterministic: a row's bits do not depend on T.
    """
    count, rows = len(weights), x.shape[0]
    fixed = product(
        [w.type for w in weights], [w.n_out for w in weights], weights[0].n_in,
        SURE_ROWS if deterministic else rows, is_interpreted(),
    )  # fmt: skip
    three = [*weights, weights[0], weights[0]][:3]
    programs = sum(triton.cdiv(w.n_out, fixed["ROWS"]) for w in weights)
    norm_weight, eps = norm or (x, 0.0)
    matvec[(programs, triton.cdiv(rows, fixed["X_TILE"]))](
        x, norm_weight, outs[0] if add is None else add, *(w.data for w in three),
        *[*outs, outs[0], outs[0]][:3], *(w.table for w in three), *(w.n_out for w in three),
        weights[0].n_in, rows, eps,
        COUNT=count, ADD=add is not None, NORM=norm is not None, **fixed,
    )  # fmt: skip


def gated(
    x: Any,
    gate: Any,
    up: Any,
    out: Any,
    act: str,
    norm: tuple[Any, float] | None = None,
    deterministic: bool = False,
) -> None:
    """out [T, n_out] = act(x @ gate.T) * (x @ up.T); act: silu or gelu, otherwise as `products`."""
    rows = x.shape[0]
    fixed = product(
        [gate.type, up.type], [gate.n_out, up.n_out], gate.n_in,
        SURE_ROWS if deterministic else rows, is_interpreted(),
    )  # fmt: skip
    del fixed["SIZES2"], fixed["weight2"]
    norm_weight, eps = norm or (x, 0.0)
    grid = (triton.cdiv(gate.n_out, fixed["ROWS"]), triton.cdiv(rows, fixed["X_TILE"]))
    matvec_gated[grid](
        x, norm_weight, out, gate.data, up.data, gate.table, up.table, gate.n_out, gate.n_in, rows,
        eps, NORM=norm is not None, act=ACTIVATIONS[act], **fixed,
    )  # fmt: skip


def panel(weight: Any, out: Any, rows: Any = None, first: int = 0, flag: Any = None) -> None:
    """out f16 or f32 [n, n_in] = rows of a weight.

    rows: their numbers, i32 or i64 [n]; without them those from `first` on. flag: i32 [1], which
    becomes 1 where a value is beyond the range of f16, and is left alone otherwise.
    """
    n, n_in = out.shape
    fixed = panel_sizes(weight.type, n, n_in, is_interpreted())
    grid = (triton.cdiv(n, fixed["ROWS"]), triton.cdiv(n_in, fixed["SIZES"][0] * fixed["SIZES"][3]))
    decode_rows[grid](
        weight.data, out if rows is None else rows, first, out, out if flag is None else flag,
        weight.table, n, n_in, LISTED=rows is not None, CHECKED=flag is not None, **fixed,
    )  # fmt: skip
