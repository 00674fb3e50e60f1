"""Products with GGUF blocks on the GPU, which reads them as they lie in the file.

A type gives BLOCK_LEN, BLOCK_BYTES, LANES and `weight(block, plane, lane, table)`: of the blocks
that begin at the addresses `block` [R, 1, S, 1], the values plane * LANES + lane, where lane is
[1, 1, 1, LANES]; `table` points to 16 f32, for types that have one. Planes of the same bytes are
unpacked from one load of them, and what a block has one of is loaded once. How wide loads are
follows from what is known of the addresses: 16 bytes for blocks of 144 or 176, two for those of 18,
34 or 210.

A row of a product has the same bits whatever the number of rows, if TILE is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from pykv.kernels.elementwise_triton import ACTIVATIONS
from pykv.kernels.jit_triton import FUSED, device, is_interpreted
from pykv.kernels.launch_triton import SURE_ROWS, gated_product, panel_sizes, product


@device
def byte_of(address, i):
    """Byte i, as i32."""
    return tl.load(address + i).to(tl.int32)


@device
def signed(byte):
    """A byte's value as a signed one."""
    return (byte ^ 128) - 128


@device
def short_of(block, at: tl.constexpr):
    """The two bytes at byte `at`, which is even, as i32."""
    return tl.load((block + at).to(tl.pointer_type(tl.int16))).to(tl.int32) & 0xFFFF


@device
def half_of(block, at: tl.constexpr):
    """The float16 at byte `at`, which is even, as f32."""
    return tl.load((block + at).to(tl.pointer_type(tl.float16))).to(tl.float32)


@device
def six_bits(scales, i: tl.constexpr):
    """Scale and minimum i of eight, of 6 bits each, in 12 bytes (Q4_K and Q5_K)."""
    words = scales.to(tl.pointer_type(tl.int32))
    low, middle, high = tl.load(words), tl.load(words + 1), tl.load(words + 2)
    if i < 4:
        return low >> i * 8 & 63, middle >> i * 8 & 63
    k = i * 8 - 32
    scale = high >> k & 15 | low >> k + 2 & 48
    return scale, high >> k + 4 & 15 | middle >> k + 2 & 48


@device
def places(address, n_blocks, b, BYTES: tl.constexpr, STEP: tl.constexpr):
    """Addresses [R, 1, STEP, 1] of blocks from b on of the rows at `address` [R].

    Beyond a row's end its last block is taken again.
    """
    near = tl.minimum(b + tl.arange(0, STEP), n_blocks - 1) * BYTES
    return (address[:, None] + near[None, :])[:, None, :, None]


@device
def rows_of(number, i: tl.constexpr, COUNT: tl.constexpr, LINES: tl.constexpr):
    """The COUNT rows of line i of program `number`, which has LINES of them."""
    return (number * LINES + i) * COUNT + tl.arange(0, COUNT)


@device
def dots(
    weights, table, number, n_out, x, n_rows, norm, n_in, eps,
    TILE: tl.constexpr, NORM: tl.constexpr, SIZES: tl.constexpr, weight: tl.constexpr,
):  # fmt: skip
    """Products [ROWS, X_ROWS] of each of program `number`'s lines with its rows of x.

    weights: one, or two of a type, of which the second's lines come last. NORM: x is RMS normalised
    first, with the weight `norm`. On a GPU, where ROWS is 1, tiles of a line and of x are alike in
    layout: next to nothing moves between threads before the sums.
    """
    ROWS: tl.constexpr = TILE[0]
    LINES: tl.constexpr = TILE[1]
    X_ROWS: tl.constexpr = TILE[2]
    LEN: tl.constexpr = SIZES[0]
    LANES: tl.constexpr = SIZES[2]
    STEP: tl.constexpr = SIZES[3]
    ALL: tl.constexpr = LINES * len(weights)
    lane, n_blocks = tl.arange(0, LANES)[None, None, None, :], n_in // LEN
    r = rows_of(tl.program_id(1), 0, X_ROWS, 1)[None, :, None, None]
    lines = ()
    for i in tl.static_range(ALL):
        row = tl.minimum(rows_of(number, i % LINES, ROWS, LINES), n_out - 1)
        lines = lines + (weights[i // LINES] + row.to(tl.int64) * (n_blocks * SIZES[1]),)
    totals = (tl.zeros((ROWS, X_ROWS, STEP, LANES), tl.float32),) * ALL
    squares = tl.zeros((1, X_ROWS, STEP, LANES), tl.float32)
    for b in range(0, n_blocks, STEP):
        block = b + tl.arange(0, STEP)
        there = (block < n_blocks)[None, None, :, None] & (lane >= 0)
        at = (block * LEN)[None, None, :, None] + lane
        p_x, mask, blocks = x + r * n_in + at, there & (r < n_rows), ()
        for i in tl.static_range(ALL):
            blocks = blocks + (places(lines[i], n_blocks, b, SIZES[1], STEP),)
        for plane in tl.static_range(LEN // LANES):
            inputs = tl.load(p_x + plane * LANES, mask, 0.0)
            if NORM:
                squares += inputs * inputs
                inputs *= tl.load(norm + at + plane * LANES, there, 0.0)
            for i in tl.static_range(ALL):
                total = totals[i] + weight(blocks[i], plane, lane, table) * inputs
                totals = totals[:i] + (total,) + totals[i + 1 :]
    sums = ()
    for i in tl.static_range(ALL):
        total = tl.sum(tl.sum(totals[i], 3), 2)
        if NORM:
            total *= 1.0 / tl.sqrt_rn(tl.sum(tl.sum(squares, 3), 2) / n_in + eps)
        sums = sums + (total,)
    return sums


@device
def put(
    out, add, total, number, i: tl.constexpr, n_rows, n_out, TILE: tl.constexpr, ADD: tl.constexpr
):
    """Store a program's sums of line i in out [n_rows, n_out], plus `add` of that shape."""
    row = rows_of(number, i, TILE[0], TILE[1])[:, None]
    r = rows_of(tl.program_id(1), 0, TILE[2], 1)[None, :]
    place, mask = r * n_out + row, (row < n_out) & (r < n_rows)
    if ADD:
        total += tl.load(add + place, mask, 0.0)
    tl.store(out + place, total, mask)


@device
def product_of(
    w, table, number, n_out, x, n_rows, norm, n_in, eps, out, add,
    TILE: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, SIZES: tl.constexpr,
    weight: tl.constexpr,
):  # fmt: skip
    """Program `number`'s part of out = x @ w.T (+ add)."""
    sums = dots((w,), table, number, n_out, x, n_rows, norm, n_in, eps, TILE, NORM, SIZES, weight)
    for i in tl.static_range(TILE[1]):
        put(out, add, sums[i], number, i, n_rows, n_out, TILE, ADD)


@triton.jit(do_not_specialize=["n_rows"])
def matvec(
    x, norm, add, w0, w1, w2, out0, out1, out2, table0, table1, table2, n_out0, n_out1, n_out2,
    n_in, n_rows, eps,
    KINDS: tl.constexpr, TYPES: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr,
    NORM: tl.constexpr, SIZES0: tl.constexpr, SIZES1: tl.constexpr, SIZES2: tl.constexpr,
    weight0: tl.constexpr, weight1: tl.constexpr, weight2: tl.constexpr,
):  # fmt: skip
    """out = x @ w.T (+ add) for x f32 [n_rows, n_in] and up to three weights; a program reads one.

    KINDS: of each weight the number of its type, of which there are TYPES; SIZES of a type are
    BLOCK_LEN, BLOCK_BYTES, LANES and blocks read at a time. TILE: a program takes LINES lines of
    ROWS rows of a weight, and X_ROWS of x.
    """
    number, PER = tl.program_id(0), TILE[0] * TILE[1]
    w, table, n_out, out, kind = w0, table0, n_out0, out0, 0
    if len(KINDS) > 1:
        first = tl.cdiv(n_out0, PER)
        second = first + tl.cdiv(n_out1, PER)
        if number >= first:
            w, table, n_out, out, kind = w1, table1, n_out1, out1, KINDS[1]
            if len(KINDS) > 2:  # noqa: SIM102
                if number >= second:
                    w, table, n_out, out, kind = w2, table2, n_out2, out2, KINDS[2]
                    first = second
            number -= first
    if TYPES == 1:
        product_of(
            w, table, number, n_out, x, n_rows, norm, n_in, eps, out, add,
            TILE, NORM, ADD, SIZES0, weight0,
        )  # fmt: skip
    else:
        if kind == 0:
            product_of(
                w, table, number, n_out, x, n_rows, norm, n_in, eps, out, add,
                TILE, NORM, ADD, SIZES0, weight0,
            )  # fmt: skip
        if kind == 1:
            product_of(
                w, table, number, n_out, x, n_rows, norm, n_in, eps, out, add,
                TILE, NORM, ADD, SIZES1, weight1,
            )  # fmt: skip
        if TYPES == 3:  # noqa: SIM102
            if kind == 2:
                product_of(
                    w, table, number, n_out, x, n_rows, norm, n_in, eps, out, add,
                    TILE, NORM, ADD, SIZES2, weight2,
                )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def matvec_gated(
    x, norm, out, w0, w1, table0, table1, n_out, n_in, n_rows, eps,
    TYPES: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr,
    SIZES0: tl.constexpr, SIZES1: tl.constexpr,
    weight0: tl.constexpr, weight1: tl.constexpr, act: tl.constexpr,
):  # fmt: skip
    """out = act(x @ w0.T) * (x @ w1.T), for x f32 [n_rows, n_in]; constants as in `matvec`."""
    number = tl.program_id(0)
    if TYPES == 1:
        both = dots(
            (w0, w1), table0, number, n_out, x, n_rows, norm, n_in, eps, TILE, NORM, SIZES0, weight0
        )
    else:
        both = dots(
            (w0,), table0, number, n_out, x, n_rows, norm, n_in, eps, TILE, NORM, SIZES0, weight0
        ) + dots(
            (w1,), table1, number, n_out, x, n_rows, norm, n_in, eps, TILE, NORM, SIZES1, weight1
        )
    for i in tl.static_range(TILE[1]):
        total = act(both[i]) * both[TILE[1] + i]
        put(out, out, total, number, i, n_rows, n_out, TILE, False)


@triton.jit(do_not_specialize=["first", "n"])
def decode_rows(
    w, numbers, first, out, flag, table, n, n_in,
    ROWS: tl.constexpr, SIZES: tl.constexpr, LISTED: tl.constexpr, CHECKED: tl.constexpr,
    weight: tl.constexpr,
):  # fmt: skip
    """out [n, n_in] = rows of w: from `first` on, or those in `numbers` if LISTED.

    CHECKED: `flag`, i32, becomes 1 where a value is too large for a float16, and is clamped.
    """
    LEN: tl.constexpr = SIZES[0]
    LANES: tl.constexpr = SIZES[2]
    i, n_blocks = tl.program_id(0) * ROWS + tl.arange(0, ROWS), n_in // LEN
    near = tl.minimum(i, n - 1)
    row = tl.load(numbers + near).to(tl.int64) if LISTED else (first + near).to(tl.int64)
    b = tl.program_id(1) * SIZES[3]
    block, lane = b + tl.arange(0, SIZES[3]), tl.arange(0, LANES)[None, None, None, :]
    address = places(w + row * (n_blocks * SIZES[1]), n_blocks, b, SIZES[1], SIZES[3])
    mask = (i < n)[:, None, None, None] & (block < n_blocks)[None, None, :, None] & (lane >= 0)
    p_out = (
        out + i.to(tl.int64)[:, None, None, None] * n_in + (block * LEN)[None, None, :, None] + lane
    )
    for plane in tl.static_range(LEN // LANES):
        values = weight(address, plane, lane, table)
        if CHECKED:
            # written so that a NaN counts
            large = 1 - (tl.abs(values) <= 65504.0).to(tl.int32)
            most = tl.max(tl.max(tl.max(tl.max(large, 3), 2), 1), 0)
            tl.atomic_max(flag, most, mask=most > 0)
            values = tl.minimum(tl.maximum(values, -65504.0), 65504.0)
        tl.store(p_out + plane * LANES, values.to(out.dtype.element_ty), mask)


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
    rows = x.shape[0]
    fixed = product(
        [w.type for w in weights], [w.n_out for w in weights], weights[0].n_in,
        SURE_ROWS if deterministic else rows, is_interpreted(),
    )  # fmt: skip
    three = [*weights, weights[0], weights[0]][:3]
    per = fixed["TILE"][0] * fixed["TILE"][1]
    programs = sum(triton.cdiv(w.n_out, per) for w in weights)
    norm_weight, eps = norm or (x, 0.0)
    matvec[(programs, triton.cdiv(rows, fixed["TILE"][2]))](
        x, norm_weight, outs[0] if add is None else add, *(w.data for w in three),
        *[*outs, outs[0], outs[0]][:3], *(w.table for w in three), *(w.n_out for w in three),
        weights[0].n_in, rows, eps,
        ADD=add is not None, NORM=norm is not None, **fixed, **FUSED,
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
    fixed = gated_product(
        (gate.type, up.type), gate.n_out, gate.n_in, SURE_ROWS if deterministic else rows,
        is_interpreted(),
    )  # fmt: skip
    norm_weight, eps = norm or (x, 0.0)
    grid = (triton.cdiv(gate.n_out, fixed["TILE"][0]), triton.cdiv(rows, fixed["TILE"][2]))
    matvec_gated[grid](
        x, norm_weight, out, gate.data, up.data, gate.table, up.table, gate.n_out, gate.n_in, rows,
        eps, NORM=norm is not None, act=ACTIVATIONS[act], **fixed, **FUSED,
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
        **FUSED,
    )  # fmt: skip
