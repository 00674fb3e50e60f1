"""How much attention tokens got, on the GPU; see statistics_numba.py.

Scores are taken once more: their maximum and total, which attention_triton.py has left for each
chunk, make probabilities of them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pykv.kernels.attention_triton import (
    CHUNK,
    RECORD,
    chunks_seen,
    entry_of,
    first_entry,
    holds,
    kept_by,
    tables,
)
from pykv.kernels.jit_triton import device
from pykv.kernels.plain_triton import PAGE, page_at
from pykv.kernels.slices_triton import MASKED, page_scores, queries, tail_scores

# what column_sums takes of the parameters of attention
PARAMETERS = (
    "D_K", "WIDTH_K", "SLICE_K", "PAGE_K", "PAGE_WIDTH_K", "PAGE_SLICE_K", "ENCODED", "OPERAND",
    "PRECISION", "TAIL_K", "K_BITS", "K_AXIS", "K_PARAMETERS", "k_level", "N_ROT", "NEOX",
    "K_OUTLIERS", "K_PLACES",
)  # fmt: skip


def parameters(fixed: dict[str, Any]) -> dict[str, Any]:
    """Compile-time parameters of `column_sums`, of those of attention."""
    return {name: fixed[name] for name in PARAMETERS}


@device
def whole(stats, place, first, last, real, TILE: tl.constexpr):
    """log2 of the largest weight and the weights' sum [TILE] over all chunks of some heads."""
    m, total = tl.full((TILE,), MASKED, tl.float32), tl.zeros((TILE,), tl.float32)
    for chunk in range(first, last + 1):
        at = stats + (place + chunk) * 2
        top, part = tl.load(at, real, MASKED), tl.load(at + 1, real, 0.0)
        most = tl.maximum(m, top)
        total = total * tl.exp2(m - most) + part * tl.exp2(top - most)
        m = most
    return m, tl.where(real, total, 1.0)


@device
def put_shares(
    s, seen, m, total, real, sums, each, place, e, room, TILE: tl.constexpr, EACH: tl.constexpr
):
    """Write what scores [TILE, 64] of entry e are of the softmax."""
    there, t = real[:, None] & seen[None, :], tl.arange(0, PAGE)
    p = tl.where(there, tl.exp2(tl.where(there, s, MASKED) - m[:, None]) / total[:, None], 0.0)
    if EACH:
        at = each + (place * room + e)[:, None] * PAGE + t[None, :]
        tl.store(at, p, real[:, None] & (t >= 0)[None, :])
    else:
        tl.store(sums + e * PAGE + t, tl.sum(p, 0))


@triton.jit(do_not_specialize=["chunks", "splits", "room"])
def column_sums(
    pool, records, rows, q, q_pages, q_sinks, stats, each, extra_k, extra_k_stride, n_kv, chunks,
    splits, room, scale, offset_cos, offset_sin, start_cos, start_sin,
    GROUP: tl.constexpr, TILE: tl.constexpr, D_K: tl.constexpr, WIDTH_K: tl.constexpr,
    SLICE_K: tl.constexpr, PAGE_K: tl.constexpr, PAGE_WIDTH_K: tl.constexpr,
    PAGE_SLICE_K: tl.constexpr, ENCODED: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, TAIL_K: tl.constexpr, K_BITS: tl.constexpr, K_AXIS: tl.constexpr,
    K_PARAMETERS: tl.constexpr, k_level: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
    K_OUTLIERS: tl.constexpr, K_PLACES: tl.constexpr, SINKS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Attention of each row to each slot, summed over a KV head's queries, to where records say.

    Parameters are those of `attend_rows`, whose `stats` are read. EACH: every query head's own, to
    f32 [rows, heads, room, 64]. Entries that a KV head has not are not written.
    """
    i, h, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    number = tl.load(rows + i).to(tl.int64)
    record = records + number * RECORD
    keys, _, sinks, encoded = tables(record, h)
    last_place, encoded, alive = kept_by(record, h, encoded, keys, True)
    low, t = tl.load(record + 6), tl.arange(0, PAGE)
    g, heads = tl.arange(0, TILE), n_kv * GROUP
    real, line = g < GROUP, number * heads + h * GROUP + g
    query, across, page_query = queries(
        q, q_pages, line, real, scale, D_K, WIDTH_K, SLICE_K, PAGE_K, PAGE_WIDTH_K, PAGE_SLICE_K,
        OPERAND, N_ROT, NEOX,
    )  # fmt: skip
    sink_query, sink_across = query, across
    if SINKS:
        sink_query, sink_across, _ = queries(
            q_sinks, q_sinks, line, real, scale, D_K, WIDTH_K, SLICE_K, D_K, WIDTH_K, SLICE_K,
            OPERAND, N_ROT, NEOX,
        )  # fmt: skip
    begin, final = first_entry(low, sinks), entry_of(last_place, sinks)
    oldest, newest = chunks_seen(record)
    place = i * heads + h * GROUP + g
    m, total = whole(stats, place * chunks, oldest, newest, real, TILE)
    capacity, sums, extra = tl.load(record + 2), stats, extra_k + h * extra_k_stride
    if EACH == 0:
        sums = tl.load(record + 10).to(tl.pointer_type(tl.float32)) + h * capacity * PAGE
    oldest += (split + splits - oldest % splits) % splits
    for chunk in range(oldest, newest + 1, splits):
        first = tl.maximum(begin, chunk * CHUNK)
        last = tl.minimum(final, chunk * CHUNK + CHUNK - 1)
        if ENCODED:
            for e in range(tl.maximum(first, 1), tl.minimum(last, encoded) + 1):
                s = page_scores(
                    page_at(pool, keys + e), extra, page_query, across, e, offset_cos, offset_sin,
                    start_cos, start_sin, TILE, PAGE_K, PAGE_WIDTH_K, PAGE_SLICE_K, OPERAND,
                    PRECISION, K_BITS, K_AXIS, K_PARAMETERS, k_level, N_ROT, NEOX, K_OUTLIERS,
                    K_PLACES,
                )  # fmt: skip
                at = t + (sinks + (e - 1) * PAGE)
                seen = (at >= low) & (at <= last_place) & holds(alive, e)
                put_shares(s, seen, m, total, real, sums, each, place, e, room, TILE, EACH)
        # the sinks, where the entries have them, and the tail
        tail = tl.maximum(tl.maximum(first, 1), encoded + 1)
        for n in range(tl.where(first == 0, 0, 1), tl.maximum(last - tail, -1) + 2):
            e = tl.where(n == 0, 0, tail + n - 1)
            slots = tl.where(n == 0, (sinks + 15) // 16 * 16, PAGE)
            page = page_at(pool, keys + e).to(tl.pointer_type(TAIL_K))
            s = tail_scores(
                page, slots, query, across, sink_query, sink_across, e, offset_cos, offset_sin,
                start_cos, start_sin, TILE, D_K, WIDTH_K, SLICE_K, OPERAND, PRECISION, N_ROT,
                NEOX, SINKS,
            )  # fmt: skip
            at = t + tl.where(n == 0, 0, sinks + (e - 1) * PAGE)
            seen = (at >= low) & (at <= last_place) & (t < tl.where(n == 0, sinks, PAGE))
            seen = seen & holds(alive, e)
            put_shares(s, seen, m, total, real, sums, each, place, e, room, TILE, EACH)
