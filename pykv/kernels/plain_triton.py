"""Tiles of f32, f16 and bf16 pages for the GPU: layout in plain_numba.py.

`page` points to items of the type; a page of sinks has fewer than 64 slots.
"""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device

PAGE = tl.constexpr(64)
ALIGN = tl.constexpr(64)  # bytes that pages begin at multiples of


@device
def page_at(pool, entry):
    """The page of a table's entry, which is its place in the pool in units of ALIGN bytes.

    So the compiler sees that it is aligned, and loads 16 bytes at a time.
    """
    return pool + tl.load(entry) * ALIGN


@device
def key_tile(page, c, slots, D: tl.constexpr):
    """[C, 64] of channels c [C], of the page's type; zeros beyond D and beyond the slots."""
    c, t = c[:, None], tl.arange(0, PAGE)[None, :]
    return tl.load(page + c * slots + t, (c < D) & (t < slots), 0.0)


@device
def value_tile(page, t, slots, first, half: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """[T, WIDTH / 2] of the tokens t [T]: channels first + 32 b + 16 half + lane, by (b, lane)."""
    t, j = t[:, None], tl.arange(0, WIDTH // 2)[None, :]
    block = j // 16 + first // 32
    place = (block * slots + t) * 32 + half * 16 + j % 16
    return tl.load(page + place, (block * 32 < D) & (t < slots), 0.0)
