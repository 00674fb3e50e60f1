"""Outliers of coded pages for the GPU, what they change in a tile; layout in formats/coded.py.

Each stands in the place of a decoded value. Their differences become a tile as a product of two
matrices that hold ones, and differences, where an outlier lies, which tl.dot takes; some at a
time, so that these fit in the registers.
"""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.coded_triton import (
    RANGES_AT,
    RUN,
    code_bytes_keys,
    code_bytes_values,
    half_at,
    main_bits,
)
from pykv.kernels.jit_triton import device
from pykv.kernels.plain_triton import PAGE

UNUSED = tl.constexpr(0xFFFF)
MOST = tl.constexpr(16)  # at a time


@device
def code_at(page, place, set_bytes, BITS: tl.constexpr):
    """Codes at places in run order; the first set has `set_bytes` bytes."""
    W: tl.constexpr = main_bits(BITS)
    run, lane = place // RUN, place % RUN
    byte = tl.load(page + run // (8 // W) * RUN + lane).to(tl.int32)
    code = byte >> (run % (8 // W) * W) & ((1 << W) - 1)
    if W != BITS:
        top = tl.load(page + set_bytes + run // 8 * RUN + lane).to(tl.int32)
        code |= (top >> run % 8 & 1) << W
    return code


@device
def entries(address, first, N: tl.constexpr, AT_ONCE: tl.constexpr):
    """Places i32 [AT_ONCE] from `first` on, values, and which are used; an unused one has 0."""
    i = tl.arange(0, AT_ONCE) + first
    place = tl.load(address.to(tl.pointer_type(tl.uint16)) + i, i < N, UNUSED).to(tl.int32)
    used, value = place != UNUSED, half_at(address, N + i, i < N)
    return tl.where(used, place, 0), value, used


@device
def of_keys(
    page, extra, c, D: tl.constexpr, BITS: tl.constexpr, level: tl.constexpr,
    N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """f32 [C, 64]: what to add to the keys of channels c, before RoPE."""
    AT_ONCE: tl.constexpr = PADDED if PADDED < MOST else MOST
    found = tl.zeros((c.shape[0], PAGE), tl.float32)
    for first in range(0, PADDED, AT_ONCE):
        place, value, used = entries(page + code_bytes_keys(D, BITS), first, N, AT_ONCE)
        channel, token = place // PAGE, place % PAGE
        code = code_at(page, place, D * 8 * main_bits(BITS), BITS)
        decoded = level(code, extra) * tl.load(extra + RANGES_AT + channel)
        decoded += tl.load(extra + RANGES_AT + D + channel)
        difference = tl.where(used, value - decoded, 0.0)
        where = (c[:, None] == channel[None, :]).to(tl.float16)
        what = tl.where(token[:, None] == tl.arange(0, PAGE)[None, :], difference[:, None], 0.0)
        found = tl.dot(where, what.to(tl.float16), found)
    return found


@device
def of_values(
    page, extra, first, half: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, level: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """f32 [64, WIDTH / 2]: what to add to a slice of values, of one half of each 32 channels."""
    scales = page + code_bytes_values(D, BITS)
    AT_ONCE: tl.constexpr = PADDED if PADDED < MOST else MOST
    j = tl.arange(0, WIDTH // 2)
    lane = j // 16 * 32 + half * 16 + j % 16 + first
    found = tl.zeros((PAGE, WIDTH // 2), tl.float32)
    for i in range(0, PADDED, AT_ONCE):
        place, value, used = entries(scales + 4 * PAGE, i, N, AT_ONCE)
        channel, token = place // (32 * PAGE) * 32 + place % 32, place // 32 % PAGE
        code = code_at(page, place, (D + 31) // 32 * 256 * main_bits(BITS), BITS)
        decoded = level(code, extra) * half_at(scales, token, used)
        decoded += half_at(scales, PAGE + token, used)
        difference = tl.where(used, value - decoded, 0.0)
        where = (tl.arange(0, PAGE)[:, None] == token[None, :]).to(tl.float16)
        what = tl.where(channel[:, None] == lane[None, :], difference[:, None], 0.0)
        found = tl.dot(where, what.to(tl.float16), found)
    return found
