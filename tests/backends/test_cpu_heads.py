"""Products of heads with matrices of their own, and channels cut out and joined, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from verbs import U, result, source, values_of

from pykv.backends import reference


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("type_", "n_in"), [("f32", 64), ("f32", 40), ("q8_0", 64), ("q8_0", 96)])
def test_each_head_has_its_matrix(type_, n_in, deterministic, make_cpu):
    heads, n_out = 3, 50
    tensor = source(type_, normal(heads, n_out, n_in))
    x = normal(20, heads, n_in, seed=1)
    exact = np.einsum("thi,hoi->tho", x.astype(np.float64), values_of(tensor))
    size = np.einsum("thi,hoi->tho", np.abs(x), np.abs(values_of(tensor)))
    rows = {}
    for dev in (make_cpu(deterministic=deterministic), make_cpu(1, deterministic=True),
                reference.create()):  # fmt: skip
        weight = dev.load_heads(tensor)
        for n in (20, 3, 1):
            y = result(dev, lambda d, _, x: d.heads_linear(x, weight), x[:n])  # noqa: B023
            # n_in roundings of a float32 sum
            assert (np.abs(y - exact[:n]) <= (n_in + 2) * U * size[:n]).all()
            rows[dev, n] = y
        if getattr(dev, "deterministic", False):
            np.testing.assert_array_equal(rows[dev, 20][:3], rows[dev, 3])
            np.testing.assert_array_equal(rows[dev, 20][:1], rows[dev, 1])


@pytest.mark.parametrize("shape", [(3, 24), (500, 4, 33), (1, 1, 1)])
def test_channels_are_cut_out_and_joined(shape, make_cpu):
    x, y = normal(*shape), normal(*shape[:-1], 7, seed=1)
    for dev in (make_cpu(), reference.create()):
        stop = shape[-1]
        first = stop // 3
        cut = result(dev, lambda d, _, x: d.columns(x, first, stop), x)  # noqa: B023
        np.testing.assert_array_equal(cut, x[..., first:])
        joined = result(dev, lambda d, _, x, y: d.concat(x, y), x, y)
        np.testing.assert_array_equal(joined, np.concatenate([x, y], -1))
