"""Tiles of coded pages for the GPU: layout in formats/coded.py.

A key page is read as its bytes lie, [channels, bytes], and then unpacked plane by plane: 64 tokens
at a time for codes of 8 bits, 32 for 4 and 5, 16 for 2 and 3. Values come by the tokens of such a
plane, and by halves of 16 of each 32 channels. WIDTH is the head's width D, for values filled up to
blocks of 32, rounded up to a power of two; channels beyond it are zeros.

A format gives BITS, AXIS (which values share a scale), PARAMETERS and
    level(code, extra) -> f32     what a code, i32, stands for
where `extra` points to f32 that lie outside the pages, as backends/page_maps.py has them. For pages
of plain values AXIS is "plain" and `level` the values' type.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.plain_triton import PAGE, key_tile, value_tile

RUN = tl.constexpr(16)
RANGES_AT = tl.constexpr(32)  # f32 of `extra` before the ranges of key channels


@triton.jit
def main_bits(BITS: tl.constexpr):
    """Bits of a code's first set; 5 are 4 and 1, 3 are 2 and 1."""
    return BITS - 1 if BITS == 5 or BITS == 3 else BITS


@triton.jit
def planes(BITS: tl.constexpr):
    """Planes of a key page."""
    return 1 if BITS >= 8 else 8 // main_bits(BITS)


@triton.jit
def code_bytes_keys(D: tl.constexpr, BITS: tl.constexpr):
    """Bytes of a key page's codes."""
    if BITS == 5 or BITS == 3:
        return D * 8 * (BITS - 1) + (D + 1) // 2 * 16
    return D * 8 * BITS


@triton.jit
def code_bytes_values(D: tl.constexpr, BITS: tl.constexpr):
    """Bytes of a value page's codes."""
    return (D + 31) // 32 * 256 * BITS


@triton.jit
def half_at(address, offset, mask):
    """float16 at `address + offset` bytes, as f32; 0 outside the mask."""
    return tl.load(address.to(tl.pointer_type(tl.float16)) + offset, mask, 0.0).to(tl.float32)


@triton.jit
def key_bytes(page, c, D: tl.constexpr, BITS: tl.constexpr):
    """u8 [C, bytes of a channel] of channels c [C]: a key page's first set, if it has codes."""
    if BITS > 8:
        return page
    b = tl.arange(0, 8 * main_bits(BITS))
    place = c[:, None] * (8 * main_bits(BITS)) + b[None, :]
    return tl.load(page + place, (c < D)[:, None], 0)


@triton.jit
def key_plane(
    raw, page, extra, c, plane: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, PARAMETERS: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """f32 [C, T] of one plane of `raw`, of channels c [C], and its tokens, i32 [T]."""
    if AXIS == "plain":
        return key_tile(page.to(tl.pointer_type(level)), c, PAGE, D), tl.arange(0, PAGE)
    W: tl.constexpr = main_bits(BITS)
    c, b = c[:, None], tl.arange(0, 8 * W)[None, :]
    t = b // RUN * (RUN * (8 // W)) + plane * RUN + b % RUN
    real, codes = c < D, (raw >> (plane * W)).to(tl.int32) & ((1 << W) - 1)
    if W != BITS:
        top = tl.load(page + D * 8 * W + c // 2 * RUN + t % RUN, real & (t >= 0), 0)
        codes |= (top.to(tl.int32) >> (c % 2 * 4 + t // RUN) & 1) << W
    x = level(codes, extra)
    scales = page + code_bytes_keys(D, BITS)
    if AXIS == "block":
        at, minima = c // 32 * PAGE + t, (D + 31) // 32 * PAGE
        s = half_at(scales, at, real & (t >= 0))
    elif AXIS == "channel":
        at, minima = t // 32 * D + c, 2 * D
        s = half_at(scales, at, real & (t >= 0))
    elif AXIS == "token":
        at, minima = t, PAGE
        s = half_at(scales, at, t >= 0)
    elif AXIS == "range":
        at, minima = t, PAGE
        s = tl.load(extra + RANGES_AT + c, real, 0.0)
    else:
        at, minima = t, PAGE
        s = tl.load(extra)
    x = x * s
    if AXIS == "range":
        x += tl.load(extra + RANGES_AT + D + c, real, 0.0)
    elif PARAMETERS == 2:
        x += half_at(scales, minima + at, real & (t >= 0))
    return tl.where(real, x, 0.0), tl.reshape(t, (8 * W,))


@triton.jit
def value_plane(
    page, t, extra, half: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, PARAMETERS: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """f32 [T, WIDTH / 2] of the tokens t [T]: channels 32 b + 16 half + lane, by (b, lane)."""
    if AXIS == "plain":
        return value_tile(page.to(tl.pointer_type(level)), t, PAGE, half, D, WIDTH)
    W: tl.constexpr = main_bits(BITS)
    PER: tl.constexpr = 8 // W  # runs of a unit of 16 bytes
    t, j = t[:, None], tl.arange(0, WIDTH // 2)[None, :]
    block, lane = j // RUN, j % RUN
    real = (block * 32 < D) & (t >= 0)
    run = (block * PAGE + t) * 2 + half
    raw = tl.load(page + run // PER * RUN + lane, real, 0).to(tl.int32)
    codes = raw >> (run % PER * W) & ((1 << W) - 1)
    if W != BITS:
        top = page + (D + 31) // 32 * 256 * W + run // 8 * RUN + lane
        codes |= (tl.load(top, real, 0).to(tl.int32) >> run % 8 & 1) << W
    x = level(codes, extra)
    scales = page + code_bytes_values(D, BITS)
    if AXIS == "block":
        at, minima = block * PAGE + t, (D + 31) // 32 * PAGE
        s = half_at(scales, at, real)
    elif AXIS == "token":
        at, minima = t, PAGE
        s = half_at(scales, at, t >= 0)
    else:
        at, minima = t, PAGE
        s = tl.load(extra)
    x = x * s
    if PARAMETERS == 2:
        x += half_at(scales, minima + at, real)
    return tl.where(real, x, 0.0)
