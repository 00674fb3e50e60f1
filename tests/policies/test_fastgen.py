"""FastGen: for each class a head whose attention makes it the first that is enough."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import ConfigError
from pykv.policies.base import PLAIN, PUNCTUATION, SPECIAL, Cells, Window
from pykv.policies.fastgen import CLASSES, POLICY

# tokens 0 to 9: 0 is special, 4 and 7 are punctuation
KINDS = np.full(10, PLAIN, np.uint8)
KINDS[0], KINDS[[4, 7]] = SPECIAL, PUNCTUATION
# the share of ten queries that each token draws; 20 % of 10 tokens are 2
HEADS = {
    "special": {0: 0.96, 2: 0.04},
    "punctuation": {0: 0.5, 4: 0.26, 7: 0.2, 2: 0.04},
    "frequent": {0: 0.3, 2: 0.4, 5: 0.26, 1: 0.01, 3: 0.03},
    "local": {0: 0.3, 2: 0.4, 5: 0.2, 8: 0.03, 9: 0.03, 1: 0.04},
    "full": {p: 0.1 for p in range(10)},
}
STAY = {
    "special": [0, 9],
    "punctuation": [0, 4, 7, 9],
    "frequent": [0, 2, 4, 5, 7, 9],
    "local": [0, 2, 4, 5, 7, 8, 9],
    "full": list(range(10)),
}
# 0 is the most frequent in two of the heads, so three are needed for 2 and 5
SETTINGS = {"frequent": 0.3, "local": 0.2}


def head_of(drawn, order=None, group=1):
    """A layer with one KV head, its cells in some order, and ten queries that drew as told."""
    order = np.arange(10) if order is None else order
    paid = np.array([drawn.get(p, 0) for p in range(10)], np.float32)[order] * 10
    cells = Cells(order.astype(np.int32)[None], np.zeros((0, 1, 10), np.float32), 9, 10, group)
    return cells, Window(np.tile(paid, (group, 1)), 10, KINDS[order][None])


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_first_class_that_is_enough_is_taken(name, shuffled):
    order = np.random.default_rng(2).permutation(10) if shuffled else None
    cells, window = head_of(HEADS[name], order)
    policy = POLICY(**SETTINGS)
    assert [CLASSES[c] for c in policy.profile(cells, window)] == [name]
    assert sorted(cells.positions[policy.select(cells, window, 0)]) == STAY[name]


def test_heads_of_a_layer_have_classes_of_their_own():
    parts = [head_of(drawn) for drawn in HEADS.values()]
    cells = Cells(
        np.concatenate([c.positions for c, _ in parts]), np.zeros((0, 5, 10), np.float32), 9, 10
    )
    window = Window(np.concatenate([w.sums for _, w in parts]), 10, np.tile(KINDS, (5, 1)))
    policy = POLICY(**SETTINGS)
    assert policy.profile(cells, window).tolist() == [0, 1, 2, 3, 4]
    assert [np.flatnonzero(s).tolist() for s in policy.select(cells, window, 0)] == [*STAY.values()]


def test_query_heads_of_a_group_are_averaged():
    cells, window = head_of({0: 0.92, 2: 0.08}, group=2)
    # the second head looks at token 4 alone: the mean loses half of what went to token 2
    window.sums[1] = 0
    window.sums[1, 4] = 10
    assert POLICY(**SETTINGS).profile(cells, window).tolist() == [1]


def test_what_the_sinks_drew_is_kept():
    cells, window = head_of({2: 0.04})
    # 96 % went to the sinks, which are no cells
    cells.sinks, cells.n_kept = 4, 14
    assert POLICY().profile(cells, window).tolist() == [0]
    assert POLICY(recovery=0.97).profile(cells, window).tolist() == [2]


def test_frequent_is_per_query_that_could_see_the_token():
    # token 8 was seen by 2 of 10 queries, and drew 0.3 of each; token 1 drew 0.1 of all 10
    cells, window = head_of({})
    window.sums[0, [1, 8]] = 1.0, 0.6
    window.n_queries = 2
    policy = POLICY(recovery=0.5, frequent=0.1, local=0)
    # with two queries that see both, 1 is ahead
    assert np.flatnonzero(policy.select(cells, window, 0)[0]).tolist() == [0, 1, 4, 7, 9]
    window.n_queries = 10
    policy = POLICY(recovery=0.9, frequent=0.1, local=0)
    assert np.flatnonzero(policy.select(cells, window, 0)[0]).tolist() == [0, 4, 7, 8, 9]


def test_nothing_is_lost_at_a_recovery_of_one():
    cells, window = head_of({p: 0.1 for p in range(10)})
    assert POLICY(recovery=1.0).select(cells, window, 0).all()
    # an empty cell never stays
    cells.positions[0, 3], window.sums[0, 3] = -1, 0
    assert not POLICY(recovery=1.0).select(cells, window, 0)[0, 3]


def test_settings_out_of_range_are_refused():
    for settings in ({"recovery": 1.1}, {"frequent": -0.1}, {"local": 2}, {"window": 0}):
        with pytest.raises(ConfigError, match=r"recovery=0.95, frequent=0.3, local=0.3, window=64"):
            POLICY(**settings)
    POLICY().check(1, 64)
