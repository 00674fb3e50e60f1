"""What policies need of the oracle: one row at a time, statistics, and pages made of others."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv.backends.base import F32, I64, PAGE, Move, Rope, Step
from pykv.backends.reference_pages import (
    SIDES,
    finder,
    map_of,
    newest,
    numbers_of,
    page_at,
    read_page,
    table_at,
    write_page,
)
from pykv.formats.coded import find as cache_format


def entry_of(place: int, sinks: int) -> tuple[int, int]:
    """The table entry and the slot of a place."""
    return (0, place) if place < sinks else (1 + (place - sinks) // PAGE, (place - sinks) % PAGE)


def visible(step: Step, layer: int, row: int, head: int) -> list[int]:
    """The places of the tokens that a row sees in a head, itself included."""
    record, (last, _) = step.records[layer, row], newest(step, layer, row, head)
    places = range(int(record[6]), last + 1)
    if not record[9]:
        return list(places)
    bits = table_at(int(record[9]), step.shapes[layer].n_kv, int(record[2]))[head].view(np.uint64)
    at = {place: entry_of(place, int(record[3])) for place in places}
    return [place for place, (entry, slot) in at.items() if int(bits[entry]) >> slot & 1]


def write(step: Step, layer: int, row: int, k: F32, v: F32) -> None:
    """Put a row's key and value [G, D] in every head's own place."""
    for side, x in ((0, k), (1, v)):
        find = finder(step, layer, row, side)
        for head in range(len(x)):
            place, _ = newest(step, layer, row, head)
            entry, slot = entry_of(place, int(step.records[layer, row, 3]))
            write_page(find, side, head, entry, np.array([slot]), x[head : head + 1])


def attend(
    step: Step, layer: int, row: int, q: F32, q_sinks: F32, rope: Rope | None, turn: Any
) -> tuple[F32, F32]:
    """A row's output [H, D] and its attention [H, capacity, 64], of queries [H, D].

    `rope`: keys are turned by their places, with `turn`.
    """
    shape, sinks = step.shapes[layer], int(step.records[layer, row, 3])
    out = np.empty((shape.n_head, shape.d_v), np.float32)
    shares = np.zeros((shape.n_head, int(step.records[layer, row, 2]), PAGE), np.float32)
    group = shape.n_head // shape.n_kv
    for g in range(shape.n_kv):
        places = np.array(visible(step, layer, row, g))
        entries, slots = np.array([entry_of(int(p), sinks) for p in places]).T
        keys, values = (np.empty((len(places), d), np.float32) for d in (shape.d_k, shape.d_v))
        for entry in np.unique(entries):
            mine = entries == entry
            for side, x in ((0, keys), (1, values)):
                x[mine] = read_page(step, layer, row, side, g, int(entry))[slots[mine]]
        if rope is not None:
            keys = turn(keys[:, None], places, rope)[:, 0]
        for h in range(g * group, (g + 1) * group):
            with np.errstate(invalid="ignore"):  # as in ReferenceBackend._attend
                scores = np.where(places < sinks, keys @ q_sinks[h], keys @ q[h])
                p = np.exp(scores - scores.max())
                p /= p.sum()
                out[h] = p @ values
            shares[h, entries, slots] = p
    return out, shares


def tell_sums(step: Step, layer: int, row: int, shares: F32) -> None:
    """Write a row's attention, summed over a KV head's query heads, where its record says."""
    record, n_kv = step.records[layer, row], step.shapes[layer].n_kv
    capacity = int(record[2])
    sums = page_at(int(record[10]), n_kv * capacity * PAGE * 4).view(np.float32)
    sums = sums.reshape(n_kv, capacity, PAGE)
    for head in range(n_kv):
        used = 1 + entry_of(newest(step, layer, row, head)[0], int(record[3]))[0]
        sums[head, :used] = shares.reshape(n_kv, -1, capacity, PAGE)[head, :, :used].sum(0)


def keep_queries(step: Step, layer: int, q: F32) -> None:
    """Copy the rows' queries [T, H, D] to where their records say."""
    for row, address in enumerate(step.records[layer, :, 11]):
        if address:
            page_at(int(address), q[row].nbytes).view(np.float32)[:] = q[row].reshape(-1)


def make_pages(step: Step, move: Move) -> None:
    """Fill new pages with tokens of others; see base.Move."""
    for page, head, sources, picks in zip(
        move.pages, move.heads, move.sources, move.picks, strict=True
    ):
        _make_page(step, move, int(page), int(head), sources, picks)


def _make_page(step: Step, move: Move, page: int, head: int, sources: I64, picks: Any) -> None:
    shape, names, side = step.shapes[move.layer], step.formats[move.layer], move.side
    d = (shape.d_k, shape.d_v)[side]
    tail = cache_format((names.tail_k, names.tail_v)[side])
    encoded = cache_format((names.page_k, names.page_v)[side])
    mapped = map_of(step, move.layer, side, head)
    own = numbers_of(step, move.layer, side, head)
    width = d if mapped is None else mapped.shape[1]
    # format, channels and numbers of old pages, and of new ones
    old, new = {
        "tail": ((tail, d, {}), (tail, d, {})),
        "seal": ((tail, d, {}), (encoded, width, own)),
        "page": ((encoded, width, own), (encoded, width, own)),
    }[move.kind]
    cells = np.zeros((PAGE, old[1]), np.float32)
    for number, source in enumerate(sources):
        if not source:
            continue
        stored = page_at(int(source), old[0].page_bytes(old[1], SIDES[side], PAGE))
        decode = (old[0].decode_keys, old[0].decode_values)[side]
        with np.errstate(invalid="ignore", over="ignore"):  # of slots that hold no token
            values = decode(stored, old[1], PAGE, **old[2])
        mine = (picks >= 0) & (picks // PAGE == number)
        cells[mine] = values[picks[mine] % PAGE]
    if move.kind == "seal" and mapped is not None:
        cells = cells @ mapped
    encode = (new[0].encode_keys, new[0].encode_values)[side]
    fresh = page_at(page, new[0].page_bytes(new[1], SIDES[side], PAGE))
    fresh[:] = encode(cells, **new[2])
