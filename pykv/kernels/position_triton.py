"""Keys that are stored before RoPE, and turned where they are read; see position_numba.py.

Tables are f32: `offset_cos` and `offset_sin` [pairs][64] of a page's tokens, `start_cos` and
`start_sin` [entries][pairs] of the entries' first positions, as backends/page_maps.py makes them.
N_ROT channels are turned; NEOX: a pair lies N_ROT / 2 apart, else side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pykv.kernels.plain_triton import PAGE


@triton.jit
def partner(c, N_ROT: tl.constexpr, NEOX: tl.constexpr):
    """The channel that each of c [C] is turned with, or itself."""
    other = tl.where(c < N_ROT // 2, c + N_ROT // 2, c - N_ROT // 2) if NEOX else c ^ 1
    return tl.where(c < N_ROT, other, c)


@triton.jit
def turn(
    keys, others, c, t, entry, offset_cos, offset_sin, start_cos, start_sin,
    N_ROT: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Keys [C, T] of channels c and tokens t of a table's entry, turned; others: their partners."""
    PAIRS: tl.constexpr = N_ROT // 2
    pair, first = (c % PAIRS, c < PAIRS) if NEOX else (c // 2, c % 2 == 0)
    pair = tl.minimum(pair, PAIRS - 1)
    cos0 = tl.load(start_cos + entry * PAIRS + pair)[:, None]
    sin0 = tl.load(start_sin + entry * PAIRS + pair)[:, None]
    place = pair[:, None] * PAGE + t[None, :]
    cos1, sin1 = tl.load(offset_cos + place), tl.load(offset_sin + place)
    cos, sin = cos1 * cos0 - sin1 * sin0, sin1 * cos0 + cos1 * sin0
    signed = tl.where(first[:, None], -sin, sin)
    return tl.where((c < N_ROT)[:, None], keys * cos + others * signed, keys)
