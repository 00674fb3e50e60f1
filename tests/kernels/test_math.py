"""exp and the logistic function against float64."""

from __future__ import annotations

import numpy as np
from launch import launch

from pykv.kernels.math_numba import exp16, sigmoid16
from pykv.kernels.simd_memory import (
    load_f32,
    scalar_i64,
    store_f32,
)


# ctx: x, n, e**x, sigmoid
def evaluate(ctx, task, worker):
    for i in range(0, scalar_i64(ctx + 8), 16):
        x = load_f32(scalar_i64(ctx) + i * 4)
        store_f32(scalar_i64(ctx + 16) + i * 4, exp16(x))
        store_f32(scalar_i64(ctx + 24) + i * 4, sigmoid16(x))


def of(x):
    x = np.concatenate([x, np.zeros(-len(x) % 16)]).astype(np.float32)
    e, s = np.zeros_like(x), np.zeros_like(x)
    launch(evaluate, x, len(x), e, s)
    return x.astype(np.float64), e, s


def test_exp_is_within_2e_7():
    grid = np.concatenate([np.linspace(-87, 88, 200_000), np.linspace(-1, 1, 50_000), [-87, 88, 0]])
    x, e, _ = of(grid)
    assert np.abs(e / np.exp(x) - 1).max() < 2e-7
    assert e[grid.tolist().index(0)] == 1


def test_exp_beyond_its_range():
    x, e, s = of(np.array([-87.0001, -100, -3e38, -np.inf, 88.1, 3e38, np.inf]))
    assert e[:4].tolist() == [0, 0, 0, 0]
    assert (e[4:7] == e[4]).all()
    np.testing.assert_allclose(e[4], np.exp(88.0), rtol=2e-7)
    np.testing.assert_allclose(s[4:7], 1, rtol=1e-7)
    assert s[:4].max() < 1e-37


def test_sigmoid():
    x, _, s = of(np.linspace(-80, 80, 100_000))
    # exp's error and two roundings
    np.testing.assert_allclose(s, 1 / (1 + np.exp(-x)), rtol=2e-7 + 2 * 2.0**-24)
