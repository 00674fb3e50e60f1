"""What holds for every policy: what goes, what stays, and what a policy may not touch."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv import registry
from pykv.errors import ConfigError, PolicyError
from pykv.policies import base
from pykv.policies.base import Cells, Window

ALL = {n: registry.find("policies", n, "kv policy").POLICY for n in registry.names("policies")}
TOKEN = [n for n, policy in ALL.items() if policy.moment == "token"]
PROMPT = [n for n, policy in ALL.items() if policy.moment == "prompt"]
GROUP, SINKS = 3, 4


def cells_of(policy, lead, n_live, n_cells, seed, sinks=SINKS):
    """Random cells [*lead, C], the newest token among them; scores of few values."""
    rng = np.random.default_rng(seed)
    positions = np.full((*lead, n_cells), -1, np.int32)
    now = sinks + 2 * n_live
    for head in np.ndindex(*lead):
        old = rng.permutation(np.arange(sinks, now))[: n_live - 1]
        positions[head][rng.permutation(n_cells)[:n_live]] = [*old, now]
    scores = rng.integers(0, 5, (policy.n_scores, *positions.shape)).astype(np.float32)
    return Cells(positions, scores, now, n_live + sinks, GROUP, sinks)


def window_of(policy, cells, seed):
    """Attention of the last queries, in eighths, so that sums do not depend on their order."""
    rng = np.random.default_rng(seed)
    n_kv, n_cells = cells.positions.shape
    used = np.repeat(cells.positions >= 0, GROUP, 0)
    sums = rng.integers(0, 3, (n_kv * GROUP, n_cells)).astype(np.float32) / 8 * used
    n_queries = max(policy.n_queries, int(sums.sum(-1).max()) + 1)
    return Window(sums, n_queries, rng.integers(0, 3, (n_kv, n_cells)).astype(np.uint8))


def own_sinks(policy):
    return SINKS if policy.keeps_sinks else 0


def copy(cells):
    scores = cells.scores.copy()
    return Cells(cells.positions.copy(), scores, cells.now, cells.n_kept, cells.group, cells.sinks)


def seal(*arrays):
    for array in arrays:
        array.flags.writeable = False


@pytest.mark.parametrize("name", ALL)
def test_a_policy_says_what_it_is(name):
    policy = ALL[name]
    assert policy.name == name
    assert "Source: " in sys.modules[policy.__module__].__doc__
    assert policy.moment in ("token", "prompt")
    assert policy.needs in ("", "sums", "window")
    assert (policy.needs == "window") == (policy.moment == "prompt") == (policy().n_queries > 0)
    assert (policy.needs == "sums") == (policy.n_scores > 0)
    # without attention, heads have nothing to differ by
    assert policy.per_head == (policy.needs != "")
    assert policy.__bases__ == (base.Policy,)


@pytest.mark.parametrize("name", ALL)
def test_settings_have_defaults_and_are_read_back(name):
    policy = ALL[name]()
    assert base.parse(name) == policy
    every = ",".join(f"{f.name}={f.default}" for f in fields(policy))
    assert base.parse(f"{name}:{every}" if every else name) == policy
    assert base.parse(str(policy)) == policy
    with pytest.raises(FrozenInstanceError):
        policy.recent = 1
    with pytest.raises(ConfigError):
        base.parse(f"{name}:nothing=1")


@pytest.mark.parametrize("name", ALL)
def test_the_default_sinks_fit_the_smallest_share(name):
    ALL[name]().check(base.LEAST_TOKENS, own_sinks(ALL[name]))


@pytest.mark.parametrize("name", ALL)
def test_a_checked_budget_has_room_for_sinks_and_recent_tokens(name):
    policy = ALL[name]()
    for sinks in (0, SINKS, 64):
        sinks = sinks if policy.keeps_sinks else 0
        for budget in range(1, 200):
            try:
                policy.check(budget, sinks)
            except ConfigError:
                continue
            recent = policy.recent_tokens(budget, sinks)
            assert recent >= 1
            assert not policy.takes_budget or sinks + recent <= budget


@pytest.mark.parametrize("name", TOKEN)
@given(st.integers(0, 2**31), st.integers(30, 60), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_what_goes_is_in_use_old_and_the_same_in_any_order(name, seed, n_live, count):
    policy, rng = ALL[name](), np.random.default_rng(seed)
    cells = cells_of(policy, (2, 3), n_live, 64, seed, own_sinks(policy))
    seal(cells.positions, cells.scores)
    gone = policy.drop(cells, count)
    assert gone.shape == (2, 3, count)
    assert gone.dtype == np.int64
    places = np.sort(np.take_along_axis(cells.positions, gone, -1), -1)
    assert (places >= 0).all()
    assert (np.diff(places, axis=-1) > 0).all()
    # the recent part counts tokens of the text
    recent = policy.recent_tokens(cells.n_kept - count, cells.sinks)
    if policy.per_head:
        assert (places <= cells.now - recent).all()
    assert (places < cells.now).all()
    order = rng.permutation(64)
    other = copy(cells)
    other.positions, other.scores = cells.positions[..., order], cells.scores[..., order]
    again = np.take_along_axis(other.positions, policy.drop(other, count), -1)
    assert np.array_equal(np.sort(again, -1), places)
    # and a head decides by itself
    head = copy(cells)
    head.positions, head.scores = cells.positions[1, 2:], cells.scores[:, 1, 2:]
    assert set(policy.drop(head, count)[0]) == set(gone[1, 2])


@pytest.mark.parametrize("name", TOKEN)
def test_a_policy_that_drops_more_keeps_within_the_budget(name):
    policy = ALL[name]()
    for budget in (64, 256, 1000):
        for over in (1, 2, 64, 5000):
            count = policy.count_to_drop(over, budget)
            assert over <= count
            cells = cells_of(policy, (1,), budget + over, budget + over, over, own_sinks(policy))
            cells.n_kept = budget + over + cells.sinks
            assert len(set(policy.drop(cells, count)[0])) == count


@pytest.mark.parametrize("name", TOKEN)
def test_more_than_there_is_cannot_be_dropped(name):
    policy = ALL[name]()
    cells = cells_of(policy, (2,), 12, 20, 1, own_sinks(policy))
    for count in (0, 12, 50):
        with pytest.raises(PolicyError, match=f"cannot drop {count} of {cells.n_kept} tokens"):
            policy.drop(cells, count)


@pytest.mark.parametrize("name", TOKEN)
def test_only_scores_change_when_attention_is_noted(name):
    policy = ALL[name]()
    cells = cells_of(policy, (2, 3), 20, 30, 5, own_sinks(policy))
    paid = np.where(cells.positions < 0, 0, 0.02).astype(np.float32)
    seal(cells.positions, paid)
    before, scores = copy(cells), cells.scores
    assert policy.observe(cells, paid) is None
    assert cells.scores is scores
    assert (cells.now, cells.n_kept, cells.sinks) == (before.now, before.n_kept, before.sinks)
    assert (policy.needs == "") == np.array_equal(cells.scores, before.scores)
    # together as each head alone
    head = copy(before)
    head.positions, head.scores = before.positions[1], before.scores[:, 1]
    policy.observe(head, paid[1])
    assert np.array_equal(head.scores, cells.scores[:, 1])


@pytest.mark.parametrize("name", PROMPT)
@given(st.integers(0, 2**31), st.integers(1, 120), st.integers(64, 140))
@settings(max_examples=30, deadline=None)
def test_what_stays_is_in_use_within_the_budget_and_the_same_in_any_order(
    name, seed, n_live, budget
):
    policy, rng = ALL[name](), np.random.default_rng(seed)
    cells = cells_of(policy, (2,), n_live, 128, seed)
    window = window_of(policy, cells, seed)
    seal(cells.positions, cells.scores, window.sums, window.classes)
    stay = policy.select(cells, window, budget)
    assert stay.shape == cells.positions.shape
    assert stay.dtype == bool
    live = cells.positions >= 0
    assert not (stay & ~live).any()
    recent = live & (cells.positions > cells.now - policy.recent_tokens(budget, SINKS))
    assert (stay | ~recent).all()
    if policy.takes_budget:
        assert (stay.sum(-1) == min(n_live, budget - SINKS)).all()
    order = rng.permutation(128)
    other, turned = copy(cells), Window(window.sums[:, order], window.n_queries, None)
    other.positions, turned.classes = cells.positions[:, order], window.classes[:, order]
    assert np.array_equal(policy.select(other, turned, budget), stay[:, order])
    head = copy(cells)
    head.positions = cells.positions[1:]
    one = Window(window.sums[GROUP:], window.n_queries, window.classes[1:])
    assert np.array_equal(policy.select(head, one, budget), stay[1:])
