"""Scissorhands: counts that fade, and the largest of them goes."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import ConfigError, PolicyError
from pykv.policies.scissorhands import POLICY


def test_a_query_counts_where_the_groups_mean_is_below_its_share(cells_of):
    # 10 tokens are seen, 2 query heads: sums below 2 / 10 count, 2 / 10 itself does not
    cells = cells_of([[0, 1, 2]], n_kept=10, group=2)
    paid = np.array([[0.19, np.float32(2 / 10), 0.7]], np.float32)
    POLICY().observe(cells, paid)
    assert cells.scores.tolist() == [[[1, 0, 0]]]


def test_counts_fade_to_a_third_in_the_time_of_the_history(cells_of):
    cells = cells_of([[0, 1]], [[[100, 0]]])
    for step in range(400):
        # cell 0 draws enough from now on; cell 1 does in every other step
        POLICY().observe(cells, np.array([[0.5, 0.5 * (step % 2)]], np.float32))
    faded, half = cells.scores[0, 0]
    # 400 roundings of half a unit each
    assert faded == pytest.approx(100 * (1 - 1 / 400) ** 400, rel=400 * 2.0**-24)
    assert faded == pytest.approx(100 / np.e, rel=2e-3)
    expected = sum((1 - 1 / 400) ** (399 - step) for step in range(0, 400, 2))
    assert half == pytest.approx(expected, rel=400 * 2.0**-24)


def test_a_history_of_one_knows_the_last_query_only(cells_of):
    cells = cells_of([[0, 1]], [[[300, 2]]])
    POLICY(history=1).observe(cells, np.array([[0.9, 0.1]], np.float32))
    assert cells.scores.tolist() == [[[0, 1]]]


def test_the_largest_count_goes_and_of_equal_ones_the_oldest(cells_of):
    positions = [[3, 0, 2, 1, 4, 5]]
    policy = POLICY(recent=2)
    # 9 belongs to a recent token; the oldest of the three with 5 is token 0 in cell 1
    cells = cells_of(positions, [[[5, 5, 0, 5, 9, 0]]])
    assert policy.drop(cells, 1).tolist() == [[1]]
    assert sorted(policy.drop(cells, 2)[0]) == [1, 3]
    assert sorted(policy.drop(cells, 4)[0]) == [0, 1, 2, 3]
    with pytest.raises(PolicyError, match=r"cannot drop 5 of 6 tokens a head"):
        policy.drop(cells, 5)


def one_head(attention, budget, sinks, policy):
    """Positions that a head keeps after every token."""
    counts, kept = {}, []
    for token, paid in enumerate(attention):
        counts[token] = np.float32(0)
        for p in counts:
            counts[p] = counts[p] * np.float32(1 - 1 / policy.history)
            counts[p] += np.float32(paid[p] < np.float32(1 / len(counts)))
        over = len(counts) - budget
        if over > 0:
            free = [p for p in counts if sinks <= p <= token - policy.recent]
            free.sort(key=lambda p: (-counts[p], p))
            for p in free[: max(over, int(policy.at_once * budget))]:
                del counts[p]
        kept.append(set(counts))
    return kept


@pytest.mark.parametrize("at_once", [0.0, 0.2])
def test_texts_are_as_in_a_loop_over_each_head(read_text, at_once):
    policy = POLICY(history=20, recent=3, at_once=at_once)
    rng = np.random.default_rng(11)
    attention = rng.exponential(1 / 20, (150, 3, 150)).astype(np.float32)
    kept = read_text(policy, attention, budget=20, sinks=2)
    for head in range(3):
        expected = one_head(attention[:, head], 20, 2, policy)
        assert [state[head] for state in kept] == expected


def test_a_tenth_is_dropped_at_once():
    assert POLICY().count_to_drop(1, 256) == 25
    assert POLICY().count_to_drop(40, 256) == 40
    assert POLICY(at_once=0).count_to_drop(1, 256) == 1


def test_what_is_left_after_a_drop_holds_sinks_and_recent_tokens():
    # 20 - 10 + 1 tokens are left at the least
    POLICY(at_once=0.5).check(20, 1)
    with pytest.raises(ConfigError, match=r"kv budget 20 is too small .* goes down to 11"):
        POLICY(at_once=0.5).check(20, 2)
    with pytest.raises(ConfigError, match=r"history must be 1 or more, not 0; .* history=400, rec"):
        POLICY(history=0)
    with pytest.raises(ConfigError, match=r"recent must be 1 or more"):
        POLICY(recent=0)
    with pytest.raises(ConfigError, match=r"at_once must be 0 to 1"):
        POLICY(at_once=-0.1)
