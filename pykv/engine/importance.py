"""How much a small change of a key's channel or of a value changes a layer's attention output.

For query i and key j with weight p, value v and output o: d o / d v = p, and d o / d k_c is
p (v - o) q_c, where k is the key before RoPE and q the query, times the scores' factor, turned back
by the key's position. Squared, and summed over later queries of all heads of the group, these are

    value      sum_i p^2
    channel c  sum_i p^2 |v - o|^2 q_c^2

With the turned query a = q_c, b = q_c' of a pair, turned back by an angle t, the channel's q_c^2 is
(a cos t + b sin t)^2 = a^2 cos^2 t + b^2 sin^2 t + 2 a b sin t cos t; so the sums over queries are
matrix products with a^2, b^2 and a b, and no [queries, keys, channels] is ever formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykv.backends.base import F32, I64, Rope

BLOCK = 64  # queries at a time
LEAST_WEIGHT = 1e-12  # p below it counts as 0: squares of it slow the processor down, for nothing


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """What one KV head's attention is given in a chunk: q of its group and k turned by RoPE."""

    q: F32  # [group, T, D], times the scores' factor
    k: F32  # [T, D]
    v: F32  # [T, D]
    window: int  # tokens that a query sees, itself included; 0: all


def turned(x: F32, rope: Rope | None, positions: I64) -> F32:
    """x [T, H, D] turned by its tokens' positions [T]."""
    if rope is None:
        return x
    first, second = pairs(rope)
    cos, sin = (t[:, None, :] for t in rope.tables(positions))
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def pairs(rope: Rope) -> tuple[slice, slice]:
    """The channels of pairs: all first ones, and their partners."""
    first, end = rope.first, rope.first + rope.n_rot
    if rope.neox:
        return slice(first, first + rope.n_rot // 2), slice(first + rope.n_rot // 2, end)
    return slice(first, end, 2), slice(first + 1, end, 2)


def importance(given: HeadInputs, rope: Rope | None, rows: I64) -> tuple[F32, F32]:
    """Of the tokens at `rows`, rising: of values f32 [rows], of key channels f32 [rows, D]."""
    group, n, d = given.q.shape
    features = _features(given.q, rope)  # [group, T, F]
    of_values = np.zeros(len(rows), np.float32)
    sums = np.zeros((len(rows), features.shape[2]), np.float32)
    values = given.v[rows]
    norms = (values**2).sum(1)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        low = max(start - given.window + 1, 0) if given.window else 0
        p = _weights(given, start, stop, low)  # [group * queries, keys]
        out = p @ given.v[low:stop]
        first, last = np.searchsorted(rows, (low, stop))
        if first == last:
            continue
        mine = slice(first, last)
        squared = p[:, rows[mine] - low]
        squared *= squared > LEAST_WEIGHT
        squared *= squared
        # a token sees itself exactly, whatever its page holds
        at = np.arange(np.searchsorted(rows, start), last)
        squared.reshape(group, -1, last - first)[:, rows[at] - start, at - first] = 0
        of_values[mine] += squared.sum(0)
        distance = (out**2).sum(1)[:, None] + norms[mine] - 2 * (out @ values[mine].T)
        squared *= np.maximum(distance, 0)
        sums[mine] += squared.T @ features[:, start:stop].reshape(-1, features.shape[2])
    return of_values, _turned_back(sums, rope, rows, d)


def _weights(given: HeadInputs, start: int, stop: int, low: int) -> F32:
    """softmax(q k) of queries start to stop - 1 over keys low to stop - 1; heads one by one."""
    q = given.q[:, start:stop].reshape(-1, given.q.shape[2])
    scores = q @ given.k[low:stop].T
    query, n = np.arange(start, stop)[:, None], stop - low
    by_head = scores.reshape(len(given.q), -1, n)
    # only the newest keys are hidden from some, and of a window the oldest
    by_head[:, :, start - low :][:, np.arange(start, stop) > query] = -np.inf
    if given.window:
        oldest = np.arange(low, stop - given.window)
        by_head[:, :, : len(oldest)][:, oldest <= query - given.window] = -np.inf
    scores -= scores.max(1, keepdims=True)
    p: F32 = np.exp(scores, out=scores)
    p /= p.sum(1, keepdims=True)
    return p


def _features(q: F32, rope: Rope | None) -> F32:
    """Squares of the queries' channels, and the products of each pair."""
    if rope is None:
        return q**2
    first, second = pairs(rope)
    return np.concatenate([q**2, q[..., first] * q[..., second]], -1)


def _turned_back(sums: F32, rope: Rope | None, rows: I64, d: int) -> F32:
    """Sums over queries of _features, with the queries turned back by the rows' positions."""
    if rope is None:
        return sums
    first, second = pairs(rope)
    cos, sin = rope.tables(rows)
    a, b, ab = sums[:, :d][:, first], sums[:, :d][:, second], sums[:, d:]
    out = sums[:, :d].copy()
    out[:, first] = a * cos**2 + b * sin**2 + 2 * ab * cos * sin
    out[:, second] = a * sin**2 + b * cos**2 - 2 * ab * cos * sin
    return np.maximum(out, 0)
