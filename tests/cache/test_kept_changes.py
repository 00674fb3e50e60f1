"""What may happen to a sequence under a policy: batches that fail, forks, going back, the end."""

from __future__ import annotations

import numpy as np
import pytest
from kept_oracle import Run, text_of

from pykv.backends.base import LayerShape
from pykv.errors import CacheFullError, CancelledError, ConfigError
from pykv.policies.base import ENDLESS

SHAPES = (LayerShape(2, 2, 4, 3), LayerShape(2, 1, 4, 3, window=75))
POLICIES = [
    ("window", "70", ("q8_0", "f16")),
    ("sinks", "66", ("f16", "f16")),
    ("h2o", "70", ("kivi4", "q4_0")),
    ("scissorhands", "80", ("f16", "f16")),
]


class Stop(Exception):
    pass


def everything(run, sequence):
    """All that a failed batch must not change."""
    kept = run.kept(sequence)
    names = ("tables", "alive", "words", "cells", "live", "tail_live", "positions", "scores")
    return (
        {name: getattr(kept, name).tobytes() for name in names},
        run.state(sequence),
        kept.capacity,
        run.store._sequences[sequence].tables.tobytes(),
        run.store.length(sequence),
        {size: pool.in_use for size, pool in run.store._paging.pools.items()},
        run.store.nbytes,
        run.store.positions(sequence, 1, 0),
    )


def stop_after(run, calls, name):
    """A store's step whose keeper raises, or that is cancelled, after so many calls."""

    def wrap(step):
        count = 0

        def stopped(*args):
            nonlocal count
            count += 1
            if count > calls:
                raise Stop
            return own(*args)

        if name == "cancelled":
            step.cancelled = lambda: next(turns) > calls
            turns = iter(range(10000))
        elif step.policy.keeper is not None:
            own = getattr(step.policy.keeper, name)
            setattr(step.policy.keeper, name, stopped)
        return step

    return wrap


@pytest.mark.parametrize(("policy", "budget", "formats"), POLICIES[1:3])
@pytest.mark.parametrize("where", ["before", "after", "cancelled"])
def test_a_batch_that_stops_in_the_middle_changes_nothing(policy, budget, formats, where):
    n, more = 150, 90
    text = text_of(n + more, SHAPES)
    run, plain = (Run(policy, budget, formats, shapes=SHAPES) for _ in range(2))
    sequence, other = (r.store.new_sequence() for r in (run, plain))
    for r, s in ((run, sequence), (plain, other)):
        r.read(s, text.part(0, n))
    before = everything(run, sequence)
    step = stop_after(run, 80, where)(run.begin([(sequence, text.part(n, n + more))]))
    with pytest.raises((Stop, CancelledError)):
        run.attend(step)
    run.store.abort()
    assert everything(run, sequence) == before
    # single rows
    run.attend(run.begin([(sequence, text.part(n, n + 1))]))
    run.store.abort()
    assert everything(run, sequence) == before
    for r, s in ((run, sequence), (plain, other)):
        r.read(s, text.part(n, n + more))
    assert run.state(sequence) == plain.state(other)
    assert run.in_use() == plain.in_use()


def test_a_step_that_closes_holes_can_be_taken_back():
    run, text = Run("h2o", "70", ("q8_0", "f16"), shapes=SHAPES), text_of(250, SHAPES)
    sequence = run.store.new_sequence()
    for i in range(250):
        due = i > 0 and run.kept(sequence).due(slice(None)).any()
        if due:
            before = everything(run, sequence)
            run.attend(run.begin([(sequence, text.part(i, i + 1))]))
            run.store.abort()
            assert everything(run, sequence) == before
        run.write([(sequence, text.part(i, i + 1))])


@pytest.mark.parametrize(("policy", "budget", "formats"), POLICIES[:2])
@pytest.mark.parametrize("n", [2, 150])
def test_forks_go_their_own_ways(policy, budget, formats, n):
    run, text = Run(policy, budget, formats, shapes=SHAPES), text_of(n + 140, SHAPES)
    alone = Run(policy, budget, formats, shapes=SHAPES)
    first = run.store.new_sequence()
    run.read(first, text.part(0, n))
    in_use = run.in_use()
    second = run.store.fork(first)
    assert run.in_use() == in_use
    before = run.state(first)
    a, b = text.part(n, n + 70), text.part(n + 70, n + 140)
    run.read(second, b, 70)
    assert run.state(first) == before
    run.read(first, a, 9)
    for own, parts in ((first, (a,)), (second, (b,))):
        sequence = alone.store.new_sequence()
        alone.read(sequence, text.part(0, n))
        for part in parts:
            alone.read(sequence, part)
        assert alone.state(sequence) == run.state(own)
    run.store.free(first)
    run.store.free(second)
    assert run.in_use() == 0


def test_an_aborted_batch_of_a_fork_leaves_shared_pages_shared():
    run, text = Run("sinks", "70", ("q8_0", "f16"), shapes=SHAPES), text_of(250, SHAPES)
    first = run.store.new_sequence()
    run.read(first, text.part(0, 150))
    second = run.store.fork(first)
    before = everything(run, first), everything(run, second)
    run.attend(run.begin([(second, text.part(150, 250))]))
    run.store.abort()
    assert (everything(run, first), everything(run, second)) == before
    run.store.free(first)
    run.store.free(second)
    assert run.in_use() == 0


@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "snapkv", "fastgen"])
def test_heads_that_keep_tokens_of_their_own_cannot_be_forked(policy):
    run = Run(policy, None if policy == "fastgen" else "70", shapes=SHAPES)
    assert not run.store.forks
    with pytest.raises(ConfigError, match="cannot be forked"):
        run.store.fork(run.store.new_sequence())


@pytest.mark.parametrize(("policy", "budget", "formats"), POLICIES)
def test_going_back_starts_anew(policy, budget, formats):
    run, text = Run(policy, budget, formats, shapes=SHAPES), text_of(150, SHAPES)
    fresh = Run(policy, budget, formats, shapes=SHAPES)
    sequence, other = run.store.new_sequence(), fresh.store.new_sequence()
    run.read(sequence, text)
    assert run.store.truncate(sequence, 150) == 150
    assert run.store.truncate(sequence, 149) == 0
    assert run.store.length(sequence) == 0
    assert run.in_use() == 0
    for r, s in ((run, sequence), (fresh, other)):
        r.read(s, text)
    assert run.state(sequence) == fresh.state(other)
    assert run.in_use() == fresh.in_use()


@pytest.mark.parametrize(("policy", "endless"), [("window", True), ("sinks", True), ("h2o", False)])
def test_text_may_pass_the_context_where_no_distance_grows(policy, endless):
    run, text = Run(policy, "66", shapes=SHAPES, n_ctx=100), text_of(230, SHAPES)
    sequence = run.store.new_sequence()
    assert run.store.room(sequence) == (ENDLESS if endless else 100)
    run.read(sequence, text.part(0, 100))
    if not endless:
        with pytest.raises(CacheFullError):
            run.begin([(sequence, text.part(100, 101))])
        return
    nbytes = []
    for first in range(100, 230, 10):
        run.write([(sequence, text.part(first, first + 10))])
        nbytes.append(run.store.nbytes)
    assert run.store.room(sequence) == ENDLESS - 230
    assert run.store.length(sequence) == 230
    # a page of keys and one of values (32 channels) more or less in each of three heads
    assert max(nbytes) - min(nbytes) <= 3 * 64 * (4 + 32) * 2


@pytest.mark.parametrize(
    ("budget", "limit"),
    [("100", ENDLESS), ("101", 100), ("1000000", 100), ("50%", 200), ("100%", 100)],
)
def test_no_more_is_kept_than_the_context_holds(budget, limit):
    run, text = Run("sinks", budget, shapes=SHAPES, n_ctx=100), text_of(230, SHAPES)
    sequence, n = run.store.new_sequence(), min(limit, 230)
    assert run.store.room(sequence) == limit
    run.read(sequence, text.part(0, n))
    assert len(run.store.positions(sequence, 0, 0)) <= 100
    if n == limit:
        with pytest.raises(CacheFullError, match=f"{limit} fit"):
            run.begin([(sequence, text.part(0, 1))])


def test_the_peak_is_what_a_prompt_took():
    run, text = Run("h2o:prompt=full", "70", shapes=SHAPES), text_of(300, SHAPES)
    sequence = run.store.new_sequence()
    run.store.begin_prompt(sequence)
    run.read(sequence, text)
    full = run.store.nbytes
    assert run.store.peak_nbytes == full
    run.end_prompt(sequence)
    assert run.store.nbytes < full
    # pages go back, tables stay
    pages = sum(p.in_use * p.page_bytes for p in run.store._paging.pools.values())
    assert pages < full / 2
    run.write([(sequence, text.part(0, 1))])
    assert run.store.peak_nbytes == full
    np.testing.assert_array_equal(run.kept(sequence).live + 4, 70)
