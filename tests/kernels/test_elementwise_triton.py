"""Norms, activations and sums of the GPU in Triton's interpreter, beside NumPy in float64."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

kernels = import_module("pykv.kernels.elementwise_triton")
ROUNDING = 2.0**-24  # of a float32 operation


def normal(*shape, seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy((rng.standard_normal(shape) * size).astype(np.float32))


def run(kernel, *inputs, **settings):
    """The kernel's output, of the first input's shape, with what lies behind it unharmed."""
    memory = torch.full((inputs[0].numel() + 8,), -7.0)
    out = memory[: inputs[0].numel()].view(inputs[0].shape)
    kernel(*inputs, out=out, **settings)
    assert (memory[inputs[0].numel() :] == -7).all()
    return out.numpy().astype(np.float64)


def f64(x):
    return x.numpy().astype(np.float64)


@pytest.mark.parametrize(("shape", "plus"), [((3, 576), False), ((2, 3, 80), True)])
def test_rms_norm(shape, plus):
    x, weight, more = normal(*shape), normal(shape[-1], seed=1), normal(*shape, seed=2)
    added = more if plus else None
    found = run(kernels.rms_norm, x, weight, eps=1e-5, add=added)
    exact = f64(x) / np.sqrt((f64(x) ** 2).mean(-1, keepdims=True) + 1e-5) * f64(weight)
    bound = np.abs(exact) * (shape[-1] / 2 + 8) * ROUNDING
    if plus:
        exact, bound = exact + f64(more), bound + (np.abs(exact) + np.abs(f64(more))) * ROUNDING
    assert (np.abs(found - exact) <= bound).all()


def test_a_norms_bits_do_not_depend_on_the_other_rows():
    x, weight = normal(9, 200), normal(200, seed=1)
    whole = run(kernels.rms_norm, x, weight, eps=1e-6)
    for row in (0, 4, 8):
        np.testing.assert_array_equal(
            run(kernels.rms_norm, x[row : row + 1].contiguous(), weight, eps=1e-6)[0], whole[row]
        )


def test_sums_and_products_are_rounded_once():
    x, y, weight = normal(5, 300), normal(5, 300, seed=1), normal(300, seed=2)
    np.testing.assert_array_equal(run(kernels.add, x, y), (x.numpy() + y.numpy()))
    np.testing.assert_array_equal(run(kernels.bias, x, weight), x.numpy() + weight.numpy())
    factor = np.float32(0.7)
    np.testing.assert_array_equal(run(kernels.scale, x, factor=float(factor)), x.numpy() * factor)


def test_softcap():
    x = torch.cat([normal(200, size=40), torch.tensor([0.0, 1e6, -1e6, 3e38])])
    exact = 30 * np.tanh(f64(x) / 30)
    # exp of a value below 1 in size is off by 2 units, and its share of the sum by as many
    assert np.abs(run(kernels.softcap, x, limit=30.0) - exact).max() <= 30 * 16 * ROUNDING


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_gates(act):
    x = torch.cat([normal(500, size=5), torch.tensor([0.0, 200.0, -200.0, 40.0, -40.0])])
    y = normal(505, seed=1)
    u = f64(x) if act == "silu" else 2 * np.sqrt(2 / np.pi) * (f64(x) + 0.044715 * f64(x) ** 3)
    exact = f64(x) / (1 + np.exp(np.minimum(-u, 700))) * f64(y)
    # exp's argument is off by 4 roundings of it, so that its value is by as many parts
    bound = np.abs(exact) * (8 + 4 * np.abs(u)) * ROUNDING + np.abs(f64(y)) * 2.0**-126
    assert (np.abs(run(kernels.gate, x, y, act=act) - exact) <= bound).all()
