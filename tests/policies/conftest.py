"""Cells by hand, and a text read token by token as the store does it."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.policies.base import Cells


def _cells(positions, scores=None, **numbers):
    """Cells of positions [G, C]; what is not given follows from them."""
    positions = np.array(positions, np.int32)
    scores = np.zeros((1, *positions.shape)) if scores is None else np.array(scores)
    counted = {"now": int(positions.max()), "n_kept": int((positions[0] >= 0).sum())}
    counted["n_kept"] += numbers.get("sinks", 0)
    return Cells(positions, scores.astype(np.float32), **(counted | numbers))


def _read(policy, attention, budget, sinks, group=1, seed=0):
    """The positions that each head keeps after every token, as sets: [n_tokens][G].

    attention f32 [n_tokens, G, n_tokens]: what the newest token pays each position, if it is kept.
    New tokens enter empty cells in a random order.
    """
    n_tokens, n_kv = attention.shape[:2]
    rng, n_cells = np.random.default_rng(seed), budget - sinks + 3
    positions = np.full((n_kv, n_cells), -1, np.int32)
    cells = Cells(positions, np.zeros((1, n_kv, n_cells), np.float32), 0, 0, group, sinks)
    heads, states = np.arange(n_kv), []
    for token in range(n_tokens):
        cells.now, cells.n_kept = token, cells.n_kept + 1
        if token >= sinks:
            new = [rng.choice(np.flatnonzero(head < 0)) for head in positions]
            positions[heads, new], cells.scores[:, heads, new] = token, 0
        paid = np.take_along_axis(attention[token], np.maximum(positions, 0), -1)
        policy.observe(cells, np.where(positions < 0, np.float32(0), paid))
        over = cells.n_kept - budget
        if over > 0:
            count = policy.count_to_drop(over, budget)
            positions[heads[:, None], policy.drop(cells, count)] = -1
            cells.n_kept -= count
        first = set(range(min(sinks, token + 1)))
        states.append([first | set(head[head >= 0].tolist()) for head in positions])
    return states


@pytest.fixture
def cells_of():
    return _cells


@pytest.fixture
def read_text():
    return _read
