"""Byte products: every weight type that has them, against gguf-py in float64."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from verbs import result

from pykv import registry
from pykv.backends import cpu
from pykv.kernels import jit_numba

TYPES = ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k")
U = 2.0**-24

pytestmark = pytest.mark.skipif(
    not jit_numba.has_features("avx512f", "avx512bw", "avx512vnni"),
    reason="this CPU has no AVX-512 VNNI: these kernels are never chosen on it",
)


@pytest.fixture(autouse=True, scope="module")
def _kernel_folder():
    """All kernels here are the product's, and stay in the user's folder."""


@pytest.fixture(scope="module")
def backend():
    backend = cpu.create(threads=2)
    yield backend
    backend.close()


def random_tensor(type_, n_rows, n_cols, seed=0):
    """Any codes, scales between 0.001 and 1; and its values in f64."""
    format_ = registry.find("formats", type_, "weight type").FORMAT
    rng = np.random.default_rng(seed)
    rows = rng.integers(
        0, 256, (n_rows, n_cols // format_.block_len * format_.block_bytes), dtype=np.uint8
    )
    blocks = rows.view(format_.layout)
    for name in format_.layout.names:
        if blocks[name].dtype.kind == "f":
            blocks[name] = rng.uniform(0.001, 1, blocks[name].shape)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type_.upper()])
    tensor = SimpleNamespace(name="w", shape=(n_rows, n_cols), type=type_, data=rows)
    return tensor, values.astype(np.float64)


def bound(x, w, type_):
    """What y = x @ w.T may be off by.

    An input is off by half a unit of its integers: max|x| of its 32 neighbours over RANGE, halved.
    A code that stands for a weight beside a minimum or zero point is larger than the weight: the
    span of the values, at most twice their largest magnitude plus the minimum, bounds its effect;
    4 times the largest weight of the row is more than that for all these types. The float32 sums
    (scales, offsets, blocks) add n roundings of the sum of magnitudes, Higham section 3.1.
    """
    steps = 2.0**20 if type_ == "q8_0" else 2.0**22
    x, w = x.astype(np.float64), np.abs(w)
    tops = np.abs(x).reshape(len(x), -1, 32).max(-1)
    largest = 4 * w.max(-1)
    digits = 32 * (tops.sum(-1) / steps / 2)[:, None] * largest
    n = x.shape[1] // 32 * 4 + 16
    sums = n * U * (tops.sum(-1) * 32)[:, None] * largest
    return digits + sums


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(("n_rows", "n_cols", "batch"), [(1, 256, 1), (7, 768, 3), (130, 1536, 2)])
def test_products(backend, type_, n_rows, n_cols, batch):
    assert backend.kernels.vnni_inputs(type_) is not None
    tensor, w = random_tensor(type_, n_rows, n_cols)
    x = np.random.default_rng(1).normal(size=(batch, n_cols)).astype(np.float32)
    x[0, 3] = 40  # an outlier coarsens its neighbours' integers
    y = result(backend, lambda d, _, x: d.linear(x, d.load(tensor)), x)
    assert (np.abs(y - x.astype(np.float64) @ w.T) <= bound(x, w, type_)).all()
    # and as near as float32 sums are, on the whole
    size = np.abs(x.astype(np.float64)) @ np.abs(w).T
    assert np.sqrt(np.mean(((y - x @ w.T) / size) ** 2)) < 1e-6


@pytest.mark.parametrize("type_", ["q4_0", "q4_1", "q5_0", "q8_0"])
@pytest.mark.parametrize("n_cols", [32, 64, 96, 160, 576])
def test_a_last_group_that_is_not_full(backend, type_, n_cols):
    tensor, w = random_tensor(type_, 5, n_cols)
    # what lies behind the weights must not matter
    fenced = np.full(tensor.data.nbytes + 256, 0xFF, np.uint8)
    fenced[: tensor.data.nbytes] = tensor.data.reshape(-1)
    tensor.data = fenced[: tensor.data.nbytes].reshape(tensor.data.shape)
    x = np.random.default_rng(1).normal(size=(1, n_cols)).astype(np.float32)
    y = result(backend, lambda d, _, x: d.linear(x, d.load(tensor)), x)
    assert (np.abs(y - x.astype(np.float64) @ w.T) <= bound(x, w, type_)).all()


@pytest.mark.parametrize("type_", TYPES)
def test_odd_inputs(backend, type_):
    tensor, w = random_tensor(type_, 5, 256)

    def linear(x):
        return result(backend, lambda d, _, x: d.linear(x, d.load(tensor)), x)

    assert (linear(np.zeros((1, 256), np.float32)) == 0).all()
    tiny = np.full((1, 256), 1e-38, np.float32)
    assert np.abs(linear(tiny)).max() <= np.abs(tiny.astype(np.float64) @ w.T).max() + 1e-30 * 1e4
    huge = np.random.default_rng(1).normal(size=(1, 256)).astype(np.float32) * np.float32(1e30)
    assert (np.abs(linear(huge) - huge.astype(np.float64) @ w.T) <= bound(huge, w, type_)).all()
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((1, 256), np.float32)
        x[0, 100] = bad
        assert np.isnan(linear(x)).all()


@pytest.mark.parametrize("type_", TYPES)
def test_rows_do_not_depend_on_the_batch(backend, type_):
    tensor, _ = random_tensor(type_, 33, 512)
    x = np.random.default_rng(1).normal(size=(5, 512)).astype(np.float32)

    def linear(x):
        return result(backend, lambda d, _, x: d.linear(x, d.load(tensor)), x)

    together = linear(x)
    for i in range(5):
        assert (linear(x[i : i + 1])[0] == together[i]).all()
