"""RoPE, and keys and values on their way into the tail, on the GPU.

Records and tables are those of attention_triton.py. A line is one head of one row, [LINES, WIDTH].
Flags are i64 [4] of a layer: 1 after a key or value that is not finite, whose position is the next
number, and how many were beyond the tail type's range, which are stored as its largest. What is not
finite is stored as 0.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pykv.formats.coded import find
from pykv.kernels.attention_triton import RECORD, entry_of
from pykv.kernels.elementwise_triton import rows_at_once
from pykv.kernels.jit_triton import FUSED, device, is_interpreted
from pykv.kernels.launch_triton import module, upto
from pykv.kernels.plain_triton import ALIGN, PAGE
from pykv.kernels.position_triton import partner

INFINITE = tl.constexpr(3.4028234663852886e38)


@device
def turned(x, at, row, c, mask, cos, sin, D: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr):
    """Channels c of the heads at `at` [LINES, 1] of x, by the angles of their rows [LINES]."""
    values = tl.load(x + at + c, mask, 0.0)
    if N_ROT > 0:
        PAIRS: tl.constexpr = N_ROT // 2
        others = tl.load(x + at + partner(c, N_ROT, NEOX), mask, 0.0)
        pair, first = (c % PAIRS, c < PAIRS) if NEOX else (c // 2, c % 2 == 0)
        angle, turns = row.to(tl.int64)[:, None] * PAIRS + pair, mask & (c < N_ROT)
        cosine, sine = tl.load(cos + angle, turns, 1.0), tl.load(sin + angle, turns, 0.0)
        values = tl.where(turns, values * cosine + others * tl.where(first, -sine, sine), values)
    return values


@device
def turn_lines(
    x, line, n_lines, heads, cos, sin,
    D: tl.constexpr, WIDTH: tl.constexpr, N_ROT: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Turn lines [LINES] of x [T, heads, D] in place."""
    c = tl.arange(0, WIDTH)[None, :]
    mask, at = (line < n_lines)[:, None] & (c < D), line.to(tl.int64)[:, None] * D
    values = turned(x, at, line // heads, c, mask, cos, sin, D, N_ROT, NEOX)
    # a pair's other half is another thread's: all have read before any writes
    tl.debug_barrier()
    tl.store(x + at + c, values, mask)


@device
def checked(values, mask, position, flags, LIMIT: tl.constexpr):
    """values [LINES, WIDTH] as they are stored, and the flags for them."""
    finite = tl.abs(values) <= INFINITE
    bad = tl.max((mask & (finite == 0)).to(tl.int32), 1)
    if tl.max(bad, 0) > 0:
        # the smallest position of those found here
        first = tl.min(tl.where(bad > 0, position, 1 << 62), 0)
        if tl.atomic_cas(flags, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64)) == 0:
            tl.store(flags + 1, first)
    values = tl.where(finite, values, 0.0)
    large = mask & (tl.abs(values) > LIMIT)
    count = tl.sum(tl.sum(large.to(tl.int32), 1), 0)
    if count > 0:
        tl.atomic_add(flags + 2, count.to(tl.int64))
    return tl.minimum(tl.maximum(values, -LIMIT), LIMIT)


@device
def narrow(values, TAIL: tl.constexpr):
    """Finite values as TAIL, to nearest even, which Triton's interpreter does not for bf16."""
    if tl.bfloat16 == TAIL:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + (32767 + (bits >> 16 & 1))) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(TAIL)


@device
def write_lines(
    pool, records, rows, line, n_lines, k, v, cos, sin, flags, heads,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    N_ROT: tl.constexpr, NEOX: tl.constexpr, TAIL_K: tl.constexpr, TAIL_V: tl.constexpr,
    LIMIT_K: tl.constexpr, LIMIT_V: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Keys, turned if N_ROT, and values of lines [LINES] of the rows to their tails.

    KEPT: each KV head has a place of its own.
    """
    real = line < n_lines
    near = tl.minimum(line, n_lines - 1)
    row, h = tl.load(rows + near // heads).to(tl.int64), near % heads
    record = records + row * RECORD
    sinks, position = tl.load(record + 3), tl.load(record + 5)
    place = position
    if KEPT:
        place = tl.load(tl.load(record + 8).to(tl.pointer_type(tl.int64)) + h * 2)
        position = tl.load(record + 7)
    entry = entry_of(place, sinks)
    slots = tl.where(entry == 0, (sinks + 15) // 16 * 16, PAGE)
    slot = tl.where(entry == 0, place, (place - sinks) % PAGE)[:, None]
    at = h * tl.load(record + 2) + entry
    k_page = tl.load(tl.load(record).to(tl.pointer_type(tl.int64)) + at, real, 0) * ALIGN
    v_page = tl.load(tl.load(record + 1).to(tl.pointer_type(tl.int64)) + at, real, 0) * ALIGN
    c, of_head = tl.arange(0, WIDTH_K)[None, :], (row * heads + h)[:, None]
    mask = real[:, None] & (c < D_K)
    values = turned(k, of_head * D_K, row, c, mask, cos, sin, D_K, N_ROT, NEOX)
    values = checked(values, mask, position, flags, LIMIT_K)
    to = (pool + k_page).to(tl.pointer_type(TAIL_K))[:, None] + c * slots[:, None] + slot
    tl.store(to, narrow(values, TAIL_K), mask)
    c = tl.arange(0, WIDTH_V)[None, :]
    mask = real[:, None] & (c < D_V)
    values = tl.load(v + of_head * D_V + c, mask, 0.0)
    values = checked(values, mask, position, flags, LIMIT_V)
    to = (pool + v_page).to(tl.pointer_type(TAIL_V))[:, None]
    to += (c // 32 * slots[:, None] + slot) * 32 + c % 32
    # a value's last block is filled up with zeros
    tl.store(to, narrow(values, TAIL_V), real[:, None] & (c < (D_V + 31) // 32 * 32))


@triton.jit(do_not_specialize=["n_rows"])
def write_tail(
    pool, records, rows, q, k, v, cos, sin, flags, n_rows, q_heads, heads,
    LINES: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, Q_ROT: tl.constexpr, K_ROT: tl.constexpr, NEOX: tl.constexpr,
    TAIL_K: tl.constexpr, TAIL_V: tl.constexpr, LIMIT_K: tl.constexpr, LIMIT_V: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Keys and values of the rows to their tails, and if Q_ROT then RoPE of all rows' queries.

    Programs write first; those behind them turn queries.
    """
    number = tl.program_id(0)
    n_lines, i = n_rows * heads, tl.arange(0, LINES)
    writers = tl.cdiv(n_lines, LINES)
    if number < writers:
        write_lines(
            pool, records, rows, number * LINES + i, n_lines, k, v, cos, sin, flags, heads,
            D_K, D_V, WIDTH_K, WIDTH_V, K_ROT, NEOX, TAIL_K, TAIL_V, LIMIT_K, LIMIT_V, KEPT,
        )  # fmt: skip
    elif Q_ROT > 0:
        line = (number - writers) * LINES + i
        turn_lines(q, line, n_rows * q_heads, q_heads, cos, sin, D_K, WIDTH_K, Q_ROT, NEOX)


def warps(values: int) -> int:
    """So many that each thread has a value or more."""
    return min(4, max(1, values // 32))


def tail(d_k: int, d_v: int, types: tuple[str, str], lines: int) -> dict[str, Any]:
    """Compile-time parameters of `write_tail`, less those of RoPE."""
    width_k, width_v = upto(d_k), upto((d_v + 31) // 32 * 32)
    key, value = (find(name) for name in types)
    return {
        "LINES": lines, "D_K": d_k, "D_V": d_v, "WIDTH_K": width_k, "WIDTH_V": width_v,
        "TAIL_K": module(types[0]).level, "TAIL_V": module(types[1]).level,
        "LIMIT_K": key.page_limit, "LIMIT_V": value.page_limit,
        "num_warps": warps(lines * max(width_k, width_v)),
    }  # fmt: skip


def write(
    pool: Any, records: Any, rows: Any, k: Any, v: Any, flags: Any, tails: tuple[str, str],
    kept: bool = False,
) -> None:  # fmt: skip
    """Store keys f32 [T, G, d_k] and values [T, G, d_v] of the rows i32 [n] as they are.

    pool: u8, aligned to 64 bytes. records: i64 [T, 16] of the layer. tails: the types of the
    tail's keys and values, f16, bf16 or f32. kept: a policy gave each KV head its place.
    """
    _write(pool, records, rows, k, k, v, k, k, flags, tails, 0, 0, False, kept)


def rope_write(
    pool: Any, records: Any, rows: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any, flags: Any,
    tails: tuple[str, str], n_rot: int, neox: bool, turn_keys: bool, kept: bool = False,
) -> None:  # fmt: skip
    """Turn queries f32 [T, H, d_k] in place and `write` keys, turned if turn_keys, and values.

    All rows of a batch: `rows` holds 0 to T - 1. cos, sin: f32 [T, n_rot / 2]; None: no RoPE.
    """
    if cos is None:
        write(pool, records, rows, k, v, flags, tails, kept)
    else:
        _write(
            pool, records, rows, q, k, v, cos, sin, flags, tails, n_rot, n_rot * turn_keys, neox,
            kept,
        )  # fmt: skip


def _write(
    pool: Any, records: Any, rows: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any, flags: Any,
    tails: tuple[str, str], q_rot: int, k_rot: int, neox: bool, kept: bool,
) -> None:  # fmt: skip
    (_, heads, d_k), d_v, n_rows = k.shape, v.shape[2], rows.shape[0]
    lines = 1
    if is_interpreted():
        lines = rows_at_once(upto(max(d_k, d_v + 31)), n_rows * max(heads, q.shape[1]))
    programs = triton.cdiv(n_rows * heads, lines)
    if q_rot:
        programs += triton.cdiv(n_rows * q.shape[1], lines)
    write_tail[(programs,)](
        pool, records, rows, q, k, v, cos, sin, flags, n_rows, q.shape[1], heads,
        Q_ROT=q_rot, K_ROT=k_rot, NEOX=neox, KEPT=kept, **tail(d_k, d_v, tails, lines), **FUSED,
    )  # fmt: skip
