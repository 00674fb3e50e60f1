"""Squared derivatives of attention against differences of attention itself, in float64."""

import numpy as np
import pytest

from pykv.backends.base import Rope
from pykv.engine import importance as module
from pykv.engine.importance import HeadInputs, importance, turned

T, D, GROUP = 23, 8, 3


def rope_of(kind):
    inv_freq = 10.0 ** -np.arange(4)
    return {
        "norm": Rope(False, inv_freq), "neox": Rope(True, inv_freq),
        "part": Rope(True, inv_freq[:3], 1.2), "none": None,
    }[kind]  # fmt: skip


def turn(x, rope, t):
    """One vector, in float64."""
    y = x.astype(float).copy()
    if rope is not None:
        half = rope.n_rot // 2
        for i, f in enumerate(rope.inv_freq):
            a, b = (i, i + half) if rope.neox else (2 * i, 2 * i + 1)
            c, s = np.cos(t * f) * rope.magnitude, np.sin(t * f) * rope.magnitude
            y[a], y[b] = x[a] * c - x[b] * s, x[a] * s + x[b] * c
    return y


def outputs(q, k, v, rope, window):
    """Attention of every query and head, f64 [GROUP, T, D]; keys before RoPE."""
    out = np.empty(q.shape)
    keys = np.array([turn(x, rope, t) for t, x in enumerate(k)])
    for h, t in np.ndindex(q.shape[:2]):
        low = max(t - window + 1, 0) if window else 0
        s = keys[low : t + 1] @ turn(q[h, t], rope, t)
        p = np.exp(s - s.max())
        out[h, t] = p / p.sum() @ v[low : t + 1]
    return out


def slopes(q, k, v, rope, window, of, j, c):
    """Sum over heads and later queries of |d output / d of[j, c]|^2."""
    step, found = 1e-5, []
    for sign in (1, -1):
        moved = {"k": k.copy(), "v": v.copy()}
        moved[of][j, c] += sign * step
        found.append(outputs(q, moved["k"], moved["v"], rope, window))
    slope = (found[0] - found[1]) / (2 * step)
    return (slope[:, j + 1 :] ** 2).sum()


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("kind", ["norm", "neox", "part", "none"])
def test_it_is_the_squared_derivative(kind, window, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 5)
    rng, rope = np.random.default_rng(0), rope_of(kind)
    q, k, v = (rng.standard_normal(s) * 0.7 for s in ((GROUP, T, D), (T, D), (T, D)))
    rows = np.array([0, 1, 5, 9, 10, 17, 21, 22])
    positions = np.arange(T, dtype=np.int64)
    wide = np.float32(q.transpose(1, 0, 2))
    given = HeadInputs(
        np.ascontiguousarray(turned(wide, rope, positions).transpose(1, 0, 2)),
        turned(np.float32(k)[:, None], rope, positions)[:, 0], np.float32(v), window,
    )  # fmt: skip
    of_values, of_keys = importance(given, rope, rows)
    for i, j in enumerate(rows):
        # a value's channel moves that channel of the output only
        expected = slopes(q, k, v, rope, window, "v", j, 2)
        assert of_values[i] == pytest.approx(expected, rel=1e-4, abs=1e-7)
        for c in range(D):
            expected = slopes(q, k, v, rope, window, "k", j, c)
            assert of_keys[i, c] == pytest.approx(expected, rel=2e-3, abs=1e-6)


def test_the_last_token_has_no_later_query():
    x = np.random.default_rng(1).standard_normal((1, 9, D)).astype(np.float32)
    of_values, of_keys = importance(HeadInputs(x, x[0], x[0], 0), None, np.array([8]))
    assert of_values.tolist() == [0]
    assert not of_keys.any()
