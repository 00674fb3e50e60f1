"""The oracle's own verbs against float64; its attention is checked in the cache's tests."""

from __future__ import annotations

import numpy as np
import pytest
from verbs import Graph, Run, U, plain_step, source, values_of

from pykv.backends import reference
from pykv.backends.base import CacheFormats, LayerShape, Rope
from pykv.config import CacheConfig
from pykv.errors import CancelledError, NumericsError

R = reference.create()
RNG = np.random.default_rng(8)


def normal(*shape):
    return RNG.normal(0, 2, shape).astype(np.float32)


def test_linear_and_embed_use_the_decoded_weights():
    tensor, x = source("q4_1", normal(9, 64)), normal(3, 64)
    w = R.load(tensor)
    np.testing.assert_array_equal(w, values_of(tensor))
    size = np.abs(x) @ np.abs(values_of(tensor)).T
    for add in (None, normal(3, 9)):
        exact = x.astype(np.float64) @ values_of(tensor).T + (0 if add is None else add)
        # 64 products and one addition: as many roundings
        assert (np.abs(R.linear(x, w, add) - exact) <= 65 * U * (size + 10)).all()
    step = plain_step(3, [4, 0, 4])
    np.testing.assert_array_equal(R.embed(w, step), values_of(tensor)[[4, 0, 4]])


def test_norm_gates_and_softcap():
    x, y, w = normal(4, 50), normal(4, 50), normal(50)
    d = x.astype(np.float64)
    norm = d / np.sqrt((d**2).mean(-1, keepdims=True) + 0.1) * w
    np.testing.assert_allclose(R.rms_norm(x, w, 0.1), norm, rtol=60 * U, atol=0)
    np.testing.assert_allclose(R.swiglu(x, y), d / (1 + np.exp(-d)) * y, rtol=30 * U, atol=0)
    gelu = 0.5 * d * (1 + np.tanh(np.sqrt(2 / np.pi) * (d + 0.044715 * d**3)))
    # 1 + tanh cancels for negative values: an error of about u, times x and y
    np.testing.assert_allclose(R.geglu(x, y), gelu * y, rtol=30 * U, atol=4 * 50 * U)
    np.testing.assert_allclose(R.softcap(x, 5), 5 * np.tanh(d / 5), rtol=30 * U, atol=0)


def test_gates_of_huge_values_warn_of_nothing():
    x, one = np.array([[-1e30, 1e30]], np.float32), np.ones((1, 2), np.float32)
    np.testing.assert_array_equal(R.swiglu(x, one), np.array([[0, 1e30]], np.float32))
    np.testing.assert_array_equal(R.geglu(x, one), np.array([[0, 1e30]], np.float32))


def test_add_bias_scale_and_rows():
    x, y = normal(4, 5), normal(4, 5)
    np.testing.assert_array_equal(R.add(x, y), x + y)
    np.testing.assert_array_equal(R.bias(x, y[0]), x + y[:1])
    np.testing.assert_array_equal(R.scale(x, 0.1), x * np.float32(0.1))
    step = plain_step(4, outputs=[3, 1])
    np.testing.assert_array_equal(R.take_rows(x, step), x[[3, 1]])


@pytest.mark.parametrize("neox", [False, True])
def test_rope_keeps_lengths_and_depends_on_distance_alone(neox):
    rope = Rope(neox, 10000.0 ** (-np.arange(8) / 8))
    q, k = normal(1, 1, 20), normal(1, 1, 20)

    def at(x, position):
        return R._turn(x, np.array([position]), rope).astype(np.float64).ravel()

    # 16 of 20 channels turn, by sines and cosines that are half an ulp off
    same = {"rtol": 0, "atol": 100 * U * np.linalg.norm(q) * np.linalg.norm(k)}
    for shift in (1, 37, 4000):
        np.testing.assert_allclose(at(q, 9 + shift) @ at(k, 2 + shift), at(q, 9) @ at(k, 2), **same)
        assert np.linalg.norm(at(q, shift)) == pytest.approx(np.linalg.norm(q), rel=20 * U)
    np.testing.assert_array_equal(at(q, 5)[16:], q.ravel()[16:])
    np.testing.assert_array_equal(at(q, 0), q.ravel())
    pairs = (0, 8) if neox else (0, 1)
    angle = np.exp(3j) * complex(*q.ravel()[list(pairs)])
    np.testing.assert_allclose(at(q, 3)[list(pairs)], [angle.real, angle.imag], rtol=0, atol=20 * U)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_its_layer_and_position(value):
    run = Run(R, CacheConfig())
    run.read(np.arange(5))
    plain = run.graph.layers[1][0][2]
    run.graph.layers[1][0][2] = np.where(np.arange(plain.size).reshape(plain.shape) == 7, value,
                                         plain).astype(np.float32)  # fmt: skip
    with pytest.raises(NumericsError, match="layer 1, position 5: a key or value"):
        run.read(np.arange(3))
    assert run.store.length(run.sequence) == 5
    run.graph.layers[1][0][2] = plain
    calm = Run(reference.create(), CacheConfig())
    calm.read(np.arange(5))
    np.testing.assert_array_equal(run.read(np.arange(3)), calm.read(np.arange(3)))


def test_a_run_can_be_cancelled():
    run = Run(R, CacheConfig())
    step = run.store.begin([(run.sequence, np.zeros(3, np.int32))], np.zeros(1, np.int32))
    asked = []
    step.cancelled = lambda: len(asked) > 0 or asked.append(1)
    with pytest.raises(CancelledError):
        R.run(run.graph, step)
    run.store.abort()
    assert run.read(np.arange(3)).shape == (3, run.graph.vocabulary)


def test_plan_and_run():
    backend = reference.create()
    formats = CacheFormats("f16", "bf16", "f16", "f32")
    backend.prepare([LayerShape(1, 1, 4, 4)], [formats])
    assert "reference" in backend.plan[0]
    assert "bf16" in backend.plan[1]
    assert backend.run(Graph(lambda step: step.n_rows), plain_step(6)) == 6
