"""The store against plain lists of tokens; the oracle is in store_oracle.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_oracle import SHAPES, Oracle

from pykv.backends.base import PAGE, CacheFormats, LayerShape
from pykv.cache import pages
from pykv.cache.store import Store, formats_of, residual_of
from pykv.config import CacheConfig
from pykv.errors import CacheFullError, ConfigError, UnsupportedError

# key page, value page, tail: exact ones, encoded ones, and one side of each
FORMATS = [
    ("f16", "f16", None),
    ("f32", "bf16", None),
    ("f16", "f16", "f32"),
    ("f32", "f32", "f16"),
    ("bf16", "f16", "f16"),
    ("f16", "bf16", "f16"),
]
ENCODED = FORMATS[2:]


@pytest.fixture(autouse=True, scope="module")
def _small_slabs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "SLAB_BYTES", 1 << 14)
        yield


def oracle(formats=("f16", "f16", "f32"), sinks=4, residual=0, shapes=SHAPES, n_ctx=1000, seed=0):
    k, v, tail = formats
    config = CacheConfig(k, v, sinks, residual, tail)
    return Oracle(config, residual, shapes, n_ctx, seed)


def fill(o, n):
    """A sequence of n tokens."""
    sequence = o.new()
    if n:
        o.write({sequence: o.tokens(n)})
    return sequence


class Histories(RuleBasedStateMachine):
    """What may happen to sequences, in any order."""

    @initialize(
        formats=st.sampled_from(FORMATS),
        sinks=st.sampled_from([0, 1, 4, 16, 20]),
        residual=st.sampled_from([0, 1, 40, 64, 100, 130]),
        seed=st.integers(0, 99),
    )
    def start(self, formats, sinks, residual, seed):
        self.o = oracle(formats, sinks, residual, seed=seed)
        fill(self.o, 3)

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
        (FORMATS[0], 4, 0),
        (FORMATS[2], 0, 0),
        (FORMATS[2], 20, 130),
        (FORMATS[3], 4, 64),
        (FORMATS[4], 16, 3),
        (FORMATS[5], 1, 100),
    ],
)
def test_one_batch_sevens_and_one_by_one_leave_the_same(formats, sinks, residual):
    states = []
    for size in (1, 7, 230):
        o = oracle(formats, sinks, residual)
        sequence, tokens = o.new(), o.tokens(230)
        for i in range(0, 230, size):
            o.write({sequence: tokens[i : i + size]})
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


@pytest.mark.parametrize("formats", ENCODED)
@pytest.mark.parametrize("layers", [0, 1, 3])
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
    pools = o.store._pools.values()
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


# truncate


def cut(formats, sinks, residual, tokens, n, window=0):
    o = oracle(formats, sinks, residual, [LayerShape(1, 1, 4, 4, window)])
    sequence = fill(o, tokens)
    m = o.truncate(sequence, n)
    o.check()
    o.write({sequence: o.tokens(90)})
    o.check()
    return m


@pytest.mark.parametrize(
    ("residual", "tokens", "n", "m"),
    [
        # sinks 4: pages end at 68, 132, 196; at residual 0 a page is encoded as it ends
        (0, 200, 200, 200),
        (0, 200, 500, 200),
        (0, 200, 196, 196),  # three encoded pages end at 196
        (0, 200, 195, 132),  # in the third: back to its start
        (0, 200, 133, 132),
        (0, 200, 132, 132),
        (0, 200, 5, 4),
        (0, 200, 4, 4),
        (0, 200, 3, 3),  # in the sinks
        (0, 200, 0, 0),
        (0, 67, 20, 20),  # nothing is encoded yet
        # residual 64: a page is encoded once 64 tokens follow it
        (64, 200, 196, 196),  # pages end at 68 and 132, and 132 + 64 <= 196
        (64, 200, 195, 4),  # the second page would be exact, and that is gone
        (64, 200, 4, 4),
        (64, 200, 2, 2),
        (64, 131, 90, 90),  # nothing is encoded yet
        (64, 132, 131, 4),
        (64, 150, 133, 133),
    ],
)
def test_truncate_stops_where_the_design_says(residual, tokens, n, m):
    assert cut(("f16", "f16", "f32"), 4, residual, tokens, n) == m


@pytest.mark.parametrize(("n", "m"), [(199, 199), (100, 100), (4, 4), (1, 1), (0, 0)])
def test_truncate_stops_anywhere_in_exact_pages(n, m):
    assert cut(("f16", "f16", None), 4, 0, 200, n) == m


@pytest.mark.parametrize(
    ("formats", "n", "m"),
    [
        # Window 40, 200 tokens: the next query sees 161 to 200, so pages up to 132 are gone. From
        # n on, the first to be seen is n - 39.
        (("f16", "f16", None), 180, 180),
        (("f16", "f16", None), 171, 171),  # 132 is the first of its page
        (("f16", "f16", None), 170, 0),  # 131 was let go of
        (("f16", "f16", "f32"), 197, 197),
        (("f16", "f16", "f32"), 190, 0),  # would be 132, which sees 93
    ],
)
def test_truncate_under_a_window(formats, n, m):
    assert cut(formats, 4, 0, 200, n, window=40) == m


@pytest.mark.parametrize("residual", [0, 1, 63, 64, 65, 130])
def test_truncate_agrees_with_trying_every_length(residual):
    for sinks in (0, 3):
        for n in {0, 1, 2, 3, 4, 64, 66, 67, 68, 130, 131, 132, 150, 192, 194, 195, 196, 249}:
            o = oracle(("bf16", "f16", "f16"), sinks, residual, [LayerShape(1, 1, 1, 1)])
            o.truncate(fill(o, 250), n)
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


def test_bytes_per_token():
    store = Store([LayerShape(4, 2, 64, 20), LayerShape(4, 1, 64, 20)], CacheConfig("f16", "f32"),
                  100)  # fmt: skip
    # a value of 20 channels is padded to 32
    assert store.bytes_per_token() == 3 * (64 * 2 + 32 * 4)
    assert store.bytes_per_token([1]) == 64 * 2 + 32 * 4


# settings


def test_formats_and_residual_come_from_the_configuration():
    assert formats_of(CacheConfig()) == CacheFormats("f16", "f16", "f16", "f16")
    assert formats_of(CacheConfig("f32", "bf16")) == CacheFormats("f32", "bf16", "f32", "bf16")
    assert formats_of(CacheConfig("f32", "bf16", tail_type="f16")) == CacheFormats(
        "f32", "bf16", "f16", "f16"
    )
    assert residual_of(CacheConfig()) == 0
    assert residual_of(CacheConfig(residual=77)) == 77


@pytest.mark.parametrize(
    ("config", "error", "sentence"),
    [
        (CacheConfig(type_k="q4_9"), UnsupportedError, "unknown cache type 'q4_9'"),
        (CacheConfig(type_v="q6_k"), ConfigError, "q6_k is a type of weights.*f16"),
        (CacheConfig(tail_type="q8_0"), ConfigError, "tail type 'q8_0'.*f16, bf16, f32"),
    ],
)
def test_unfit_settings_are_refused(config, error, sentence):
    with pytest.raises(error, match=sentence):
        Store([LayerShape(1, 1, 32, 32)], config, 100)
