"""StreamingLLM's own case: 4 sinks and 8 recent of 20 tokens."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.errors import ConfigError, PolicyError
from pykv.policies.sinks import POLICY


def test_the_worked_case(read_text):
    kept = read_text(POLICY(), np.zeros((21, 3, 21), np.float32), budget=12, sinks=4)
    assert kept[19] == [{0, 1, 2, 3, *range(12, 20)}] * 3
    assert kept[20] == [{0, 1, 2, 3, *range(13, 21)}] * 3
    assert kept[11] == [set(range(12))] * 3


def test_layers_are_decided_together(cells_of):
    cells = cells_of([[[9, 8, 7]], [[7, 9, 8]]], sinks=4, n_kept=7)
    assert POLICY().drop(cells, 1).tolist() == [[[2]], [[0]]]


def test_sinks_do_not_count_as_cells_to_drop(cells_of):
    with pytest.raises(PolicyError, match=r"4 are sinks and the newest 1 stay"):
        POLICY().drop(cells_of([[4, 5, 6]], sinks=4), 3)


def test_the_window_is_what_the_sinks_leave():
    assert POLICY().recent_tokens(64, 4) == 60
    POLICY().check(5, 4)
    with pytest.raises(ConfigError, match=r"kv budget 4 is too small for sinks, .* 4 sinks"):
        POLICY().check(4, 4)
