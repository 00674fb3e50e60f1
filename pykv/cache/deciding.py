"""When a policy decides: after each row of a batch, after a step, or when a prompt ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pykv.backends.base import (
    F32,
    PAGE,
    RECORD,
    Move,
    Policy,
    Round,
    Segment,
    Step,
)
from pykv.cache.kept import Kept, Rules
from pykv.cache.pages import Held, Recent, Undo
from pykv.cache.paging import Paging
from pykv.policies.base import U8, Budget, Window
from pykv.policies.base import Policy as Decider

ALL = slice(None)
SLACK_TOKENS = 2 * PAGE  # holes, and a page that is filled


def rules(policy: Decider, budget: Budget | None, paging: Paging) -> Rules:
    """The rules of a store's policy.  A tail is no longer than what always stays."""
    bands = [b for b in paging.bands if b.policy]
    layers = sorted(layer for band in bands for layer in band.layers)
    mine = [paging.bands[paging.band_of[layer]] for layer in layers]
    residuals = np.array([[band.residual] for band in mine], np.int64)
    if policy.moment == "token" and budget is not None:
        recent = policy.recent_tokens(budget.of(0), paging.sinks)
        residuals = np.minimum(residuals, max(recent - PAGE, 0))
    return Rules(
        policy, budget or Budget.parse("100%"), paging.sinks, layers,
        [paging.shapes[layer] for layer in layers], mine, residuals, paging.pool, paging.memory,
    )  # fmt: skip


def limit(rules: Rules, n_ctx: int) -> int:
    """Tokens that a text may have in a context of n_ctx.  No distance is to pass the context."""
    return rules.budget.reach(n_ctx) if rules.policy.endless else n_ctx


def most_kept(rules: Rules, n: int) -> int:
    """Tokens that a head has at the same time, of a text that fits a context of n."""
    if rules.policy.whole_prompts:
        return n
    n = limit(rules, n)
    return min(n, rules.budget.of(n) + SLACK_TOKENS)


@dataclass
class _Part:
    """A sequence's rows in an open batch, of which the first has the position `start`."""

    kept: Kept
    first: int
    count: int
    start: int


class Rows:
    """A batch's rows under a policy: their cells, their records, and what is decided after them."""

    def __init__(
        self, rules: Rules, step: Step, undone: Sequence[Undo], sequences: Mapping[int, Held]
    ) -> None:
        self._rules, self._step = rules, step
        self._parts: list[_Part] = []
        for part, undo in zip(step.parts, undone, strict=True):
            held = sequences[undo.sequence]
            if held.kept is not None:
                self._parts.append(_Part(held.kept, part.first, part.count, undo.tokens))
            if held.recent is not None:
                rows = slice(part.first, part.first + part.count)
                held.recent.tokens += step.tokens[rows].tolist()
                self._want_queries(held.recent, part.first, part.count, undo.tokens)
        self.by_row = any(part.count > 1 for part in self._parts)
        self._index = {layer: i for i, layer in enumerate(rules.layers)}
        self._row_part = {
            row: part for part in self._parts for row in range(part.first, part.first + part.count)
        }

    def _want_queries(self, recent: Recent, first: int, count: int, start: int) -> None:
        n = self._rules.policy.n_queries
        rows = range(first + max(count - n, 0), first + count)
        recent.begin([(start + row - first) % n for row in rows])
        for row in rows:
            slot = (start + row - first) % n
            for layer, queries in zip(self._rules.layers, recent.queries, strict=True):
                self._step.records[layer, row, 11] = queries[slot].ctypes.data

    def start(self) -> None:
        """Tell the step what the policy asks; make room for single rows."""
        rules, step = self._rules, self._step
        policy = step.policy = Policy(
            frozenset(rules.layers if self._parts else ()), queries=rules.policy.n_queries > 0
        )
        if not self._parts:
            return
        policy.sums = rules.policy.needs == "sums"
        if rules.policy.endless:
            policy.places, policy.sink_places = step.positions.copy(), step.positions.copy()
            for part in self._parts:
                self._predict(part, policy)
        if self.by_row:
            policy.keeper = self
        for part in self._parts:
            kept = part.kept
            kept.begin(large=self.by_row or bool(kept.due(ALL).any()))
            if not self.by_row:
                policy.moves += kept.close(ALL)
                kept.append(ALL, part.start)
                self._describe(kept, ALL, part.first, part.start)

    def _predict(self, part: _Part, policy: Policy) -> None:
        """Each row's place among cells, and among tokens, where all heads keep the same."""
        kept, rules = part.kept, self._rules
        cells, live = int(kept.cells[0, 0]), int(kept.live[0, 0])
        if policy.places is None or policy.sink_places is None:
            return
        for row in range(part.count):
            position = part.start + row
            if position < rules.sinks:
                continue
            while cells - live >= PAGE:
                cells -= PAGE
            policy.places[part.first + row] = rules.sinks + cells
            policy.sink_places[part.first + row] = rules.sinks + live
            cells, live = cells + 1, live + 1
            over = rules.sinks + live - rules.budget.of(position + 1)
            if over > 0:
                live -= rules.policy.count_to_drop(over, rules.budget.of(position + 1))

    def _describe(self, kept: Kept, at: slice, row: int, position: int) -> None:
        """Fill in a row's records for some layers."""
        layers, records = self._rules.layers, self._step.records
        starts, steps = kept.addresses()
        newest = kept.words[at].max(1).tolist()
        for i, (place, encoded) in enumerate(newest, at.indices(len(layers))[0]):
            keys, values, words, alive, sums = (
                a + i * b for a, b in zip(starts, steps, strict=True)
            )
            if self._rules.policy.needs != "sums":
                sums = 0
            records[layers[i], row, :11] = (
                keys, values, kept.capacity, self._rules.sinks, encoded, place, 0, position, words,
                alive, sums,
            )  # fmt: skip

    # while a batch runs row by row

    def before(self, layer: int, row: int) -> list[Move]:
        """Make room for a row's token in a layer."""
        part, i = self._row_part.get(row), self._index[layer]
        if part is None:  # of a sequence that keeps every token yet
            return []
        at, position = slice(i, i + 1), part.start + row - part.first
        moves = part.kept.close(at)
        part.kept.append(at, position)
        self._describe(part.kept, at, row, position)
        return moves

    def after(self, layer: int, row: int) -> None:
        """Decide what stays in a layer after a row."""
        part, i = self._row_part.get(row), self._index[layer]
        if part is None:
            return
        n_seen = part.start + row - part.first + 1
        met = min(n_seen, self._rules.sinks) + int(part.kept.live[i, 0])
        part.kept.decide(slice(i, i + 1), n_seen, met)

    def finish(self) -> None:
        """Decide after a step of single rows."""
        if self.by_row:
            return
        for part in self._parts:
            n_seen = part.start + part.count
            met = min(n_seen, self._rules.sinks) + int(part.kept.live[0, 0])
            part.kept.decide(ALL, n_seen, met)


@dataclass
class Ending:
    """What is asked when a prompt ends: each layer's attention of its last queries."""

    step: Step  # the queries' rows
    queries: dict[int, F32] = field(default_factory=dict)  # by layer: [n, query heads, D]
    held: list[Any] = field(default_factory=list)  # memory that the step's records point to
    kinds: Counter[str] = field(default_factory=Counter)  # heads by what the policy made of them


def ending(rules: Rules, held: Held, paging: Paging, numbers: Any) -> Ending | None:
    """The question at the end of a prompt; None: nothing would be dropped."""
    if rules.policy.takes_budget and held.tokens <= rules.budget.of(held.tokens) and not held.kept:
        return None
    recent = held.recent
    n = 0
    if recent is not None:
        n = min(rules.policy.n_queries, held.tokens - recent.first)
        if n == 0:
            return None
    positions = np.arange(held.tokens - n, held.tokens)
    step = Step(
        paging.shapes, [paging.bands[b].formats for b in paging.band_of], np.zeros(n, np.int32),
        positions, np.empty(0, np.int32), np.zeros((len(paging.shapes), n, RECORD), np.int64),
        [Round([Segment(0, n)], np.arange(n, dtype=np.int32))], numbers, n_ctx=paging.n_ctx,
        memory=paging.memory,
    )  # fmt: skip
    result = Ending(step)
    if recent is None:
        return result
    for i, layer in enumerate(rules.layers):
        _describe_window(result, held, paging, i, layer)
        result.queries[layer] = recent.queries[i][positions % rules.policy.n_queries]
    return result


def _describe_window(ending: Ending, held: Held, paging: Paging, i: int, layer: int) -> None:
    """Records of the last rows: each sees what stands up to its own place."""
    records, positions = ending.step.records[layer], ending.step.positions
    records[:, 3], records[:, 7] = paging.sinks, positions
    kept = held.kept
    if kept is None:
        tables = held.tables
        records[:, 0] = tables[0, layer].ctypes.data
        records[:, 1] = tables[1, layer].ctypes.data
        records[:, 2] = tables.shape[3]
        records[:, 4] = held.encoded[paging.band_of[layer]]
        records[:, 5] = positions
        return
    used = kept.positions[i]
    seen = (used >= 0) & (used <= positions[:, None, None])  # [n, KV heads, cells]
    last = used.shape[-1] - 1 - seen[..., ::-1].argmax(-1)
    words = np.empty((len(positions), kept.rules.n_kv, 2), np.int64)
    words[..., 0], words[..., 1] = paging.sinks + last, kept.words[i, :, 1]
    ending.held.append(words)
    records[:, 0] = kept.tables[0, i].ctypes.data
    records[:, 1] = kept.tables[1, i].ctypes.data
    records[:, 2], records[:, 4] = kept.capacity, words[..., 1].max(-1)
    records[:, 5] = words[..., 0].max(-1)
    records[:, 8] = words.ctypes.data + np.arange(len(words)) * words.strides[0]
    records[:, 9] = kept.alive[i].ctypes.data


def taken_over(rules: Rules, held: Held, paging: Paging) -> Kept:
    """A sequence's cells, that has dropped nothing yet; its tables stay as they are."""
    encoded = [held.encoded[paging.band_of[layer]] for layer in rules.layers]
    return Kept.of_plain(rules, held.tables[:, rules.layers, : rules.n_kv], held.tokens, encoded)


def select(
    kept: Kept, recent: Recent | None, ending: Ending, sums: dict[int, F32], classes: U8
) -> list[Move]:
    """Drop what does not stay after a prompt."""
    rules, moves = kept.rules, []
    budget = rules.budget.of(kept.tokens)
    if recent is None:  # a policy of every token, that was held up
        kept.reading = False
        over = kept.n_kept - budget
        if over > 0:
            view = kept.view(ALL)
            kept.drop(ALL, rules.policy.drop(view, rules.policy.count_to_drop(over, budget)))
        return kept.close(ALL)
    tokens = np.array(recent.tokens)
    for i, layer in enumerate(rules.layers):
        view = kept.view(slice(i, i + 1))
        view.positions, view.scores = view.positions[0], view.scores[:, 0]
        cells = sums[layer][:, 1:].reshape(len(sums[layer]), -1)[:, : view.positions.shape[-1]]
        kinds = np.zeros(view.positions.shape, np.uint8)
        if len(classes):
            kinds = np.where(view.positions >= 0, classes[tokens[view.positions]], 0)
        window = Window(cells, ending.step.n_rows, kinds.astype(np.uint8))
        ending.kinds.update(rules.policy.kinds(view, window))
        moves += kept.keep_only(i, list(rules.policy.select(view, window, budget)))
    recent.first = kept.tokens
    kept.shrink()
    return moves
