"""Keys that are stored before RoPE, and turned where they are read; see position_numba.py.

Of a pair of channels a key is (a cos - b sin, b cos + a sin), so that its product with a query is
the key's with `q cos + across sin`, where `across` is the query with each pair (a, b) as (b, -a):
two products with the key's own channels, and no partner of a key is ever looked up. The angle is
an entry's, by which the query is turned, and a token's in its page, which scales the keys.

Tables are f32: `offset_cos` and `offset_sin` [pairs][64] of a page's tokens, `start_cos` and
`start_sin` [entries][pairs] of the entries' first positions, as backends/page_maps.py makes them.
N_ROT channels are turned; NEOX: a pair lies N_ROT / 2 apart, else side by side.
"""

from __future__ import annotations

import triton.language as tl

from pykv.kernels.jit_triton import device
from pykv.kernels.plain_triton import PAGE


@device
def partner(c, N_ROT: tl.constexpr, NEOX: tl.constexpr):
    """The channel that each of c [C] is turned with, or itself."""
    other = tl.where(c < N_ROT // 2, c + N_ROT // 2, c - N_ROT // 2) if NEOX else c ^ 1
    return tl.where(c < N_ROT, other, c)


@device
def pair_of(c, N_ROT: tl.constexpr, NEOX: tl.constexpr):
    """Which pair each of c [C] belongs to, the last one where to none, and whether it is first."""
    PAIRS: tl.constexpr = N_ROT // 2
    pair, first = (c % PAIRS, c < PAIRS) if NEOX else (c // 2, c % 2 == 0)
    return tl.minimum(pair, PAIRS - 1), first


@device
def turned_query(
    q, across, c, entry, start_cos, start_sin, N_ROT: tl.constexpr, NEOX: tl.constexpr
):
    """Queries f32 [LINES, C] turned back by the angles of an entry's first position.

    `across`: the same with each pair (a, b) as (b, -a), zero where there is no pair. Returns what
    keys are multiplied with after they were multiplied with the offsets' cosines, and sines.
    """
    pair, _ = pair_of(c, N_ROT, NEOX)
    place = entry * (N_ROT // 2) + pair
    cos = tl.where(c < N_ROT, tl.load(start_cos + place), 1.0)[None, :]
    sin = tl.where(c < N_ROT, tl.load(start_sin + place), 0.0)[None, :]
    return q * cos + across * sin, across * cos - q * sin


@device
def offsets(c, entry, offset_cos, offset_sin, N_ROT: tl.constexpr, NEOX: tl.constexpr):
    """Cosines and sines [C, 64] of the angles between a page's first token and its others.

    They are the same for every entry, and are read again for each: kept in registers throughout
    a loop over entries, as the compiler would have them, they leave too few for the rest.
    """
    pair, _ = pair_of(c, N_ROT, NEOX)
    # nothing is added, which the compiler does not know
    first = pair * PAGE + tl.minimum(entry, 0)
    place, turned = first[:, None] + tl.arange(0, PAGE)[None, :], (c < N_ROT)[:, None]
    cos, sin = tl.load(offset_cos + place), tl.load(offset_sin + place)
    return tl.where(turned, cos, 1.0), tl.where(turned, sin, 0.0)
