"""Budgets, names and settings, and the choice of the lowest against sorted tuples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykv.errors import ConfigError
from pykv.policies import base
from pykv.policies.base import Budget, lowest, oldest
from pykv.policies.h2o import H2O


@pytest.mark.parametrize(
    ("text", "n_seen", "tokens"),
    [
        ("1024", 5, 1024),
        ("1", 10**6, 1),
        ("20%", 4096, 819),
        ("20%", 100, 64),
        ("100%", 4096, 4096),
        ("0.5%", 100_000, 500),
        ("29%", 1000, 290),
    ],
)
def test_a_budget_is_tokens_or_a_share_of_those_seen(text, n_seen, tokens):
    assert Budget.parse(text).of(n_seen) == tokens
    assert str(Budget.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "0", "0%", "101%", "100.1%", "-5", "1.5", "1e3", "%", "20 %", "nan%", "20%%", " 8"]
)
def test_a_senseless_budget_is_refused(text):
    with pytest.raises(ConfigError, match=r"kv budget must be a number of tokens"):
        Budget.parse(text)


def test_a_policy_is_parsed_with_its_settings():
    assert base.parse("full") is None
    assert base.parse("h2o") == H2O()
    assert base.parse("h2o:recent=0.25,prompt=full") == H2O(0.25, "full")
    assert base.parse("h2o:prompt=full") == H2O(prompt="full")


def test_a_policy_is_written_as_it_is_parsed():
    assert str(H2O()) == "h2o"
    assert str(H2O(0.25, "full")) == "h2o:recent=0.25,prompt=full"
    assert str(H2O(prompt="full")) == "h2o:prompt=full"


H2O_SETTINGS = "its settings and their defaults are recent=0.5, prompt=tokens"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("h2o:size=3", H2O_SETTINGS),
        ("h2o:recent", H2O_SETTINGS),
        ("h2o:", H2O_SETTINGS),
        ("h2o:recent=half", "recent must be a number, not 'half'; " + H2O_SETTINGS),
        ("h2o:recent=nan", "recent must be 0 to 1, not nan; " + H2O_SETTINGS),
        ("h2o:recent=1.5", "recent must be 0 to 1, not 1.5; " + H2O_SETTINGS),
        ("h2o:prompt=half", "prompt must be tokens or full, not 'half'; " + H2O_SETTINGS),
        ("h2o:recent=0.5,recent=0.6", "is set twice"),
        ("scissorhands:history=1.5", "history must be a whole number, not '1.5'"),
        ("window:size=3", "it has no settings"),
        ("full:size=3", "kv policy full has no settings"),
    ],
)
def test_a_wrong_setting_is_refused_with_those_that_there_are(spec, sentence):
    with pytest.raises(ConfigError) as error:
        base.parse(spec)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("spec", "guess"),
    [("h20", "h2o"), ("ful", "full"), ("snapvk:window=8", "snapkv"), ("base", "sinks"), ("", "")],
)
def test_an_unknown_policy_is_refused_with_those_that_are_known(spec, guess):
    with pytest.raises(ConfigError, match=r"unknown kv policy") as error:
        base.parse(spec)
    assert ", ".join(base.names()) in str(error.value)
    assert guess in str(error.value)


def test_full_is_among_the_names():
    assert base.names() == ["fastgen", "full", "h2o", "scissorhands", "sinks", "snapkv", "window"]


# few different scores, so that many are equal; as a float's bits they are ordered too
HEADS = st.lists(
    st.tuples(st.sampled_from([0.0, 1e-45, 1e-9, 0.5, 0.50000006, 1.0, 3e9]), st.booleans()),
    min_size=2,
    max_size=40,
)


@settings(deadline=None)
@given(HEADS, st.integers(0, 2**31), st.booleans(), st.data())
def test_the_lowest_are_those_of_sorted_pairs(head, seed, largest, data):
    rng = np.random.default_rng(seed)
    positions = rng.permutation(len(head)).astype(np.int32) + 4
    positions[[not used for _, used in head]] = -1
    scores = np.array([score for score, _ in head], np.float32)
    last = data.draw(st.integers(4, len(head) + 4))
    pairs = zip(scores, positions, strict=True)
    free = [(-s if largest else s, p, c) for c, (s, p) in enumerate(pairs)]
    free = sorted(entry for entry in free if 0 <= entry[1] <= last)
    for count in {1, 2, len(free)}:
        if 0 < count <= len(free):
            got = lowest(scores[None], positions[None], last, count, largest)
            assert sorted(got[0]) == sorted(cell for _, _, cell in free[:count])


def test_the_oldest_are_the_lowest_positions_in_use():
    positions = np.array([[7, -1, 5, 9, -1, 6], [-1, 9, 8, -1, 3, 5]], np.int32)
    assert oldest(positions, 1).tolist() == [[2], [4]]
    assert np.sort(oldest(positions, 3), -1).tolist() == [[0, 2, 5], [2, 4, 5]]


def test_a_view_of_some_layers_is_taken_as_it_is():
    rng = np.random.default_rng(1)
    scores = rng.random((6, 5, 3, 40), dtype=np.float32)[::2, 1:4, ::2, 5:]
    positions = np.arange(3 * 3 * 2 * 35, dtype=np.int32).reshape(3, 3, 2, 35)
    for count in (1, 7):
        got = np.sort(lowest(scores, positions, 10**6, count), -1)
        assert np.array_equal(got, np.sort(scores.argsort(-1)[..., :count], -1))
