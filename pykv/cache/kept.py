"""What a policy has kept of one sequence: each head's own cells, in the layers that it acts on.

A cell is a slot of a page, counted from the first one after the sinks: cell c of a head stands at
table entry 1 + c / 64. Its place in the table is sinks + c. Cells that were dropped are holes; when
a head has 64 of them they are closed, see rearrange.py. Encoded pages come first, then the tail.

Between `begin` and `commit` or `abort` all changes can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykv.backends.base import F32, I32, I64, PAGE, LayerShape, Move, PageMemory
from pykv.cache.layout import Band
from pykv.cache.pages import PagePool
from pykv.cache.rearrange import Rearrangement, closed, followed, gathered
from pykv.policies.base import Budget, Cells, Policy

U64 = NDArray[np.uint64]
ONE = np.uint64(1)
STATE = ("tables", "alive", "words", "cells", "live", "tail_live")  # small, saved for every batch
LARGE = ("positions", "scores")


@dataclass(frozen=True)
class Rules:
    """What is the same for all sequences of a store under a policy."""

    policy: Policy
    budget: Budget
    sinks: int
    layers: list[int]  # those that the policy acts on
    shapes: list[LayerShape]  # theirs
    bands: list[Band]  # theirs
    residuals: I64  # [layers, 1] tokens that stay exact
    pool: Callable[[int], PagePool]
    memory: PageMemory

    def sized(self, layer: int, kind: str, side: int) -> PagePool | None:
        """The pool of a layer's pages; None: that side has none of this kind."""
        n_bytes = self.bands[layer].sizes.get((kind, side))
        return self.pool(n_bytes) if n_bytes else None

    @property
    def n_kv(self) -> int:
        """KV heads of each of the layers."""
        return self.shapes[0].n_kv


class Kept:
    """One sequence's cells.  Arrays are [layers, KV heads, ...], the layers those of the rules."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.reading = rules, rules.policy.whole_prompts
        n, g = len(rules.layers), rules.n_kv
        self.capacity, self.tokens = 8, 0
        self.tables: I64 = np.zeros((2, n, g, 8), np.int64)
        self.alive: U64 = np.zeros((n, g, 8), np.uint64)
        self.words: I64 = np.zeros((n, g, 2), np.int64)  # newest place, encoded pages
        self.cells: I64 = np.zeros((n, g), np.int64)  # in use, holes included
        self.live: I64 = np.zeros((n, g), np.int64)  # without holes
        self.tail_live: I64 = np.zeros((n, g), np.int64)
        self.positions: I32 = np.full((n, g, 7 * PAGE), -1, np.int32)
        self.scores: F32 = np.zeros((rules.policy.n_scores, n, g, 7 * PAGE), np.float32)
        self.sums: F32 = np.zeros((n, g, 8, PAGE), np.float32)
        self._l, self._g = np.arange(n)[:, None], np.arange(g)[None, :]
        exact = np.array([[b.exact] for b in rules.bands])
        self._exact = exact
        self._limit = np.where(exact, np.iinfo(np.int64).max, rules.residuals + PAGE)
        self._taken: dict[PagePool, set[int]] = {}
        self._replaced: list[tuple[PagePool, int]] = []
        self._read_last: list[tuple[PagePool, int]] = []
        self._saved: dict[str, Any] = {}
        self._addresses: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def addresses(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where keys' and values' tables, words, bits and sums begin, and the bytes of a layer."""
        if self._addresses is None:
            arrays = (self.tables[0], self.tables[1], self.words, self.alive, self.sums)
            self._addresses = (
                tuple(int(a.ctypes.data) for a in arrays), tuple(a.strides[0] for a in arrays)
            )  # fmt: skip
        return self._addresses

    @property
    def n_kept(self) -> int:
        """Tokens in use of a head, sinks included, where all heads have the same number."""
        return min(self.tokens, self.rules.sinks) + int(self.live[0, 0])

    @property
    def nbytes(self) -> int:
        """Bytes of tables and statistics."""
        names = (*STATE, *LARGE, "sums")
        return sum(getattr(self, name).nbytes for name in names)

    # changes that can be taken back

    def begin(self, large: bool) -> None:
        """From here on changes can be taken back; `large`: cells may be dropped or moved too."""
        self._taken, self._replaced, self._read_last = {}, [], []
        names = (*STATE, *LARGE) if large else STATE
        self._saved = {name: getattr(self, name).copy() for name in names}
        self._saved |= {
            "tokens": self.tokens, "capacity": self.capacity, "reading": self.reading
        }  # fmt: skip
        if self.rules.policy.per_head:
            return
        for pool in {self.rules.pool(n) for b in self.rules.bands for n in b.sizes.values()}:
            if pool.any_shared:
                self._own_newest_pages()
                return

    def commit(self) -> None:
        """Make the changes count."""
        replaced, self._replaced, self._saved = self._replaced, [], {}
        self._drop_read()
        self._taken = {}
        for pool, address in replaced:
            pool.drop(np.array([address], np.int64))

    def abort(self) -> None:
        """Take the changes back."""
        saved, self._saved = self._saved, {}
        if not saved:
            return
        added = self.positions >= saved["tokens"]
        for name, value in saved.items():
            setattr(self, name, value)
        if "positions" not in saved:
            self.positions[added] = -1
        self._fit_capacity()
        taken, self._taken = self._taken, {}
        self._replaced, self._read_last = [], []
        for pool, addresses in taken.items():
            pool.drop(np.array(sorted(addresses), np.int64))

    def take(self, pool: PagePool, count: int) -> I64:
        """Pages that go back if the batch does not count."""
        addresses = pool.take(count)
        self._taken.setdefault(pool, set()).update(addresses.tolist())
        return addresses

    def replace(self, pool: PagePool, address: int) -> None:
        """Let go of a page: soon if it is of this batch, else when that counts."""
        mine = address in self._taken.get(pool, ())
        (self._read_last if mine else self._replaced).append((pool, address))

    def _drop_read(self) -> None:
        """Give back this batch's pages that the moves before have read."""
        done, self._read_last = self._read_last, []
        for pool, address in done:
            self._taken[pool].discard(address)
            pool.drop(np.array([address], np.int64))

    def _own_newest_pages(self) -> None:
        """Copy the pages that the next token goes into, where another sequence holds them too."""
        for layer, head in np.ndindex(self.cells.shape):
            cell = int(self.cells[layer, head])
            in_sinks = self.tokens < self.rules.sinks
            if (self.tokens if in_sinks else cell % PAGE) == 0:
                continue
            entry = 0 if in_sinks else 1 + cell // PAGE
            for side in (0, 1):
                pool = self.rules.sized(layer, "sinks" if in_sinks else "tail", side)
                old = int(self.tables[side, layer, head, entry])
                if pool is not None and old and pool.shared(old):
                    new = int(self.take(pool, 1)[0])
                    self.rules.memory.copy(old, new, pool.page_bytes)
                    self.tables[side, layer, head, entry] = new
                    self.replace(pool, old)

    # a token

    def append(self, at: slice, position: int) -> None:
        """A cell for a token in every head of some layers."""
        rules, layers = self.rules, self._l[at]
        if position < rules.sinks:
            if position == 0:
                self._new_pages(at, "sinks", np.zeros_like(self.cells[at]))
            self.words[at, :, 0] = position
            self.alive[at, :, 0] |= ONE << np.uint64(position)
            return
        cells = self.cells[at]
        entries = 1 + cells // PAGE
        if (cells % PAGE == 0).any():
            self._new_pages(at, "tail", np.where(cells % PAGE == 0, entries, 0))
        self.positions[layers, self._g, cells] = position
        self.scores[:, layers, self._g, cells] = 0
        self.alive[layers, self._g, entries] |= ONE << (cells % PAGE).astype(np.uint64)
        self.words[at, :, 0] = rules.sinks + cells
        self.cells[at] += 1
        self.live[at] += 1
        self.tail_live[at] += 1

    def _new_pages(self, at: slice, kind: str, entries: I64) -> None:
        """Pages for a table entry of each head that has one here; entry 0 only for sinks."""
        while int(entries.max()) + 1 >= self.capacity:  # kernels look one entry ahead
            self.capacity *= 2
            self._fit_capacity()
        for layer, wanted in zip(range(*at.indices(len(self.cells))), entries, strict=True):
            heads = np.flatnonzero(wanted) if kind == "tail" else np.arange(len(wanted))
            for side in (0, 1):
                pool = self.rules.sized(layer, kind, side)
                if pool is not None and len(heads):
                    self.tables[side, layer, heads, wanted[heads]] = self.take(pool, len(heads))

    def shrink(self) -> None:
        """Give back what arrays have beyond the cells in use, after most were dropped."""
        self.capacity = max(8, 4 + int(self.cells.max()) // PAGE)
        self._fit_capacity()

    def _fit_capacity(self) -> None:
        """Bring all arrays to the capacity."""
        self._addresses = None
        for name, per_entry, fill in (
            ("tables", 1, 0), ("alive", 1, 0), ("positions", PAGE, -1), ("scores", PAGE, 0),
        ):  # fmt: skip
            old = getattr(self, name)
            wanted = (self.capacity - (per_entry > 1)) * per_entry
            if old.shape[-1] < wanted:
                new = np.full((*old.shape[:-1], wanted), fill, old.dtype)
                new[..., : old.shape[-1]] = old
                setattr(self, name, new)
            elif old.shape[-1] > wanted:
                setattr(self, name, np.ascontiguousarray(old[..., :wanted]))
        if self.sums.shape[2] != self.capacity:
            self.sums = np.zeros((*self.alive.shape, PAGE), np.float32)

    # decisions

    def view(self, at: slice) -> Cells:
        """The cells of some layers as policies see them."""
        used = int(self.cells[at].max())
        return Cells(
            self.positions[at, :, :used], self.scores[:, at, :, :used], self.tokens - 1,
            self.n_kept, self.rules.shapes[0].n_head // self.rules.n_kv, self.rules.sinks,
        )  # fmt: skip

    def decide(self, at: slice, n_seen: int, kept: int) -> None:
        """After the token at n_seen - 1, which `kept` tokens of each head have met."""
        policy = self.rules.policy
        budget = self.rules.budget.of(n_seen)
        over = 0 if self.reading else kept - budget
        if not (policy.needs == "sums" or over > 0):
            return
        view = self.view(at)
        view.now, view.n_kept = n_seen - 1, kept
        if policy.needs == "sums":
            sums = self.sums[at, :, 1:].reshape(*view.positions.shape[:-1], -1)
            policy.observe(view, sums[..., : view.positions.shape[-1]])
        if over > 0:
            self.drop(at, policy.drop(view, policy.count_to_drop(over, budget)))

    def drop(self, at: slice, cells: I64) -> None:
        """Drop cells [layers, KV heads, n] of some layers."""
        layers, heads = self._l[at, :, None], self._g[:, :, None]
        self.positions[layers, heads, cells] = -1
        self.scores[:, layers, heads, cells] = 0
        bits = ~(ONE << (cells % PAGE).astype(np.uint64))
        if cells.shape[-1] == 1:
            self.alive[layers, heads, 1 + cells // PAGE] &= bits
        else:
            np.bitwise_and.at(self.alive, (layers, heads, 1 + cells // PAGE), bits)
        self.live[at] -= cells.shape[-1]
        self.tail_live[at] -= (cells >= PAGE * self.words[at, :, 1:]).sum(-1)

    # pages

    def due(self, at: slice) -> NDArray[np.bool_]:
        """Heads of some layers with a full tail, or a page's worth of holes."""
        holes = self.cells[at] - self.live[at]
        full: NDArray[np.bool_] = (holes >= PAGE) | (self.tail_live[at] >= self._limit[at])
        return full

    def close(self, at: slice) -> list[Move]:
        """Encode full tails and close holes, where a head of some layers has enough of them."""
        due = self.due(at)
        if not due.any():
            return []
        self._drop_read()
        first, moves = at.indices(len(self.cells))[0], Rearrangement(self)
        layout = closed if self.rules.policy.per_head else followed
        for layer, head in np.argwhere(due):
            layer += first
            used, encoded = int(self.cells[layer, head]), int(self.words[layer, head, 1])
            exact = bool(self._exact[layer, 0])
            moves.add(layer, head, *layout(
                self.positions[layer, head, :used] >= 0,
                used // PAGE if exact else encoded,
                int(self._limit[layer, 0]),
            ))  # fmt: skip
        return moves.done()

    def keep_only(self, layer: int, keep: Sequence[NDArray[np.bool_]]) -> list[Move]:
        """Keep these cells [KV heads][cells] of a layer, and close all holes."""
        moves = Rearrangement(self)
        for head, stays in enumerate(keep):
            used, encoded = int(self.cells[layer, head]), int(self.words[layer, head, 1])
            stays = stays[:used] & (self.positions[layer, head, :used] >= 0)
            sealed = used // PAGE if self._exact[layer, 0] else encoded
            moves.add(layer, head, *gathered(stays, sealed))
        return moves.done()

    # whole sequences

    def pages(self) -> list[tuple[PagePool, I64]]:
        """All pages, by pool; address 0 is nobody's."""
        held, entry = [], np.arange(self.capacity)
        for layer in range(len(self.cells)):
            encoded = self.words[layer, :, 1:]
            masks = {
                "sinks": np.broadcast_to(entry == 0, self.tables[0, layer].shape),
                "page": (entry > 0) & (entry <= encoded),
                "tail": (entry > 0) & (entry > encoded),
            }
            for kind, mask in masks.items():
                for side in (0, 1):
                    pool = self.rules.sized(layer, kind, side)
                    if pool is not None:
                        held.append((pool, self.tables[side, layer][mask]))
        return held

    def fork(self) -> Kept:
        """A copy that shares every page."""
        other = Kept(self.rules)
        for name in (*STATE, *LARGE, "sums"):
            setattr(other, name, getattr(self, name).copy())
        other.capacity, other.tokens, other.reading = self.capacity, self.tokens, self.reading
        other._addresses = None
        for pool, addresses in other.pages():
            pool.hold(addresses)
        return other

    @classmethod
    def of_plain(cls, rules: Rules, tables: I64, tokens: int, encoded: Sequence[int]) -> Kept:
        """Take over the tables [2, layers, KV heads, n] of a sequence that dropped nothing yet."""
        kept = cls(rules)
        kept.tokens, cells = tokens, max(tokens - rules.sinks, 0)
        kept.capacity = max(8, tables.shape[3], 2 + -(-cells // PAGE))
        kept._fit_capacity()
        kept.tables[..., : tables.shape[3]] = tables
        kept.positions[:, :, :cells] = np.arange(cells) + rules.sinks
        kept.cells[:] = kept.live[:] = cells
        kept.words[:, :, 0] = tokens - 1
        kept.words[:, :, 1] = np.array(encoded)[:, None]
        kept.tail_live[:] = cells - PAGE * kept.words[:, :, 1]
        kept.set_bits(slice(None), slice(None))
        kept.alive[:, :, 0] = np.uint64((1 << min(tokens, rules.sinks)) - 1)
        return kept

    def set_bits(self, layers: Any, heads: Any) -> None:
        """Take the bits of live cells from their positions."""
        bits = np.packbits(self.positions[layers, heads] >= 0, axis=-1, bitorder="little")
        self.alive[layers, heads, 1:] = bits.view("<u8")
