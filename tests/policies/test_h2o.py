"""H2O: the toy of the paper's rule, and texts against a plain loop over one head at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv.errors import ConfigError, PolicyError
from pykv.policies.base import Cells
from pykv.policies.h2o import POLICY


def test_the_toy(cells_of):
    # one heavy hitter and two recent tokens: cells 0 and 1 may go, and 1 has drawn less
    cells = cells_of([[0, 1, 2, 3]], [[[1.9, 0.2, 0.7, 0.3]]])
    policy = POLICY(recent=0.67)
    assert policy.recent_tokens(3, 0) == 2
    assert policy.drop(cells, 1).tolist() == [[1]]


def test_a_recent_token_stays_whatever_it_drew(cells_of):
    cells = cells_of([[0, 1, 2, 3]], [[[1.9, 0.5, 0.0, 0.0]]])
    assert POLICY(recent=0.67).drop(cells, 1).tolist() == [[1]]
    # a smaller recent part lets token 2 go
    assert POLICY(recent=0.34).drop(cells, 1).tolist() == [[2]]


def one_head(attention, budget, sinks, recent):
    """Positions that a head keeps after every token, and the sums of those that it has kept."""
    sums, kept = {}, []
    for token, paid in enumerate(attention):
        sums[token] = np.float32(0)
        for position in sums:
            sums[position] += paid[position]
        if len(sums) > budget:
            free = [p for p in sums if sinks <= p <= token - recent]
            del sums[min(free, key=lambda p: (sums[p], p))]
        kept.append(set(sums))
    return kept


# of few values, sums are exact, and many are equal
@pytest.mark.parametrize("values", [[0, 0.25, 0.5], list(np.random.default_rng(5).random(999))])
def test_texts_are_as_in_a_loop_over_each_head(read_text, values):
    rng = np.random.default_rng(7)
    attention = rng.choice(values, (120, 3, 120)).astype(np.float32)
    kept = read_text(POLICY(recent=0.3), attention, budget=21, sinks=2)
    for head in range(3):
        expected = one_head(attention[:, head], budget=21, sinks=2, recent=6)
        assert [state[head] for state in kept] == expected


def test_a_prompt_that_was_read_whole_is_reduced_at_once():
    # 4 sinks, 20 kept of 60: the newest 10, and of the others those with the 6 largest sums
    rng = np.random.default_rng(3)
    positions = rng.permutation(56).astype(np.int32)[None] + 4
    scores = rng.random((1, 1, 56), dtype=np.float32)
    gone = POLICY(prompt="full").drop(Cells(positions, scores, 59, 60, sinks=4), 40)[0]
    kept = np.setdiff1d(np.arange(56), gone)
    old = [c for c in range(56) if positions[0, c] < 50]
    heavy = sorted(old, key=lambda c: -scores[0, 0, c])[:6]
    assert set(kept) == set(heavy) | {c for c in range(56) if positions[0, c] >= 50}


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_the_order_of_cells_does_not_matter(seed, count):
    rng = np.random.default_rng(seed)
    positions = rng.permutation(30).astype(np.int32)[None]
    scores = rng.choice([0, 0.5, 1], (1, 1, 30)).astype(np.float32)
    order = rng.permutation(30)
    one = Cells(positions, scores, 29, 30)
    other = Cells(positions[:, order], scores[..., order], 29, 30)
    gone = [np.sort(c.positions[0, POLICY().drop(c, count)[0]]).tolist() for c in (one, other)]
    assert gone[0] == gone[1]


def test_small_steps_are_not_lost(cells_of):
    # as half floats 2048 would be the end
    cells = cells_of([[0, 1]], [[[2048, 0]]])
    for _ in range(8):
        POLICY().observe(cells, np.array([[0.5, 0.25]], np.float32))
    assert cells.scores.tolist() == [[[2052, 2]]]


def test_too_small_a_budget_is_refused(cells_of):
    POLICY().check(8, 4)
    assert POLICY().recent_tokens(1, 0) == 1
    with pytest.raises(
        ConfigError, match=r"kv budget 7 is too small for h2o, .* 5 sinks and 3 rec"
    ):
        POLICY().check(7, 5)
    with pytest.raises(PolicyError, match=r"h2o cannot drop 1 of 3 tokens"):
        POLICY(recent=1.0).drop(cells_of([[0, 1]], sinks=1), 1)
