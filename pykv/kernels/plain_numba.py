"""What f32, f16 and bf16 pages share: one whole value per lane, no scales.

A key page is [d][slots], a value page [ceil(d / 32)][slots][32]; slots is 64, or for a sinks page
the sinks rounded up to 16. Templates: ITEM is the bytes of a value; `load`, `store` and `put` move
sixteen values or one.

The functions of a cache format, all taking addresses; `extra` is that of float32 which belong to
the layer and head and lie outside the pages, for formats that have such:
    encode_keys(x, d, page, extra)  x f32 [d][64] -> page
    encode_values(x, d, page, extra) x f32 [ceil(d / 32)][64][32] -> page
    scores(q, q_stride, page, ahead, d, slots, out, out_stride, extra)
                                    out[i][t] = q[i] . key t, for the rows i of a group;
                                    `ahead` is the page that comes next, asked for meanwhile
    mix(p, p_stride, entries, count, tokens, slots, d, out, out_stride, extra, after)
                                    out[i] += sum over t of p[i][t] * value t, over `count` pages
                                    whose addresses stand at `entries`; of the last, `tokens`;
                                    `after` is the page that comes after them
    read_keys(page, d, slots, out, extra)   -> f32 [d][64]
    read_values(page, d, slots, out, extra) -> f32 [ceil(d / 32)][64][32]
    write_key(x, page, d, slots, slot), write_value(...)   one token, for tails
    scores_read(..., extra, turns)  like `scores`, of keys before RoPE; see position_numba.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv.kernels import position_numba
from pykv.kernels.jit_numba import bind, device, inlined
from pykv.kernels.simd_control import prefetch
from pykv.kernels.simd_group import (
    add_products,
    load_group,
    store_group,
    zeros,
)
from pykv.kernels.simd_memory import (
    load_f32,
    scalar_f32,
    scalar_i64,
    store_f32,
)

PAGE = 64  # tokens
ZERO = np.float32(0)
ITEM = GROUP = 1
load, store, put = load_f32, store_f32, store_f32


def _encode_keys(x, d, page, extra):
    for i in range(d * 4):
        store(page + i * 16 * ITEM, load_f32(x + i * 64))


def _encode_values(x, d, page, extra):
    for i in range((d + 31) // 32 * 128):
        store(page + i * 16 * ITEM, load_f32(x + i * 64))


def _scores(q, q_stride, page, ahead, d, slots, out, out_stride, extra):
    step = slots * ITEM
    if slots == 64:
        a, b, c, e = zeros(GROUP), zeros(GROUP), zeros(GROUP), zeros(GROUP)
        for i in range(d):
            at = page + i * step
            prefetch(ahead + i * step)
            if ITEM > 1:
                prefetch(ahead + i * step + 64)
            a = add_products(a, q + i * 4, q_stride, load(at))
            b = add_products(b, q + i * 4, q_stride, load(at + 16 * ITEM))
            c = add_products(c, q + i * 4, q_stride, load(at + 32 * ITEM))
            e = add_products(e, q + i * 4, q_stride, load(at + 48 * ITEM))
        store_group(out, out_stride, a)
        store_group(out + 64, out_stride, b)
        store_group(out + 128, out_stride, c)
        store_group(out + 192, out_stride, e)
    else:
        for run in range(slots // 16):
            a = zeros(GROUP)
            for i in range(d):
                a = add_products(a, q + i * 4, q_stride, load(page + i * step + run * 16 * ITEM))
            store_group(out + run * 64, out_stride, a)


def _mix(p, p_stride, entries, count, tokens, slots, d, out, out_stride, extra, after):
    # pages are taken from end to end: the CPU's own prefetching needs long runs
    for i in range(count):
        page = scalar_i64(entries + i * 8)
        ahead = scalar_i64(entries + (i + 1) * 8) if i + 1 < count else after
        for block in range((d + 31) // 32):
            at, part = out + block * 128, block * slots * 32 * ITEM
            a = load_group(zeros(GROUP), at, out_stride)
            b = load_group(zeros(GROUP), at + 64, out_stride)
            for t in range(tokens if i == count - 1 else PAGE):
                place = part + t * 32 * ITEM
                prefetch(ahead + place)
                weight = p + (i * PAGE + t) * 4
                a = add_products(a, weight, p_stride, load(page + place))
                b = add_products(b, weight, p_stride, load(page + place + 16 * ITEM))
            store_group(at, out_stride, a)
            store_group(at + 64, out_stride, b)


def _read_keys(page, d, slots, out, extra):
    for i in range(d):
        for run in range(slots // 16):
            store_f32(out + i * 256 + run * 64, load(page + (i * slots + run * 16) * ITEM))


def _key_values(page, d, i, slots, extra):
    """The keys of channel i, as four vectors; of a shorter page the last again and again."""
    at, last = page + i * slots * ITEM, slots - 16
    return (
        load(at),
        load(at + min(16, last) * ITEM),
        load(at + min(32, last) * ITEM),
        load(at + min(48, last) * ITEM),
    )


def _read_values(page, d, slots, out, extra):
    for block in range((d + 31) // 32):
        for t in range(slots):
            at = page + (block * slots + t) * 32 * ITEM
            store_f32(out + (block * PAGE + t) * 128, load(at))
            store_f32(out + (block * PAGE + t) * 128 + 64, load(at + 16 * ITEM))


def _write_key(x, page, d, slots, slot):
    for i in range(d):
        put(page + (i * slots + slot) * ITEM, scalar_f32(x + i * 4))


def _write_value(x, page, d, slots, slot):
    for i in range(d):
        block, lane = i // 32, i % 32
        put(page + ((block * slots + slot) * 32 + lane) * ITEM, scalar_f32(x + i * 4))
    for i in range(d, (d + 31) // 32 * 32):
        block, lane = i // 32, i % 32
        put(page + ((block * slots + slot) * 32 + lane) * ITEM, ZERO)


def cache_functions(name: str, item: int, load: Any, store: Any, put: Any) -> tuple[Any, ...]:
    """The nine functions for a type of `item` bytes; those of GROUP heads still lack it."""
    names = {"ITEM": item, "load": load, "store": store, "put": put}

    def make(template: Any) -> Any:
        return bind(template, f"{name}{template.__name__}", **names)

    names["key_values"] = inlined(make(_key_values))
    first = tuple(device(make(t)) for t in (_encode_keys, _encode_values))
    grouped = (make(_scores), make(_mix))
    rest = (_read_keys, _read_values, _write_key, _write_value)
    return (*first, *grouped, *(device(make(t)) for t in rest), make(position_numba._scores_read))
