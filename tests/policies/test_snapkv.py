"""SnapKV: votes, pooling in order of position, and the mean over a group, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv.errors import ConfigError
from pykv.policies.base import Cells, Window
from pykv.policies.snapkv import POLICY


def window_of(sums, n_queries=2):
    sums = np.array(sums, np.float32)
    return Window(sums, n_queries, np.zeros(sums.shape, np.uint8))


def kept(policy, cells, window, budget):
    """Positions that stay, of each head, ascending."""
    stay = policy.select(cells, window, budget)
    return [sorted(p[s].tolist()) for p, s in zip(cells.positions, stay, strict=True)]


def test_neighbours_of_a_peak_stay_with_it(cells_of):
    # tokens 0 to 9, the last 2 are the window; token 3 is what the queries looked at
    cells = cells_of([range(10)])
    window = window_of([[0, 0.1, 0, 1.5, 0, 0, 0.2, 0, 0.9, 0.9]])
    assert kept(POLICY(window=2, pool=3), cells, window, 5) == [[2, 3, 4, 8, 9]]
    assert kept(POLICY(window=2, pool=1), cells, window, 5) == [[1, 3, 6, 8, 9]]


def test_the_ends_are_not_damped(cells_of):
    # average pooling would make the middle of 1 0 0 0 1 the best; the largest is 1 everywhere
    cells = cells_of([[0, 1, 2, 3, 4, 5, 6]])
    votes = POLICY(window=2, pool=5).votes(cells, window_of([[1, 0, 0, 0, 1, 9, 9]]))
    assert votes[0, :5].tolist() == [1, 1, 1, 1, 1]
    votes = POLICY(window=2, pool=3).votes(cells, window_of([[1, 0, 0, 0, 1, 9, 9]]))
    assert votes[0, :5].tolist() == [1, 1, 0, 1, 1]


def test_heads_of_a_group_are_pooled_before_they_are_averaged(cells_of):
    # peaks at 0 and 2: each pooled, then averaged, 1 gets (1 + 1) / 2; the mean's peak is 1 / 2
    cells = cells_of([[0, 1, 2, 3, 4]], group=2)
    votes = POLICY(window=1, pool=3).votes(cells, window_of([[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]))
    assert votes[0, :4].tolist() == [0.5, 1, 0.5, 0.5]
    # by themselves the two would be two KV heads
    cells = cells_of([[0, 1, 2, 3, 4]] * 2)
    votes = POLICY(window=1, pool=3).votes(cells, window_of([[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]))
    assert votes[:, :4].tolist() == [[1, 1, 0, 0], [0, 1, 1, 1]]


def test_neighbours_are_those_in_the_text_not_in_memory(cells_of):
    # in order of position: token 5 is the peak, between 4 and 6
    cells = cells_of([[6, 0, -1, 5, 1, 7, 4, 8, 9]], n_kept=8)
    sums = [[0, 0.3, 0, 1, 0, 0, 0, 1, 1]]
    assert kept(POLICY(window=2, pool=3), cells, window_of(sums), 5) == [[4, 5, 6, 8, 9]]


def test_of_equal_votes_the_newest_stay(cells_of):
    cells = cells_of([[4, 3, 2, 1, 0, 5]])
    assert kept(POLICY(window=1, pool=1), cells, window_of([[1] * 6]), 3) == [[3, 4, 5]]


def test_sinks_count_in_the_budget(cells_of):
    cells = cells_of([range(4, 14)], sinks=4)
    window = window_of([[5, 4, 3, 2, 1, 0, 0, 0, 0, 0]])
    assert kept(POLICY(window=3, pool=1), cells, window, 9) == [[4, 5, 11, 12, 13]]


def test_a_prompt_within_the_budget_is_kept_whole(cells_of):
    cells = cells_of([[*range(4, 14), -1]], sinks=4)
    window = window_of([[0.0] * 11])
    assert kept(POLICY(window=3), cells, window, 14) == [list(range(4, 14))]
    assert kept(POLICY(window=300), cells, window, 14) == [list(range(4, 14))]


def one_head(positions, sums, now, window, pool, room):
    """Positions that stay: sums [g][C] by a plain loop."""
    old = sorted(p for p in positions if 0 <= p <= now - window)
    votes = {}
    for i, p in enumerate(old):
        near = [positions.index(q) for q in old[max(0, i - pool // 2) : i + pool // 2 + 1]]
        votes[p] = np.float32(sum(max(row[c] for c in near) for row in sums)) / len(sums)
    recent = [p for p in positions if p > now - window]
    old.sort(key=lambda p: (votes[p], p))
    n = max(0, room - len(recent))
    return sorted(recent + old[len(old) - min(n, len(old)) :])


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 3, 7]), st.integers(1, 12), st.integers(0, 40))
def test_heads_are_as_in_a_loop_over_each_of_them(seed, pool, window, more):
    rng = np.random.default_rng(seed)
    policy, n_cells = POLICY(window=window, pool=pool), 40
    # of quarters, sums and means of two heads are exact; many are equal
    sums = rng.integers(0, 4, (6, n_cells)).astype(np.float32) / 4
    positions = np.stack([rng.permutation(60)[:n_cells] for _ in range(3)]).astype(np.int32) + 4
    positions[:, rng.integers(0, n_cells, 4)] = -1
    cells = Cells(positions, np.zeros((0, 3, n_cells), np.float32), 63, 64, 2, 4)
    budget = 4 + window + more
    got = kept(policy, cells, window_of(sums), budget)
    for head in range(3):
        places, rows = positions[head].tolist(), sums[2 * head : 2 * head + 2].tolist()
        rows = [[0 if p < 0 else v for p, v in zip(places, row, strict=True)] for row in rows]
        assert got[head] == one_head(places, rows, 63, window, pool, budget - 4)


def test_settings_out_of_range_are_refused():
    for wrong in ({"pool": 4}, {"pool": 0}, {"pool": 65}, {"window": 0}, {"window": 513}):
        with pytest.raises(ConfigError, match=r"defaults are window=32, pool=7"):
            POLICY(**wrong)
    POLICY(window=60).check(64, 4)
    with pytest.raises(ConfigError, match=r"kv budget 63 is too small for snapkv"):
        POLICY(window=60).check(63, 4)
