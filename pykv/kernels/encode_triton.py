"""Encoding full tail pages on the GPU: layout in formats/coded.py, bytes those of its codecs.

A format gives, beside what coded_triton.py asks for,
    fit(x, real, extra, n, BITS) -> scale, minimum, inverse    [rows, 1] of rows of values
    code(x, scale, minimum, inverse, extra, BITS) -> i32
where `real` says which of the values exist and n how many of them a row has. `inverse` is whatever
else codes are made with. Where a token has one scale, x is only its least and its largest value. If
LENGTHS is set it is f64, the sum of its squares, and the scale a length, which is divided by that
of what the codes stand for.

A page is read 32 channels at a time, and again for each pass: it fits in no registers, but in a
cache. Kernels are compiled with `enable_fp_fusion=False`: a product and a sum that are rounded once
choose other codes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pykv.formats.coded import find
from pykv.kernels import launch_triton
from pykv.kernels.coded_triton import RANGES_AT, code_bytes_keys, code_bytes_values
from pykv.kernels.encode_outliers_triton import ends, take
from pykv.kernels.encode_tiles_triton import BLOCK, places, put_codes, put_halves, tile
from pykv.kernels.jit_triton import device
from pykv.kernels.plain_triton import ALIGN, PAGE, page_at
from pykv.kernels.write_triton import narrow


@device
def scales_of_tokens(
    source, extra, low, high, D: tl.constexpr, KEYS: tl.constexpr, MAPPED: tl.constexpr,
    BITS: tl.constexpr, LENGTHS: tl.constexpr, fit: tl.constexpr,
):  # fmt: skip
    """What `fit` makes of whole tokens, whose least and largest values are given."""
    if LENGTHS:
        squares = tl.zeros((PAGE, BLOCK), tl.float64)
        for b in range((D + 31) // 32):
            x, _ = tile(source, b, D, KEYS, MAPPED, False)
            y = x.to(tl.float64)
            squares += y * y
        total = tl.sum(squares, 1, keep_dims=True)
        s, m, inverse = fit(total, total >= 0, extra, D, BITS)
    else:
        both = tl.join(tl.reshape(low, (PAGE,)), tl.reshape(high, (PAGE,)))
        s, m, inverse = fit(both, both == both, extra, D, BITS)
    return s, m, inverse


@device
def ends_of_tokens(source, D: tl.constexpr, KEYS: tl.constexpr, MAPPED: tl.constexpr):
    """Least and largest of each token's values, f32 [64, 1]."""
    low = tl.full((PAGE, BLOCK), float("inf"), tl.float32)
    high = tl.full((PAGE, BLOCK), float("-inf"), tl.float32)
    for b in range((D + 31) // 32):
        x, real = tile(source, b, D, KEYS, MAPPED, False)
        low = tl.minimum(low, tl.where(real, x, float("inf")))
        high = tl.maximum(high, tl.where(real, x, float("-inf")))
    return tl.min(low, 1, keep_dims=True), tl.max(high, 1, keep_dims=True)


@device
def put_tile(
    x, real, s, m, inverse, page, extra, b, D: tl.constexpr, KEYS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, BITS: tl.constexpr, code: tl.constexpr,
):  # fmt: skip
    """Tile b as codes in the page; returns them, [64, 32]."""
    codes = tl.where(real, code(x, s, m, inverse, extra, BITS), 0)
    RUNS: tl.constexpr = D * 4 if KEYS else (D + 31) // 32 * 128
    put_codes(page, tl.trans(codes) if KEYS and not BY_CHANNEL else codes, b, BITS, RUNS)
    return codes


@device
def put_tiles(
    source, page, scales, extra, D: tl.constexpr, KEYS: tl.constexpr, MAPPED: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, PARAMETERS: tl.constexpr,
    fit: tl.constexpr, code: tl.constexpr,
):  # fmt: skip
    """A page whose scales belong to a tile's rows, or lie outside it."""
    BY_CHANNEL: tl.constexpr = KEYS and AXIS != "block"
    COUNT: tl.constexpr = 2 * D if AXIS == "channel" else (D + 31) // 32 * PAGE
    row = tl.arange(0, PAGE)[:, None]
    for b in range((D + 31) // 32):
        x, real = tile(source, b, D, KEYS, MAPPED, BY_CHANNEL)
        if AXIS == "range":
            c, _ = places(b, True)
            s = tl.load(extra + RANGES_AT + c, c < D, 0.0)
            m = tl.load(extra + RANGES_AT + D + c, c < D, 0.0)
            inverse = s
        else:
            s, m, inverse = fit(x, real, extra, BLOCK, BITS)
        if AXIS == "channel":
            c, _ = places(b, True)
            at = tl.where(c < D, row % 2 * D + c, COUNT)
        else:
            at = row + b * PAGE
        if PARAMETERS > 0 and AXIS != "range":
            put_halves(scales, at, s, at < COUNT)
        if PARAMETERS == 2 and AXIS != "range":
            put_halves(scales + COUNT * 2, at, m, at < COUNT)
        put_tile(x, real, s, m, inverse, page, extra, b, D, KEYS, BY_CHANNEL, BITS, code)


@device
def put_tokens(
    source, page, scales, extra, low, high, D: tl.constexpr, KEYS: tl.constexpr,
    MAPPED: tl.constexpr, BITS: tl.constexpr, PARAMETERS: tl.constexpr, LENGTHS: tl.constexpr,
    fit: tl.constexpr, code: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """A page whose tokens have a scale each; values count as the nearest within low and high."""
    s, m, inverse = scales_of_tokens(
        source, extra, low, high, D, KEYS, MAPPED, BITS, LENGTHS, fit
    )  # fmt: skip
    squares = tl.zeros((PAGE, BLOCK), tl.float64) if LENGTHS else 0
    for b in range((D + 31) // 32):
        x, real = tile(source, b, D, KEYS, MAPPED, False)
        if not LENGTHS:
            x = tl.minimum(tl.maximum(x, low), high)
        codes = put_tile(x, real, s, m, inverse, page, extra, b, D, KEYS, False, BITS, code)
        if LENGTHS:
            y = tl.where(real, level(codes, extra), 0.0).to(tl.float64)
            squares += y * y
    if LENGTHS:
        s = (s / tl.sqrt(tl.sum(squares, 1, keep_dims=True))).to(tl.float32)
    t = tl.arange(0, PAGE)[:, None]
    put_halves(scales, t, s, t >= 0)
    if PARAMETERS == 2:
        put_halves(scales + 2 * PAGE, t, m, t >= 0)


@triton.jit
def encode_pages(
    pool, moves, mapped, extra, extra_stride, heads,
    KEYS: tl.constexpr, MAPPED: tl.constexpr, TAIL: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, PARAMETERS: tl.constexpr, LENGTHS: tl.constexpr,
    OUTLIERS: tl.constexpr, ENDS: tl.constexpr,
    fit: tl.constexpr, code: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """One side of a layer: tail pages to pages, and the tables' entries with them.

    moves i64 [n, 2]: the address of a table's entry, and the new page's place; entries of a layer's
    KV heads follow each other. MAPPED: values are not the tail's but `mapped` f32 [n, 64, D]. ENDS:
    values of a token, at either end, of which some may be outliers.
    """
    i = tl.program_id(0)
    entry = tl.load(moves + i * 2).to(tl.pointer_type(tl.int64))
    place, of_head = tl.load(moves + i * 2 + 1), extra + i % heads * extra_stride
    page, tail = pool + place * ALIGN, page_at(pool, entry)
    source = mapped + i * (PAGE * D) if MAPPED else tail.to(tl.pointer_type(TAIL))
    scales = page + (code_bytes_keys(D, BITS) if KEYS else code_bytes_values(D, BITS))
    low, high = 0.0, 0.0
    if OUTLIERS > 0:
        if not KEYS:
            low, high = ends(source, D, MAPPED, ENDS)
        slots = scales if KEYS else scales + 4 * PAGE
        low, high = take(source, slots, of_head, low, high, D, KEYS, MAPPED, OUTLIERS)
    elif AXIS == "token" and not LENGTHS:
        low, high = ends_of_tokens(source, D, KEYS, MAPPED)
    if AXIS == "token":
        put_tokens(
            source, page, scales, of_head, low, high, D, KEYS, MAPPED, BITS, PARAMETERS, LENGTHS,
            fit, code, level,
        )  # fmt: skip
    else:
        put_tiles(
            source, page, scales, of_head, D, KEYS, MAPPED, BITS, AXIS, PARAMETERS, fit, code
        )  # fmt: skip
    # all threads know the old page before one of them writes the new one
    tl.debug_barrier()
    tl.store(entry, place)


@triton.jit
def gather_pages(pool, moves, out, KEYS: tl.constexpr, TAIL: tl.constexpr, D: tl.constexpr):
    """Tail pages of `moves` to f32 [n, 64, D]; 32 channels for a program."""
    i, b = tl.program_id(0), tl.program_id(1)
    entry = tl.load(moves + i * 2).to(tl.pointer_type(tl.int64))
    tail = page_at(pool, entry).to(tl.pointer_type(TAIL))
    x, real = tile(tail, b, D, KEYS, False, False)
    c, t = places(b, False)
    tl.store(out + i * (PAGE * D) + t * D + c, x, real)


@triton.jit
def put_plain(
    pool, moves, mapped, KEYS: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Values f32 [n, 64, D] to pages of a float type; 32 channels for a program."""
    i, b = tl.program_id(0), tl.program_id(1)
    entry, place = tl.load(moves + i * 2).to(tl.pointer_type(tl.int64)), tl.load(moves + i * 2 + 1)
    x, real = tile(mapped + i * (PAGE * D), b, D, KEYS, True, False)
    x = narrow(tl.minimum(tl.maximum(x, -LIMIT), LIMIT), TYPE)
    c, t = places(b, False)
    at = c * PAGE + t if KEYS else (b * PAGE + t) * BLOCK + c % BLOCK
    # values are filled up to 32 channels
    tl.store((pool + place * ALIGN).to(tl.pointer_type(TYPE)) + at, x, real | (KEYS == 0))
    if b == 0:
        tl.store(entry, place)


def gather_tails(pool: Any, moves: Any, out: Any, side: str, tail: str, d: int) -> None:
    """The tail pages of moves i64 [n, 2] as out f32 [n, 64, d], for a transform to be applied."""
    fixed = {"KEYS": side == "key", "TAIL": launch_triton.module(tail).level, "D": d}
    gather_pages[len(moves), (d + 31) // 32](pool, moves, out, **fixed, enable_fp_fusion=False)


def encode(
    pool: Any, moves: Any, extra: Any, name: str, side: str, d: int, heads: int,
    tail: str = "f16", rows: Any = None,
) -> None:  # fmt: skip
    """Encode one side of a layer into pages of type `name`, and set the tables' entries.

    moves i64 [n, 2] are those of `encode_pages`, extra f32 [KV heads, m] is what `extra` of
    launch_triton.py has, d the pages' width. rows f32 [n, 64, d]: mapped values, if there are any;
    pages of a float type are made of such only.
    """
    own = launch_triton.module(name)
    if own.KEY_AXIS == "plain":
        put_plain[len(moves), (d + 31) // 32](
            pool, moves, rows, KEYS=side == "key", D=d, TYPE=own.level, LIMIT=find(name).page_limit,
            enable_fp_fusion=False,
        )  # fmt: skip
        return
    fixed = launch_triton.encoder(name, side, d, tail, rows is not None)
    encode_pages[len(moves),](
        pool, moves, extra if rows is None else rows, extra, extra.shape[1], heads, **fixed,
        enable_fp_fusion=False,
    )  # fmt: skip
