"""How a head's cells are laid out anew: which old cell each slot of the new pages takes.

Three ways. `closed` moves as little as it can: the encoded pages with most holes are emptied into
the others' holes, and only pages that take cells in are encoded again. That is exact for types
whose scales belong to one token. Types with scales of a channel over 32 tokens (kivi keys) keep
their scale while a new key lies within the channel's range, and round 32 keys anew where it does
not. Measured as tests/cache/test_rearrange.py does it, 256 tokens kept, a page joining and 64
random ones going at each closing: the keys' error, as a part of their deviation from each channel's
mean, grows from 0.39 to 0.62 in ten closings and to 0.66 in thirty for kivi2, from 0.17 to 0.28 and
0.29 for kivi3, from 0.078 to 0.13 and 0.14 for kivi4, with and without channel offsets. nuq values
with outliers, which are chosen by page, go from 0.159 to 0.172 (nuq4) and from 0.255 to 0.273
(nuq3) in ten closings at 1 %.
`gathered` puts what is kept side by side, in order. `followed` moves nothing, for policies that
always drop the oldest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import I64, PAGE, Move

if TYPE_CHECKING:
    from pykv.cache.kept import Kept

Bool = NDArray[np.bool_]
Layout = tuple[I64, Bool, I64]  # cells of the full pages [n, 64], which are live; cells of the tail


def closed(live: Bool, full: int, limit: int) -> Layout:
    """A head's layout with fewer than 64 holes.

    live: its cells; full: pages before the tail; limit: live cells of the tail at which its oldest
    64 become a page.
    """
    pages = np.arange(full * PAGE).reshape(full, PAGE)
    alive = live[: full * PAGE].reshape(full, PAGE).copy()
    tail = full * PAGE + np.flatnonzero(live[full * PAGE :])
    while alive.size and alive.size - np.count_nonzero(alive) >= PAGE:
        victim = int(alive.sum(1).argmin())
        moved = pages[victim][alive[victim]]
        pages, alive = np.delete(pages, victim, 0), np.delete(alive, victim, 0)
        holes = np.flatnonzero(~alive)[: len(moved)]
        pages.reshape(-1)[holes], alive.reshape(-1)[holes] = moved, True
    if len(tail) >= limit:
        pages = np.concatenate([pages, tail[None, :PAGE]])
        alive = np.concatenate([alive, np.ones((1, PAGE), bool)])
        tail = tail[PAGE:]
    return pages, alive, tail


def followed(live: Bool, full: int, limit: int) -> Layout:
    """A head's layout with fewer than 64 holes, where always the oldest cells are dropped.

    No cell changes its slot: pages without tokens go, and the tail's oldest 64 cells become a page
    with its holes. So the distances between places stay those between tokens.
    """
    first = int(live.argmax()) // PAGE * PAGE
    pages = np.arange(first, max(full * PAGE, first)).reshape(-1, PAGE)
    alive = live[first : max(full * PAGE, first)].reshape(-1, PAGE)
    tail = np.arange(max(full * PAGE, first), len(live))
    if np.count_nonzero(live[tail]) >= limit:
        block, used = tail[:PAGE], live[tail[:PAGE]]
        # as in `gathered`
        pages = np.concatenate([pages, np.where(used, block, block[used.argmax()])[None]])
        alive, tail = np.concatenate([alive, used[None]]), tail[PAGE:]
    return pages, alive, tail


def gathered(stays: Bool, full: int) -> Layout:
    """A head's layout with nothing but the cells that stay."""
    kept = np.flatnonzero(stays[: full * PAGE])
    n = -(-len(kept) // PAGE)
    # the last one fills the page up: a value of another size would spoil a channel's scale
    pages = np.concatenate([kept, np.repeat(kept[-1:], n * PAGE - len(kept))]).reshape(n, PAGE)
    alive = (np.arange(n * PAGE) < len(kept)).reshape(n, PAGE)
    return pages, alive, full * PAGE + np.flatnonzero(stays[full * PAGE :])


class Rearrangement:
    """Gives heads their new layout, and collects the moves that fill the new pages."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._moves: dict[tuple[int, int, str], list[tuple[int, int, list[int], Any]]] = {}

    def add(self, layer: int, head: int, pages: I64, alive: Bool, tail: I64) -> None:
        """Lay out a head's cells."""
        kept, rules = self._kept, self._kept.rules
        exact, encoded = rules.bands[layer].exact, int(kept.words[layer, head, 1])
        old = kept.tables[:, layer, head].copy()
        rows = [(page, "page") for page in pages]
        rows += [(tail[i : i + PAGE], "tail") for i in range(0, len(tail), PAGE)]
        kept.tables[:, layer, head, 1:] = 0
        reused = set()
        for entry, (cells, kind) in enumerate(rows, 1):
            first = int(cells[0]) // PAGE
            sealed = kind == "page" and not exact
            same = (cells == first * PAGE + np.arange(len(cells))).all()
            if same and sealed == (first < encoded):
                kept.tables[:, layer, head, entry] = old[:, 1 + first]
                reused.add(1 + first)
                continue
            self._fill(layer, head, entry, cells, old, sealed)
        for entry in np.flatnonzero(old.any(0)).tolist():
            if entry and entry not in reused:
                for side in (0, 1):
                    pool = rules.sized(layer, "page" if entry <= encoded else "tail", side)
                    if pool is not None and old[side, entry]:
                        kept.replace(pool, int(old[side, entry]))
        self._renumber(layer, head, pages, alive, tail)

    def _fill(self, layer: int, head: int, entry: int, cells: I64, old: I64, sealed: bool) -> None:
        kept, formats = self._kept, self._kept.rules.bands[layer].formats
        encoded = int(kept.words[layer, head, 1])
        sources, number = np.unique(cells // PAGE, return_inverse=True)
        picks = np.full(PAGE, -1, np.int32)
        picks[: len(cells)] = number * PAGE + cells % PAGE
        for side, exact in enumerate((formats.exact_k, formats.exact_v)):
            pool = kept.rules.sized(layer, "page" if sealed else "tail", side)
            if pool is None:
                continue
            page = int(kept.take(pool, 1)[0])
            kept.tables[side, layer, head, entry] = page
            kind = "tail"
            if sealed and not exact:
                kind = "page" if sources[0] < encoded else "seal"
            work = (page, head, old[side, 1 + sources].tolist(), picks)
            self._moves.setdefault((layer, side, kind), []).append(work)

    def _renumber(self, layer: int, head: int, pages: I64, alive: Bool, tail: I64) -> None:
        kept = self._kept
        cells = np.concatenate([pages.reshape(-1), tail])
        tail_alive = kept.positions[layer, head, tail] >= 0
        live = np.concatenate([alive.reshape(-1), tail_alive])
        positions = np.where(live, kept.positions[layer, head, cells], -1)
        scores = np.where(live, kept.scores[:, layer, head, cells], 0)
        kept.positions[layer, head] = -1
        kept.positions[layer, head, : len(cells)] = positions
        kept.scores[:, layer, head] = 0
        kept.scores[:, layer, head, : len(cells)] = scores
        kept.cells[layer, head] = len(cells)
        kept.live[layer, head] = np.count_nonzero(live)
        exact = kept.rules.bands[layer].exact
        kept.tail_live[layer, head] = np.count_nonzero(live if exact else tail_alive)
        kept.words[layer, head] = (kept.rules.sinks + len(cells) - 1, 0 if exact else len(pages))
        kept.set_bits(layer, head)

    def done(self) -> list[Move]:
        """All moves, those of a layer, side and kind together."""
        moves = []
        for (layer, side, kind), work in self._moves.items():
            most = max(len(sources) for _, _, sources, _ in work)
            moves.append(Move(
                self._kept.rules.layers[layer], side, kind,
                np.array([page for page, *_ in work], np.int64),
                np.array([head for _, head, *_ in work], np.int64),
                np.array([s + [0] * (most - len(s)) for _, _, s, _ in work], np.int64),
                np.stack([picks for *_, picks in work]),
            ))  # fmt: skip
        return moves
