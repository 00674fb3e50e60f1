"""The store against plain lists of tokens; the oracle is in store_oracle.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from page_oracle import ENCODED, FORMATS
from store_oracle import SHAPES, fill, oracle

from pykv.backends.base import PAGE, LayerShape
from pykv.cache import pages
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.errors import CacheFullError


class Histories(RuleBasedStateMachine):
    """What may happen to sequences, in any order."""

    @initialize(
        formats=st.sampled_from(FORMATS),
        sinks=st.sampled_from([0, 1, 4, 16, 20]),
        residual=st.sampled_from([None, 0, 1, 40, 64, 100, 130]),
        seed=st.integers(0, 99),
        tokens=st.sampled_from([3, 140, 300]),
    )
    def start(self, formats, sinks, residual, seed, tokens):
        self.o = oracle(formats, sinks, residual, seed=seed)
        fill(self.o, tokens)

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.o.sequences)))

    def parts(self, data):
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.o.sequences)), min_size=1, max_size=3, unique=True)
        )
        counts = st.one_of(st.integers(1, 9), st.integers(50, 220))
        return {s: self.o.tokens(data.draw(counts)) for s in chosen}

    def fits(self, parts):
        return all(len(self.o.sequences[s]) + len(t) <= 900 for s, t in parts.items())

    @rule()
    def new(self):
        if len(self.o.sequences) < 5:
            self.o.new()

    @rule(data=st.data())
    def write(self, data):
        parts = self.parts(data)
        if self.fits(parts):
            self.o.write(parts)

    @rule(data=st.data(), layers=st.integers(0, len(SHAPES)))
    def give_up(self, data, layers):
        parts = self.parts(data)
        if self.fits(parts):
            before = {s: trimmed(self.o, s) for s in self.o.sequences}
            step = self.o.begin(parts)
            self.o.attend(step, parts, layers)
            self.o.store.abort()
            assert all(np.array_equal(trimmed(self.o, s), t) for s, t in before.items())

    @rule(data=st.data())
    def fork(self, data):
        if len(self.o.sequences) < 5:
            self.o.fork(self.pick(data))

    @rule(data=st.data(), back=st.integers(0, 200))
    def truncate(self, data, back):
        sequence = self.pick(data)
        self.o.truncate(sequence, max(len(self.o.sequences[sequence]) - back, 0))

    @rule(data=st.data())
    def free(self, data):
        if len(self.o.sequences) > 1:
            self.o.free(self.pick(data))

    @invariant()
    def the_store_is_right(self):
        if hasattr(self, "o"):
            self.o.check()

    def teardown(self):
        if hasattr(self, "o"):
            for sequence in list(self.o.sequences):
                self.o.free(sequence)
            self.o.check()
            assert self.o.store.nbytes == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


def trimmed(o, sequence):
    """The addresses that a sequence holds."""
    return o.tables(sequence)[..., : 2 + len(o.sequences[sequence]) // PAGE].copy()


# invariant (a): how tokens are batched leaves no trace


@pytest.mark.parametrize(
    ("formats", "sinks", "residual"),
    [
        *((formats, n % 3 * 4, (0, 3, 64, 130)[n % 4]) for n, formats in enumerate(FORMATS)),
        (FORMATS[2], 20, 130),
        (FORMATS[11], 4, None),
        (FORMATS[12], 16, None),
    ],
)
def test_one_batch_sevens_and_one_by_one_leave_the_same(formats, sinks, residual):
    # one page is encoded, and the next is begun
    states, n = [], 70 + sinks + (128 if residual is None else residual)
    for size in (1, 7, n):
        o = oracle(formats, sinks, residual)
        sequence, tokens = o.new(), o.tokens(n)
        for i in range(0, n, size):
            o.write({sequence: tokens[i : i + size]}, check=i % 29 == 0)
        o.check()
        states.append((o.state(sequence), o.store.nbytes, o.store.length(sequence)))
    assert states[0] == states[1] == states[2]


def test_sequences_in_one_batch_leave_what_each_alone_leaves():
    together, alone = (oracle(residual=1) for _ in range(2))
    tokens = [together.tokens(n) for n in (150, 1, 64, 69)]
    together.write({together.new(): t for t in tokens})
    for t in tokens:
        alone.write({alone.new(): t})
    together.check()
    for a, b in zip(together.sequences, alone.sequences, strict=True):
        assert together.state(a) == alone.state(b)


def test_step_positions_rounds_and_records():
    o = oracle(sinks=4, residual=10)
    a, b = fill(o, 70), o.new()
    parts = {a: o.tokens(80), b: o.tokens(3)}
    step = o.begin(parts)
    assert step.positions.tolist() == [*range(70, 150), 0, 1, 2]
    # a page of a's is encoded when 4 + 10 + 64 = 78 tokens are there, and when 142 are
    rounds = [[(s.first, s.count) for s in r.segments] for r in step.rounds]
    assert rounds == [[(0, 8), (80, 3)], [(8, 64)], [(72, 8)]]
    assert [r.rows.tolist() for r in step.rounds] == [
        [*range(8), 80, 81, 82], [*range(8, 72)], [*range(72, 80)]
    ]  # fmt: skip
    # per layer, a page for each KV head
    assert [[len(m[0]) for m in r.moves] for r in step.rounds] == [[2, 2, 1], [2, 2, 1], []]
    encoded = step.records[0, :, 4].tolist()
    assert encoded == [0] * 8 + [1] * 64 + [2] * 8 + [0] * 3
    assert (step.records[:, :, 3] == 4).all()
    assert step.records[1, :, 6].tolist() == [max(p - 74, 0) for p in step.positions]
    assert not step.records[0, :, 6].any()
    o.store.abort()


# abort


@pytest.mark.parametrize(
    ("formats", "layers"), [(formats, (0, 1, 3)[n % 3]) for n, formats in enumerate(ENCODED)]
)
def test_abort_after_encoding_and_copy_on_write(formats, layers):
    o = oracle(formats, sinks=5, residual=2)
    sequence = fill(o, 190)
    fork = o.fork(sequence)
    before = {s: (o.tables(s).copy(), o.state(s)) for s in (sequence, fork)}
    nbytes = o.store.nbytes
    parts = {sequence: o.tokens(200), fork: o.tokens(80)}
    o.attend(o.begin(parts), parts, layers)
    o.store.abort()
    o.check()
    assert o.store.nbytes == nbytes
    for s, (table, state) in before.items():
        np.testing.assert_array_equal(o.tables(s), table)
        assert o.state(s) == state
    o.write(parts)
    o.check()


def test_abort_where_a_window_let_go_of_pages():
    o = oracle(shapes=[LayerShape(1, 1, 4, 4, window=20)])
    sequence = fill(o, 300)
    parts = {sequence: o.tokens(150)}
    o.attend(o.begin(parts), parts)
    o.store.abort()
    o.check()
    o.write(parts)
    o.check()


def test_a_full_context_changes_nothing():
    o = oracle(n_ctx=100)
    a, b = fill(o, 60), fill(o, 30)
    nbytes, before = o.store.nbytes, {s: o.tables(s).copy() for s in (a, b)}
    with pytest.raises(CacheFullError, match=r"60 tokens are cached, 41 more .* 100 fit"):
        o.begin({b: o.tokens(70), a: o.tokens(41)})
    assert o.store.nbytes == nbytes
    assert all(np.array_equal(o.tables(s), t) for s, t in before.items())
    o.check()
    o.write({a: o.tokens(40), b: o.tokens(70)})
    o.check()


def test_memory_that_ends_in_the_middle_changes_nothing(monkeypatch):
    o = oracle()
    a = fill(o, 60)
    before, nbytes, calls = o.tables(a).copy(), o.store.nbytes, 0

    def take(pool, count, _take=pages.PagePool.take):
        nonlocal calls
        calls += 1
        if calls == 12:
            raise MemoryError
        return _take(pool, count)

    with monkeypatch.context() as patch:
        patch.setattr(pages.PagePool, "take", take)
        with pytest.raises(MemoryError):
            o.begin({a: o.tokens(200)})
    assert o.store.nbytes == nbytes
    np.testing.assert_array_equal(o.tables(a), before)
    o.write({a: o.tokens(200)})
    o.check()


# forks


@pytest.mark.parametrize("n", [0, 3, 4, 68, 69, 150])
def test_a_fork_copies_no_page_and_the_first_to_write_copies_one(n):
    o = oracle(("f16", "f16", None), sinks=4)
    sequence = fill(o, n)
    pools = o.store._paging.pools.values()
    in_use = sum(p.in_use for p in pools)
    fork = o.fork(sequence)
    assert sum(p.in_use for p in pools) == in_use
    o.write({fork: o.tokens(1)})
    o.check()
    heads = 2 * sum(s.n_kv for s in SHAPES)  # keys and values
    # the partly filled page is copied, or a new one begun: one page a head, either way
    assert sum(p.in_use for p in pools) == in_use + heads
    o.write({sequence: o.tokens(1)})
    o.check()
    partly = n not in (0, 4, 68)  # else each began its own
    assert sum(p.in_use for p in pools) == in_use + heads * (1 if partly else 2)


@pytest.mark.parametrize("formats", FORMATS)
def test_forks_go_their_own_ways(formats):
    o = oracle(formats, sinks=2, residual=30)
    first = fill(o, 120)
    second, third = o.fork(first), o.fork(first)
    o.write({first: o.tokens(100), third: o.tokens(7)})
    o.check()
    o.write({second: o.tokens(90), third: o.tokens(70)})
    o.check()
    o.free(first)
    o.check()
    o.truncate(second, 50)
    o.write({second: o.tokens(3)})
    o.check()


# a window shorter than the residual


def test_pages_that_a_window_let_go_of_are_not_encoded():
    o = oracle(sinks=4, residual=130, shapes=[LayerShape(1, 1, 4, 4, 20), LayerShape(1, 1, 4, 4)])
    sequence = o.new()
    for _ in range(40):
        o.write({sequence: o.tokens(11)})
        o.check()


# bytes


def test_nbytes_and_reserved_nbytes_of_a_small_cache(monkeypatch):
    monkeypatch.setattr(pages, "SLAB_BYTES", 1 << 20)
    store = Store([LayerShape(4, 2, 64, 32)] * 3, CacheConfig(), 4096)
    assert store.nbytes == store.reserved_nbytes == 0
    sequence = store.new_sequence()
    tables = 2 * 3 * 2 * 16 * 8  # sides, layers, heads, 16 entries of 8 bytes
    assert store.nbytes == store.reserved_nbytes == tables
    store.begin([(sequence, np.zeros(70, np.int32))], np.zeros(1, np.int32))
    store.commit()
    # per layer and head: a sinks page of 16 tokens, and two pages for 66 tokens
    per_head = 16 * 64 * 2 + 16 * 32 * 2 + 2 * (64 * 64 * 2 + 64 * 32 * 2)
    assert store.nbytes == 6 * per_head + tables
    # pools of 2,048, 1,024, 8,192 and 4,096 bytes, a slab of a MiB each
    assert store.reserved_nbytes == 4 * ((1 << 20) + 64) + tables
    store.free(sequence)
    assert store.nbytes == 0
    assert store.reserved_nbytes == 4 * ((1 << 20) + 64)


def test_nbytes_of_encoded_pages():
    o = oracle(("f16", "f16", "f32"), sinks=0, residual=10, shapes=[LayerShape(1, 1, 32, 32)])
    fill(o, 74)  # one page in f16, 10 tokens in a page of f32
    assert o.store.nbytes == 2 * (64 * 32 * 2 + 64 * 32 * 4) + 2 * 16 * 8


def test_f16_nbytes_counts_bare_values_of_what_is_seen():
    o = oracle(shapes=[LayerShape(4, 2, 64, 32), LayerShape(4, 1, 64, 32, window=50)])
    fill(o, 70)
    fill(o, 20)
    assert o.store.f16_nbytes == (90 * 2 * 96 + (50 + 20) * 96) * 2


@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[2]])
@pytest.mark.parametrize(("sinks", "residual"), [(0, 0), (4, 130)])
def test_estimate_covers_what_a_sequence_takes(formats, sinks, residual):
    for n in (1, 69, 200, 500):
        o = oracle(formats, sinks, residual)
        fill(o, n)
        pages = sum(p.in_use * p.page_bytes for p in o.store._paging.pools.values())
        assert o.store.estimate(n) >= pages
