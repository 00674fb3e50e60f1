"""Levels against the best ones there are, found by trying every partition of a few numbers."""

from itertools import combinations

import numpy as np
import pytest

from pykv.engine.levels import BINS, Histogram


def loss(x, w, levels):
    return (w * np.min((x[:, None] - np.asarray(levels, float)) ** 2, 1)).sum()


def best_loss(x, w, n):
    """Of every way to cut sorted numbers into n runs, each with its mean for a level."""
    order = np.argsort(x)
    x, w = x[order], w[order]
    found = []
    for cuts in combinations(range(1, len(x)), n - 1):
        parts = np.split(np.arange(len(x)), cuts)
        found.append(
            sum((w[p] * (x[p] - np.average(x[p], weights=w[p])) ** 2).sum() for p in parts)
        )
    return min(found)


def levels_of(x, w, *counts):
    histogram = Histogram()
    histogram.add(x, w)
    return histogram.levels(counts)


@pytest.mark.parametrize("seed", range(8))
def test_few_numbers_get_the_best_levels(seed):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, 14) if seed % 2 else rng.standard_normal(14).clip(-3, 3) / 3
    w = rng.gamma(0.5, size=14) + 1e-3
    for n, levels in levels_of(x, w, 2, 4).items():
        assert levels.dtype == np.float32
        assert levels.shape == (n,)
        assert (np.diff(levels) > 0).all()
        # two numbers that lie in one of 256 coarse bins are not cut apart at first
        assert loss(x, w, levels) <= best_loss(x, w, n) * 1.02 + 1e-4 * w.sum() / 256


def test_normal_numbers_get_the_lloyd_max_levels():
    # J. Max 1960, table I, for 4 and 8 levels; the range's ends, 5 deviations, hold next to nothing
    x = np.random.default_rng(0).standard_normal(400_000) / 5
    found = levels_of(x, np.ones(x.shape), 4, 8)
    np.testing.assert_allclose(found[4][2:] * 5, [0.4528, 1.5104], atol=0.01)
    np.testing.assert_allclose(found[8][4:] * 5, [0.2451, 0.7560, 1.3439, 2.1519], atol=0.02)
    np.testing.assert_allclose(found[8], -found[8][::-1], atol=0.005)


def test_each_level_is_the_mean_of_what_is_nearest():
    rng = np.random.default_rng(1)
    x, w = rng.beta(2, 5, 20000) * 2 - 1, rng.gamma(0.3, size=20000)
    levels = levels_of(x, w, 16)[16].astype(float)
    near = np.abs(x[:, None] - levels).argmin(1)
    means = [np.average(x[near == i], weights=w[near == i]) for i in range(16)]
    # numbers of a bin go with its mean: at most the bin at each end of a cell is on the wrong side
    np.testing.assert_allclose(levels, means, atol=4 / BINS)


def test_weights_draw_levels_to_them():
    x = np.linspace(-1, 1, 4001)
    plain = levels_of(x, np.ones(4001), 8)[8]
    np.testing.assert_allclose(plain, (np.arange(8) + 0.5) / 4 - 1, atol=2e-3)
    drawn = levels_of(x, np.where(x > 0.5, 100.0, 1.0), 8)[8]
    assert (drawn > 0.5).sum() >= 5


def test_numbers_beyond_the_ends_count_as_them():
    x, w = np.array([-7.0, -1, 1, 30]), np.ones(4)
    np.testing.assert_array_equal(levels_of(x, w, 2)[2], [-1, 1])


def test_what_has_no_weight_is_covered_evenly():
    levels = Histogram().levels([2, 16])
    assert (np.diff(levels[16]) > 0).all()
    assert np.abs(levels[16]).max() < 1
    x, w = np.array([0.25]), np.array([1.0])
    few = levels_of(x, w, 4)[4]
    assert (np.diff(few) > 0).all()
    assert 0.25 in few.tolist()
