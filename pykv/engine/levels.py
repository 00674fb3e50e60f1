"""Levels for uneven codes: a weighted k-means of numbers from -1 to 1, by way of a histogram.

In one dimension the clusters are intervals, so that dynamic programming finds the best ones among
those that end at a coarse bin's edge; Lloyd's iteration then moves them over fine bins. There is
nothing random in it.
Source: Wang and Song 2011, Ckmeans.1d.dp, The R Journal 3(2), section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

BINS = 4096  # of the histogram
COARSE = 256  # edges that intervals may end at, before they are refined
MOST_ROUNDS = 200  # of Lloyd's iteration
SETTLED = 1e-6  # a round that moves no level by more is the last


class Histogram:
    """Numbers from -1 to 1 with weights: for each bin the weights' sum and their numbers' sum."""

    def __init__(self) -> None:
        self.weights: F64 = np.zeros(BINS)
        self.sums: F64 = np.zeros(BINS)

    def add(self, x: NDArray[Any], weights: NDArray[Any]) -> None:
        """Numbers and weights of one shape; a number beyond -1 or 1 counts as that."""
        x = np.clip(x, -1, 1).astype(np.float64).reshape(-1)
        weights = weights.astype(np.float64).reshape(-1)
        bins = np.minimum(((x + 1) * (BINS / 2)).astype(np.int64), BINS - 1)
        self.weights += np.bincount(bins, weights, BINS)
        self.sums += np.bincount(bins, weights * x, BINS)

    def levels(self, counts: Sequence[int]) -> dict[int, NDArray[np.float32]]:
        """For each count, that many levels, f32, rising; evenly spread where nothing has weight."""
        starts = _intervals(self.weights, self.sums, counts)
        return {n: self._refined(starts[n]) for n in counts}

    def _refined(self, levels: F64) -> NDArray[np.float32]:
        centres = (np.arange(BINS) + 0.5) * (2 / BINS) - 1
        means = np.divide(self.sums, self.weights, out=centres, where=self.weights > 0)
        weight = np.concatenate([[0.0], np.cumsum(self.weights)])
        total = np.concatenate([[0.0], np.cumsum(self.sums)])
        for _ in range(MOST_ROUNDS):
            ends = np.searchsorted(means, (levels[:-1] + levels[1:]) / 2)
            edges = np.concatenate([[0], ends, [BINS]])
            mass = np.diff(weight[edges])
            # a level that nothing is nearest to stays where it is
            moved = np.divide(np.diff(total[edges]), mass, out=levels.copy(), where=mass > 0)
            settled = np.abs(moved - levels).max() <= SETTLED
            levels = np.sort(moved)
            if settled:
                break
        return levels.astype(np.float32)


def _intervals(weights: F64, sums: F64, counts: Sequence[int]) -> dict[int, F64]:
    """The best levels of intervals of coarse bins, for each count."""
    squares = np.divide(sums**2, weights, out=np.zeros(BINS), where=weights > 0)
    w, s, q = (
        np.concatenate([[0.0], np.cumsum(x.reshape(COARSE, -1).sum(1))])
        for x in (weights, sums, squares)
    )
    mass = w[None, :] - w[:, None]  # [i, j]: of coarse bins i to j - 1
    first = s[None, :] - s[:, None]
    mean = np.divide(first**2, mass, out=np.zeros_like(mass), where=mass > 0)
    cost = np.maximum(q[None, :] - q[:, None] - mean, 0)
    cost[np.tril_indices(COARSE + 1)] = np.inf  # an interval has one bin at least
    best, came = cost[0], []
    made: dict[int, F64] = {}
    for n in range(1, max(counts) + 1):
        if n > 1:
            through = best[:, None] + cost
            came.append(through.argmin(0))
            best = through.min(0)
        if n in counts:
            edges = [COARSE]
            for back in reversed(came):
                edges.append(int(back[edges[-1]]))
            edges = [0, *reversed(edges)]
            middles = (np.array(edges[1:]) + edges[:-1]) / COARSE - 1
            own, total = np.diff(w[edges]), np.diff(s[edges])
            made[n] = np.divide(total, own, out=middles, where=own > 0)
    return made
