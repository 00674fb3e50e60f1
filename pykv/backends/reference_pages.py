"""Where the oracle finds pages, and what they hold: format, bytes, transform, calibration."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from pykv.backends import latent, transforms
from pykv.backends.base import F32, I64, PAGE, U8, Step
from pykv.formats.base import Side
from pykv.formats.coded import find as cache_format

SIDES: tuple[Side, Side] = ("key", "value")
# (KV head, table entry) -> format, page bytes, slots, whether the page is an encoded one
Finder = Callable[[int, int], tuple[Any, U8, int, bool]]


def numbers_of(step: Step, layer: int, side: int, head: int) -> dict[str, Any]:
    """A head's numbers out of a calibration file, as an encoder and a decoder take them."""
    formats = step.formats[layer]
    wanted = cache_format((formats.page_k, formats.page_v)[side]).calibration != "none"
    if wanted and step.numbers and step.shapes[layer].shared:
        keys, values = step.numbers[layer]
        return {"numbers": (values[head], keys[head])}
    return {"numbers": step.numbers[layer][side][head]} if wanted and step.numbers else {}


def page_at(address: int, n_bytes: int) -> U8:
    """The bytes of a page, writable."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))


def table_at(address: int, n_kv: int, capacity: int) -> I64:
    """A page table, int64 [KV heads, capacity]."""
    entries = (ctypes.c_int64 * (n_kv * capacity)).from_address(address)
    return np.ctypeslib.as_array(entries).reshape(n_kv, capacity)


def map_of(step: Step, layer: int, side: int, head: int) -> F32 | None:
    """The transform of a head's keys or values, [D, R]."""
    shape, names = step.shapes[layer], step.formats[layer]
    transform = (names.transform_k, names.transform_v)[side]
    if shape.shared:
        whole = latent.key_maps(transform, shape, step.numbers[layer][1] if step.numbers else ())
        return None if whole is None else whole[head % len(whole)]
    numbers = step.numbers[layer][side] if step.numbers else ()
    maps = transforms.matrices(transform, (shape.d_k, shape.d_v)[side], numbers)
    return None if maps is None else maps[head % len(maps)]


def newest(step: Step, layer: int, row: int, head: int) -> tuple[int, int]:
    """A row's place in a head's table, and how many of its pages are encoded."""
    record = step.records[layer, row]
    if record[8]:
        place, encoded = table_at(int(record[8]), step.shapes[layer].n_kv, 2)[head]
    else:
        place, encoded = record[5], record[4]
    return int(place), int(encoded)


def finder(step: Step, layer: int, row: int, side: int) -> Finder:
    """Where a row's sequence has its pages."""
    shape, names = step.shapes[layer], step.formats[layer]
    d = (shape.d_k, shape.d_v)[side]
    record = step.records[layer, row]
    capacity, sinks = (int(r) for r in record[2:4])
    table = table_at(int(record[side]), shape.n_kv, capacity)
    page, tail = (
        cache_format((k, v)[side])
        for k, v in ((names.page_k, names.page_v), (names.tail_k, names.tail_v))
    )
    width = transforms.width((names.transform_k, names.transform_v)[side], d)
    if side == 0:
        page = latent.key_format(names.page_k, shape)
        width = latent.key_width(names.transform_k, shape)

    def find(head: int, entry: int) -> tuple[Any, U8, int, bool]:
        slots = PAGE if entry else (sinks + 15) // 16 * 16
        sealed = 0 < entry <= newest(step, layer, row, head)[1]
        format_, wide = (page, width) if sealed else (tail, d)
        size = format_.page_bytes(wide, SIDES[side], slots)
        return format_, page_at(int(table[head, entry]), size), slots, sealed

    return find


def read_page(step: Step, layer: int, row: int, side: int, head: int, entry: int) -> F32:
    """What a page holds, f32 [slots, D]; mapped pages are taken back."""
    shape = step.shapes[layer]
    format_, page, slots, sealed = finder(step, layer, row, side)(head, entry)
    decode = format_.decode_values if side else format_.decode_keys
    d = (shape.d_k, shape.d_v)[side]
    back = map_of(step, layer, side, head) if sealed else None
    numbers = numbers_of(step, layer, side, head) if sealed else {}
    # slots that hold no token may hold anything
    with np.errstate(invalid="ignore", over="ignore"):
        stored: F32 = decode(page, d if back is None else back.shape[1], slots, **numbers)
    # going back here is what a mapped query, or a map of the output, amounts to
    return stored if back is None else stored @ back.T


def write_page(find: Finder, side: int, head: int, entry: int, slot: I64, x: F32) -> None:
    """Put keys or values f32 [n, D] in slots [n] of a tail page."""
    tail, page, slots, _ = find(head, entry)
    encode, decode = (
        (tail.encode_keys, tail.decode_keys),
        (tail.encode_values, tail.decode_values),
    )[side]
    with np.errstate(invalid="ignore", over="ignore"):
        cells = np.nan_to_num(decode(page, x.shape[1], slots), posinf=0, neginf=0)
    cells[slot] = x
    page[:] = encode(cells)
