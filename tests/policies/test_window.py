"""The newest tokens and no others."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import ConfigError, PolicyError
from pykv.policies.window import POLICY


def test_after_every_token_the_newest_are_kept(read_text):
    kept = read_text(POLICY(), np.zeros((20, 2, 20), np.float32), budget=8, sinks=0)
    assert kept == [[set(range(max(0, t - 7), t + 1))] * 2 for t in range(20)]


def test_several_go_at_once(cells_of):
    cells = cells_of([[5, 2, -1, 4, 3], [3, 4, 5, 2, -1]])
    assert np.sort(POLICY().drop(cells, 3), -1).tolist() == [[1, 3, 4], [0, 1, 3]]


def test_the_newest_token_is_never_dropped(cells_of):
    with pytest.raises(PolicyError, match=r"cannot drop 3 of 3 tokens a head"):
        POLICY().drop(cells_of([[0, 1, 2]]), 3)


def test_any_budget_will_do_since_sinks_are_not_kept():
    POLICY().check(1, 64)
    assert POLICY().recent_tokens(1, 0) == 1
    with pytest.raises(ConfigError, match=r"kv budget 0 is too small for window"):
        POLICY().check(0, 0)
