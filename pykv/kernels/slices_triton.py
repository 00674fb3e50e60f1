"""Slices of channels, and what the GPU's attention does with one after the other.

WIDTH channels, D filled up, are slices of SLICE and a last one that may be narrower, all powers of
two. Tiles of slices are kept in tuples, for values two for each slice: the halves of 16 of each 32
channels, as pages have them.
"""

from __future__ import annotations

import triton.language as tl

from pykv.kernels import outliers_triton
from pykv.kernels.coded_triton import key_slice, value_slice
from pykv.kernels.jit_triton import device
from pykv.kernels.plain_triton import PAGE, key_tile
from pykv.kernels.position_triton import offsets, pair_of, partner, turned_query

MASKED = tl.constexpr(-1.0e30)


@device
def slices(WIDTH: tl.constexpr, SLICE: tl.constexpr):
    """The number of slices."""
    return (WIDTH + SLICE - 1) // SLICE


@device
def width_of(i: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr):
    """Channels of slice i."""
    return SLICE if (i + 1) * SLICE <= WIDTH else WIDTH - i * SLICE


@device
def query_slices(
    q, line, real, scale, ACROSS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    SLICE: tl.constexpr, OPERAND: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Queries [LINES, slice] of D channels, scaled; zeros where a line is not real.

    f32 where keys are to be turned. ACROSS: each pair (a, b) as (b, -a), and zero for the others.
    """
    found = ()
    for i in tl.static_range(slices(WIDTH, SLICE)):
        c = tl.arange(0, width_of(i, WIDTH, SLICE)) + i * SLICE
        from_, factor, there = c, scale, c < D
        if ACROSS:
            _, first = pair_of(c, N_ROT, NEOX)
            from_, there = partner(c, N_ROT, NEOX), c < N_ROT
            factor = tl.where(first, scale, -scale)[None, :]
        x = tl.load(q + line[:, None] * D + from_[None, :], real[:, None] & there[None, :], 0.0)
        found = found + ((x * factor).to(tl.float32 if N_ROT > 0 else OPERAND),)
    return found


@device
def queries(
    q, q_pages, line, real, scale, D: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr,
    PAGE_D: tl.constexpr, PAGE_WIDTH: tl.constexpr, PAGE_SLICE: tl.constexpr,
    OPERAND: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Slices of queries, of those that turned keys want beside them, and of queries for pages."""
    query = query_slices(q, line, real, scale, False, D, WIDTH, SLICE, OPERAND, N_ROT, NEOX)
    if N_ROT > 0:
        # keys that are stored before RoPE are never mapped
        across = query_slices(q, line, real, scale, True, D, WIDTH, SLICE, OPERAND, N_ROT, NEOX)
        page_query = query
    else:
        across, page_query = query, query_slices(
            q_pages, line, real, scale, False, PAGE_D, PAGE_WIDTH, PAGE_SLICE, OPERAND, N_ROT, NEOX
        )  # fmt: skip
    return query, across, page_query


@device
def add_scores(
    s, k, query, across, first, entry, offset_cos, offset_sin, start_cos, start_sin,
    WIDTH: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, N_ROT: tl.constexpr,
    NEOX: tl.constexpr,
):  # fmt: skip
    """s [LINES, 64] and the products of a slice's queries [LINES, WIDTH] and keys [WIDTH, 64]."""
    if N_ROT == 0:
        s = tl.dot(query, k.to(OPERAND), s, input_precision=PRECISION)
    else:
        c, k = tl.arange(0, WIDTH) + first, k.to(tl.float32)
        cos, sin = offsets(c, entry, offset_cos, offset_sin, N_ROT, NEOX)
        query, across = turned_query(query, across, c, entry, start_cos, start_sin, N_ROT, NEOX)
        s = tl.dot(query.to(OPERAND), (k * cos).to(OPERAND), s, input_precision=PRECISION)
        s = tl.dot(across.to(OPERAND), (k * sin).to(OPERAND), s, input_precision=PRECISION)
    return s


@device
def page_keys(
    page, extra, first, D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    AXIS: tl.constexpr, PARAMETERS: tl.constexpr, level: tl.constexpr, N: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Keys [WIDTH, 64] of a slice of an encoded page, its N outliers among them."""
    k = key_slice(page, extra, first, D, WIDTH, BITS, AXIS, PARAMETERS, level)
    if N > 0:
        c = tl.arange(0, WIDTH) + first
        k += outliers_triton.of_keys(page, extra, c, D, BITS, level, N, PLACES)
    return k


@device
def page_scores(
    page, extra, query, across, e, offset_cos, offset_sin, start_cos, start_sin,
    LINES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BITS: tl.constexpr, AXIS: tl.constexpr,
    PARAMETERS: tl.constexpr, level: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
    N: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Products [LINES, 64] of queries and the keys of an encoded page, which is entry e."""
    s = tl.zeros((LINES, PAGE), tl.float32)
    for i in tl.static_range(slices(WIDTH, SLICE)):
        k = page_keys(
            page, extra, i * SLICE, D, width_of(i, WIDTH, SLICE), BITS, AXIS, PARAMETERS, level, N,
            PLACES,
        )  # fmt: skip
        s = add_scores(
            s, k, query[i], across[i if N_ROT > 0 else 0], i * SLICE, e, offset_cos, offset_sin,
            start_cos, start_sin, width_of(i, WIDTH, SLICE), OPERAND, PRECISION, N_ROT, NEOX,
        )  # fmt: skip
    return s


@device
def tail_scores(
    page, slots, query, across, sink_query, sink_across, e, offset_cos, offset_sin, start_cos,
    start_sin, LINES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """The same of the sinks' or the tail's page of so many slots; SINKS: entry 0 has queries."""
    s = tl.zeros((LINES, PAGE), tl.float32)
    for i in tl.static_range(slices(WIDTH, SLICE)):
        c = tl.arange(0, width_of(i, WIDTH, SLICE)) + i * SLICE
        x, y = query[i], across[i if N_ROT > 0 else 0]
        if SINKS:
            x = tl.where(e == 0, sink_query[i], x)
            y = tl.where(e == 0, sink_across[i if N_ROT > 0 else 0], y)
        s = add_scores(
            s, key_tile(page, c, slots, D), x, y, i * SLICE, e, offset_cos, offset_sin, start_cos,
            start_sin, width_of(i, WIDTH, SLICE), OPERAND, PRECISION, N_ROT, NEOX,
        )  # fmt: skip
    return s


@device
def page_values(
    page, extra, first, half: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, AXIS: tl.constexpr, PARAMETERS: tl.constexpr, level: tl.constexpr,
    N: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Values [64, WIDTH / 2] of a slice of an encoded page, its N outliers among them."""
    v = value_slice(page, extra, first, half, D, WIDTH, BITS, AXIS, PARAMETERS, level)
    if N > 0:
        v += outliers_triton.of_values(page, extra, first, half, D, WIDTH, BITS, level, N, PLACES)
    return v


@device
def zero_sums(LINES: tl.constexpr, WIDTH: tl.constexpr, SLICE: tl.constexpr):
    """Sums [LINES, slice / 2], two for each slice."""
    acc = ()
    for i in tl.static_range(slices(WIDTH, SLICE)):
        zeros = tl.zeros((LINES, width_of(i, WIDTH, SLICE) // 2), tl.float32)
        acc = acc + (zeros, zeros)
    return acc


@device
def weights(s, seen, m, total, OPERAND: tl.constexpr):
    """What scores [LINES, 64], of which `seen` count, do to the maximum and the total.

    Returns these two, by what sums so far shrink [LINES, 1], and the scores' weights.
    """
    s = tl.where(seen, s, MASKED)
    top = tl.maximum(m, tl.max(s, 1))
    shrink, p = tl.exp2(m - top), tl.where(seen, tl.exp2(s - top[:, None]), 0.0)
    return top, total * shrink + tl.sum(p, 1), shrink[:, None], p.to(OPERAND)


@device
def store_sums(
    partial, place, distance, real, acc, share,
    WIDTH: tl.constexpr, SLICE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Sums times `share` to SIZE channels of rows `place` [LINES], `distance` f32 each."""
    for i in tl.static_range(2 * slices(WIDTH, SLICE)):
        j = tl.arange(0, width_of(i // 2, WIDTH, SLICE) // 2)[None, :]
        channel = j // 16 * 32 + j % 16 + (i // 2 * SLICE + i % 2 * 16)
        at = partial + place[:, None] * distance + channel
        tl.store(at, acc[i] * share, real[:, None] & (channel < SIZE))
