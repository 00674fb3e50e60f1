"""The GPU backend's verbs in Triton's interpreter, and a small model beside the reference."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from verbs import Run, U, plain_step, result, source, values_of  # noqa: E402

from pykv.backends import cuda, reference  # noqa: E402
from pykv.backends.base import CacheFormats, LayerShape  # noqa: E402
from pykv.backends.cuda_attention import CudaAttention  # noqa: E402
from pykv.config import CacheConfig  # noqa: E402
from pykv.errors import CancelledError, NumericsError, UnsupportedError  # noqa: E402

TOKENS = np.random.default_rng(1).integers(0, 61, 80).astype(np.int32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Verbs:
    """A backend whose weights are there."""

    def __init__(self, *tensors, **settings):
        self.backend = cuda.create(device="cpu", **settings)
        self.weights = [self.backend.load(t) for t in tensors]
        self.backend.prepare([], [])

    def result(self, verb, *arrays, step=None):
        return result(self.backend, verb, *arrays, step=step)


def assert_product(y, x, w, add=0.0, unit=U):
    """y = x @ w.T + add: n roundings of float32 sums, and `unit` for each factor."""
    exact = x.astype(np.float64) @ w.T + add
    size = np.abs(x.astype(np.float64)) @ np.abs(w).T + np.abs(add)
    assert (np.abs(y - exact) <= ((x.shape[1] + 3) * U + 2 * unit) * size).all()


@pytest.mark.parametrize("type_", ["f32", "q4_0", "bf16"])
@pytest.mark.parametrize(("rows", "deterministic"), [(1, False), (3, True), (9, True), (9, False)])
def test_linear(type_, rows, deterministic):
    tensor, x, add = source(type_, normal(70, 96)), normal(rows, 96), normal(rows, 70, seed=1)
    verbs = Verbs(tensor, deterministic=deterministic)
    y = verbs.result(lambda d, _, x, a: d.linear(x, verbs.weights[0], a), x, add)
    # more rows than eight go through float16
    unit = 2.0**-11 if rows == 9 and not deterministic else U
    assert_product(y, x, values_of(tensor), add, unit)


@pytest.mark.parametrize("size", [1, 1e6])
@pytest.mark.parametrize("scale", [1e-7, 1e6])
def test_prompts_inputs_and_weights_of_any_size(scale, size, monkeypatch):
    """Inputs are scaled row by row, and weights beyond float16 stay float32; panels are small."""
    monkeypatch.setattr(cuda, "PANEL_BYTES", 96 * 4 * 20)
    x = normal(9, 96) * scale * 10.0 ** np.arange(-4, 5)[:, None]
    x[4] = 0
    tensor = source("f32", normal(50, 96) * size)
    verbs = Verbs(tensor)
    y = verbs.result(lambda d, _, x: d.linear(x, verbs.weights[0]), x)
    assert_product(y, x, values_of(tensor), unit=2.0**-11)
    assert verbs.weights[0].panel_type == (torch.float32 if size > 1 else torch.float16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [2, 9])
def test_norms_products_and_gates_that_wait_for_each_other(rows, deterministic):
    """q, k and v of a norm; a gate; a norm of an output; each as if it ran at once."""
    tensors = [source("q8_0", normal(n, 64, seed=n) / 8) for n in (64, 32, 64, 64)]
    tensors.append(source("f32", normal(64, 32) / 8))
    w, head = source("f32", normal(64)), source("f32", normal(32))

    def forward(d, _, x):
        a = d.rms_norm(x, d.load_vector(w), 1e-5)
        q, k, v = (d.linear(a, weight) for weight in weights[:3])
        gated = d.swiglu(q, d.linear(a, weights[3]))
        heads = d.rms_norm(q.reshape(-1, 2, 32), d.load_vector(head), 1e-5)
        x = d.add(x, d.rms_norm(gated, d.load_vector(w), 1e-5))
        x = d.add(x, heads.reshape(-1, 64))
        return d.add(d.add(x, d.geglu(q, v)), d.linear(k, weights[4], x))

    x = normal(rows, 64)
    verbs = Verbs(*tensors, deterministic=deterministic)
    weights = verbs.weights
    got = verbs.result(forward, x)
    weights = [reference.create().load(t) for t in tensors]
    expected = result(reference.create(), forward, x)
    assert np.abs(expected).max() < 32
    # some twenty float32 operations on numbers below 32; in prompts float16 inputs
    bound = 100 * U if rows == 2 or deterministic else 20 * 2.0**-11
    np.testing.assert_allclose(got, expected, rtol=0, atol=32 * bound)


@pytest.mark.parametrize("rows", [1, 9])
def test_exact_verbs(rows):
    x, y, b = normal(rows, 33), normal(rows, 33, seed=1), source("f32", normal(33))
    tensor, tokens = source("q8_0", normal(10, 96)), np.arange(rows) % 10
    verbs = Verbs(tensor)
    outputs = [rows - 1, 0, rows // 2]
    step = plain_step(rows, tokens, outputs)
    for verb in (
        lambda d, s, x, y: d.add(x, y),
        lambda d, s, x, y: d.bias(x, d.load_vector(b)),
        lambda d, s, x, y: d.scale(x, 0.3),
        lambda d, s, x, y: d.take_rows(x, s),
    ):
        expected = result(reference.create(), verb, x, y, step=step)
        np.testing.assert_array_equal(verbs.result(verb, x, y, step=step), expected)
    got = verbs.result(lambda d, s, x: d.embed(verbs.weights[0], s), x, step=step)
    np.testing.assert_array_equal(got, values_of(tensor)[tokens])
    got = verbs.result(lambda d, s, x: d.softcap(x, 2.0), 10 * x, step=step)
    np.testing.assert_allclose(got, 2 * np.tanh(5 * x.astype(np.float64)), rtol=1e-6, atol=1e-6)


def test_a_weight_without_kernels_is_decoded(caplog):
    with caplog.at_level(logging.WARNING, "pykv"):
        tensor = source("q8_0", normal(8, 64), "blk.0.x")
        tensor.type = "q8_k"
        tensor.data = np.zeros((8, 292), np.uint8)
        with pytest.raises(UnsupportedError):
            cuda.create(device="cpu").load(tensor)
        assert "blk.0.x has type q8_k, for which there is no GPU kernel" in caplog.text


def test_channels_are_cut_out_and_joined():
    x, y = normal(3, 2, 24), normal(3, 2, 8, seed=1)
    verbs = Verbs()
    cut = verbs.result(lambda d, _, x: d.columns(x, 5, 20), x)
    np.testing.assert_array_equal(cut, x[..., 5:20])
    joined = verbs.result(lambda d, _, x, y: d.concat(x, y), x, y)
    np.testing.assert_array_equal(joined, np.concatenate([x, y], -1))


def test_matrices_of_heads_are_refused():
    with pytest.raises(UnsupportedError, match="matrix for each head, .*use --device cpu"):
        cuda.create(device="cpu").load_heads(source("f32", normal(2, 32, 32), "blk.0.attn_k_b"))


def test_a_cache_type_without_kernels_is_refused(monkeypatch):
    backend, formats = cuda.create(device="cpu"), CacheFormats("q4_0", "q4_k", "f16", "f16")
    with pytest.raises(UnsupportedError, match="cache type q4_k has no GPU kernels; use --device"):
        backend.prepare([LayerShape(1, 1, 32, 32)], [formats])


def test_a_model_reads_and_decodes_like_the_reference():
    config = CacheConfig("f32", "f32", sinks=4)
    expected = Run(reference.create(), config).read(TOKENS[:15])
    run = Run(cuda.create(device="cpu"), config)
    # a prompt's products take factors in float16, whose roundings two layers pass on about tenfold
    np.testing.assert_allclose(run.read(TOKENS[:12]), expected[:12], rtol=0, atol=0.1)
    np.testing.assert_allclose(run.read(TOKENS[12:15]), expected[12:], rtol=0, atol=0.1)
    exact = Run(cuda.create(device="cpu", deterministic=True), config)
    whole = exact.read(TOKENS[:15])
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
    # the same bits however the batches are cut
    again = Run(cuda.create(device="cpu", deterministic=True), config)
    parts = again.read(TOKENS[:11]), again.read(TOKENS[11:15], 3)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_run_that_breaks_off_leaves_the_backend_usable():
    run = Run(cuda.create(device="cpu"), CacheConfig())
    first = run.read(TOKENS[:5])
    step = run.store.begin([(run.sequence, TOKENS[5:6])], np.zeros(1, np.int32))
    step.cancelled = lambda: True
    with pytest.raises(CancelledError):
        run.backend.run(run.graph, step)
    run.store.abort()
    bad = run.graph.norm.clone()
    run.graph.norm[3] = float("nan")
    with np.errstate(all="ignore"), pytest.raises(NumericsError, match="layer 0, position 5"):
        run.step([(run.sequence, TOKENS[5:7])])
    run.graph.norm = bad
    run.store.free(run.sequence)
    run.sequence = run.store.new_sequence()
    np.testing.assert_array_equal(run.read(TOKENS[:5]), first)


def test_rows_of_next_to_nothing_stay_finite():
    x = np.full((9, 96), 2.0**-120, np.float32)
    verbs = Verbs(source("f32", normal(50, 96)))
    y = verbs.result(lambda d, _, x: d.linear(x, verbs.weights[0]), x)
    assert np.abs(y).max() < 1e-30


@pytest.mark.parametrize("heads", [1, 2])
def test_a_mapped_row_does_not_depend_on_those_beside_it(heads):
    attention = object.__new__(CudaAttention)
    attention._deterministic = True
    x, matrix = torch.from_numpy(normal(19, 4, 96)), torch.from_numpy(normal(heads, 96, 40))
    turned = attention._turned(x, matrix)
    exact = np.einsum("tghd,gdr->tghr", x.double().reshape(19, heads, -1, 96), matrix.double())
    np.testing.assert_allclose(turned, exact.reshape(19, 4, 40), rtol=0, atol=1e-3)
    for first, count in ((0, 1), (7, 9), (18, 1)):
        part = slice(first, first + count)
        np.testing.assert_array_equal(attention._turned(x[part], matrix), turned[part])
