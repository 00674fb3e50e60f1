"""Tiles of coded pages for the GPU: layout in formats/coded.py.

Tiles are slices of a page, WIDTH channels from `first` on, and all its 64 tokens; WIDTH is a power
of two, `first` a multiple of 32, and channels from D on are zeros. Every byte is loaded once, as it
lies, and then spread over the values that share it: codes over the planes of their unit, scales
over their block. Values come by halves of 16 of each 32 channels.

A format gives BITS, AXIS (which values share a scale), PARAMETERS and
    level(code, extra) -> f32     what a code, i32, stands for
where `extra` points to f32 that lie outside the pages, as backends/page_maps.py has them. For pages
of plain values AXIS is "plain" and `level` the values' type.
"""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.plain_triton import PAGE, key_tile, value_tile

RUN = tl.constexpr(16)
RANGES_AT = tl.constexpr(32)  # f32 of `extra` before the ranges of key channels


@device
def main_bits(BITS: tl.constexpr):
    """Bits of a code's first set; 5 are 4 and 1, 3 are 2 and 1."""
    return BITS - 1 if BITS == 5 or BITS == 3 else BITS


@device
def code_bytes_keys(D: tl.constexpr, BITS: tl.constexpr):
    """Bytes of a key page's codes."""
    if BITS == 5 or BITS == 3:
        return D * 8 * (BITS - 1) + (D + 1) // 2 * 16
    return D * 8 * BITS


@device
def code_bytes_values(D: tl.constexpr, BITS: tl.constexpr):
    """Bytes of a value page's codes."""
    return (D + 31) // 32 * 256 * BITS


@device
def half_at(address, offset, mask):
    """float16 at `address + offset` bytes, as f32; 0 outside the mask."""
    return tl.load(address.to(tl.pointer_type(tl.float16)) + offset, mask, 0.0).to(tl.float32)


@device
def halves_in_words(address, place, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float16 [ROWS, 4 COLUMNS] as f32 from words of 8 bytes at `address + place` bytes.

    So loads are wide enough to be asynchronous, even of the few scales that a page has.
    """
    words = tl.load((address + place).to(tl.pointer_type(tl.int64)), mask, 0)
    shift = (tl.arange(0, 4) * 16).to(tl.int64)[None, None, :]
    halves = (words[:, :, None] >> shift).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(halves, (ROWS, 4 * COLUMNS)).to(tl.float32)


@device
def bits_at(units, shift, W: tl.constexpr):
    """W bits of units u8 from `shift` on; the two broadcast against each other."""
    return (units.to(tl.int32) >> shift) & ((1 << W) - 1)


@device
def spread_bits(raw, WIDTH: tl.constexpr, W: tl.constexpr):
    """i32 [WIDTH, 64] of a key page's set of W bits, u8 [WIDTH, 8 W]."""
    # channel, unit, run of the unit, token of the run
    shift = (tl.arange(0, 8 // W) * W)[None, None, :, None]
    codes = bits_at(tl.reshape(raw, (WIDTH, W // 2, 1, RUN)), shift, W)
    return tl.reshape(codes, (WIDTH, PAGE))


@device
def key_codes(page, first, D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """i32 [WIDTH, 64] of a key page."""
    W: tl.constexpr = main_bits(BITS)
    c, b = (tl.arange(0, WIDTH) + first)[:, None], tl.arange(0, 8 * W)[None, :]
    raw = tl.load(page + c * (8 * W) + b, (c < D) & (b >= 0), 0)
    codes = raw.to(tl.int32) if W == 8 else spread_bits(raw, WIDTH, W)
    if W != BITS:
        pair, b = (tl.arange(0, WIDTH // 2) + first // 2)[:, None], tl.arange(0, RUN)[None, :]
        top = tl.load(page + D * 8 * W + pair * RUN + b, (pair * 2 < D) & (b >= 0), 0)
        # pair of channels, channel, run, token of the run
        shift = tl.arange(0, 2)[None, :, None, None] * 4 + tl.arange(0, 4)[None, None, :, None]
        top = bits_at(tl.reshape(top, (WIDTH // 2, 1, 1, RUN)), shift, 1)
        codes |= tl.reshape(top, (WIDTH, PAGE)) << W
    return codes


@device
def of_blocks(scales, first, D: tl.constexpr, COUNT: tl.constexpr):
    """f32 [COUNT, 64] of blocks of 32 channels, by token."""
    block, word = (tl.arange(0, COUNT) + first // 32)[:, None], tl.arange(0, PAGE // 4)[None, :]
    place = block * (2 * PAGE) + word * 8
    return halves_in_words(scales, place, (block * 32 < D) & (word >= 0), COUNT, PAGE // 4)


@device
def of_groups(scales, first, D: tl.constexpr, WIDTH: tl.constexpr):
    """f32 [2, WIDTH] of both groups of 32 tokens, by channel."""
    group = tl.arange(0, 2)[:, None]
    if D % 4 == 0:
        c = (tl.arange(0, WIDTH // 4) * 4 + first)[None, :]
        place = group * (2 * D) + c * 2
        s = halves_in_words(scales, place, (c < D) & (group >= 0), 2, WIDTH // 4)
    else:
        c = (tl.arange(0, WIDTH) + first)[None, :]
        s = half_at(scales, group * D + c, (c < D) & (group >= 0))
    return s


@device
def of_tokens(scales):
    """f32 [1, 64] of all tokens."""
    word = tl.arange(0, PAGE // 4)[None, :]
    return halves_in_words(scales, word * 8, word >= 0, 1, PAGE // 4)


@device
def key_scales(scales, first, D: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    """f32 [WIDTH, 64], or [1, 64]: scales or minima of a key page."""
    if AXIS == "block":
        BLOCK: tl.constexpr = 32 if WIDTH > 32 else WIDTH
        s = of_blocks(scales, first, D, WIDTH // BLOCK)[:, None, :]
        s = tl.reshape(tl.broadcast_to(s, (WIDTH // BLOCK, BLOCK, PAGE)), (WIDTH, PAGE))
    elif AXIS == "channel":
        s = tl.trans(of_groups(scales, first, D, WIDTH))[:, :, None]
        s = tl.reshape(tl.broadcast_to(s, (WIDTH, 2, PAGE // 2)), (WIDTH, PAGE))
    else:
        s = of_tokens(scales)
    return s


@device
def coded_keys(
    page, extra, first, D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    AXIS: tl.constexpr, PARAMETERS: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """f32 [WIDTH, 64] of a coded key page."""
    c = tl.arange(0, WIDTH) + first
    x = level(key_codes(page, first, D, WIDTH, BITS), extra)
    real, scales = c < D, page + code_bytes_keys(D, BITS)
    if AXIS == "range":
        x *= tl.load(extra + RANGES_AT + c, real, 0.0)[:, None]
        x += tl.load(extra + RANGES_AT + D + c, real, 0.0)[:, None]
    elif AXIS == "head":
        x *= tl.load(extra)
    else:
        x *= key_scales(scales, first, D, WIDTH, AXIS)
        if PARAMETERS == 2:
            COUNT: tl.constexpr = (
                (D + 31) // 32 * PAGE if AXIS == "block" else 2 * D if AXIS == "channel" else PAGE
            )
            x += key_scales(scales + COUNT * 2, first, D, WIDTH, AXIS)
    return tl.where(real[:, None], x, 0.0)


@device
def key_slice(
    page, extra, first, D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    AXIS: tl.constexpr, PARAMETERS: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """[WIDTH, 64] of a key page: f32, or a plain page's own type."""
    if AXIS == "plain":
        c = tl.arange(0, WIDTH) + first
        x = key_tile(page.to(tl.pointer_type(level)), c, PAGE, D)
    else:
        x = coded_keys(page, extra, first, D, WIDTH, BITS, AXIS, PARAMETERS, level)
    return x


@device
def value_bits(
    page, first, half: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr
):
    """i32 [64, WIDTH / 2]: a value page's set of W bits, which begins at `page`."""
    UNITS: tl.constexpr = 16 * W if W < 8 else PAGE  # of a block; for 8 bits those of one half
    j, u = tl.arange(0, WIDTH // 2)[None, :], tl.arange(0, UNITS)[:, None]
    block = j // RUN + first // 32
    unit = block * UNITS + u
    place = (unit * 2 + half if W == 8 else unit) * RUN + j % RUN
    raw = tl.load(page + place, (block * 32 < D) & (u >= 0), 0)
    if W == 8:
        codes = raw.to(tl.int32)
    else:
        # unit, token of the unit, channel
        shift = (tl.arange(0, PAGE // UNITS) * 2 + half)[None, :, None] * W
        codes = tl.reshape(bits_at(raw[:, None, :], shift, W), (PAGE, WIDTH // 2))
    return codes


@device
def value_scales(scales, first, D: tl.constexpr, WIDTH: tl.constexpr, AXIS: tl.constexpr):
    """f32 [64, WIDTH / 2], or [64, 1]: scales or minima of a value page."""
    if AXIS == "block":
        s = tl.trans(of_blocks(scales, first, D, WIDTH // 32))[:, :, None]
        s = tl.reshape(tl.broadcast_to(s, (PAGE, WIDTH // 32, RUN)), (PAGE, WIDTH // 2))
    else:
        s = tl.trans(of_tokens(scales))
    return s


@device
def coded_values(
    page, extra, first, half: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, PARAMETERS: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """f32 [64, WIDTH / 2] of one half of a coded value page's slice."""
    W: tl.constexpr = main_bits(BITS)
    codes = value_bits(page, first, half, D, WIDTH, W)
    if W != BITS:
        top = page + (D + 31) // 32 * 256 * W
        codes |= value_bits(top, first, half, D, WIDTH, 1) << W
    x, scales = level(codes, extra), page + code_bytes_values(D, BITS)
    if AXIS == "head":
        x *= tl.load(extra)
    else:
        x *= value_scales(scales, first, D, WIDTH, AXIS)
        if PARAMETERS == 2:
            COUNT: tl.constexpr = (D + 31) // 32 * PAGE if AXIS == "block" else PAGE
            x += value_scales(scales + COUNT * 2, first, D, WIDTH, AXIS)
    block = tl.arange(0, WIDTH // 2) // RUN + first // 32
    return tl.where((block * 32 < D)[None, :], x, 0.0)


@device
def value_slice(
    page, extra, first, half: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, PARAMETERS: tl.constexpr, level: tl.constexpr,
):  # fmt: skip
    """[64, WIDTH / 2] of one half of a value page's slice: f32, or a plain page's own type."""
    if AXIS == "plain":
        t = tl.arange(0, PAGE)
        x = value_tile(page.to(tl.pointer_type(level)), t, PAGE, first, half, D, WIDTH)
    else:
        x = coded_values(page, extra, first, half, D, WIDTH, BITS, AXIS, PARAMETERS, level)
    return x
