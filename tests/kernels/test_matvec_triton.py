"""Products with GGUF blocks in Triton's interpreter, beside the gguf package in float64."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

matvec = import_module("pykv.kernels.matvec_triton")
launch = import_module("pykv.kernels.launch_triton")
TYPES = [
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k",
    "q6_k", "iq4_nl", "iq4_xs", "mxfp4",
]  # fmt: skip
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# where a block has float16 numbers, whose random bits may be infinite
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip


def blocks_of(name, rows, n, seed):
    """Random blocks u8 [rows, bytes] of every code, with scales of all sizes."""
    module, rng = launch.module(name), np.random.default_rng(seed)
    count = n // module.BLOCK_LEN
    if name in ("f32", "f16", "bf16"):
        x = rng.standard_normal((rows, n)).astype(np.float32)
        if name == "f32":
            return x.view(np.uint8)
        if name == "f16":
            return x.astype(np.float16).view(np.uint8)
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    data = rng.integers(0, 256, (rows, count, module.BLOCK_BYTES)).astype(np.uint8)
    for at in HALVES.get(name, ()):
        scales = rng.standard_normal((rows, count)) * 2.0 ** rng.integers(-14, 4, (rows, count))
        data[:, :, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(rows, count, 2)
    if name == "mxfp4":
        data[:, :, 0] = rng.integers(110, 140, (rows, count))
        data[0, 0, 0], data[1, 0, 0] = 0, 1
    return data.reshape(rows, -1)


def weight_of(name, n_out, n_in, seed=0):
    """A weight as the backend has it, and its values in float64."""
    data = blocks_of(name, n_out, n_in, seed + len(name))
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(over="ignore"):
        values = gguf.quants.dequantize(data, kind).reshape(n_out, n_in).astype(np.float64)
    table = torch.tensor(MXFP4 if name == "mxfp4" else IQ4, dtype=torch.float32)
    return SimpleNamespace(
        data=torch.from_numpy(data), n_out=n_out, n_in=n_in, row_bytes=data.shape[1], type=name,
        table=table,
    ), values  # fmt: skip


def normal(*shape, seed=2):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def size_of(name, x, values):
    """What an error is measured by: the sum of the parts' magnitudes.

    float32: two roundings in a value, one in a product, and n sums; some types subtract a minimum.
    """
    size = np.abs(x).astype(np.float64) @ np.abs(values).T
    if name in ("q2_k", "q4_k", "q5_k", "q4_1", "q5_1"):
        size += np.abs(x).sum(1, keepdims=True) * np.abs(values).max(1) * 4
    return size


def normed(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_the_gguf_package(name):
    # more blocks than are read at a time for some, fewer for others
    rows, n_out, n = 1 + TYPES.index(name) % 3, 19, 768 if name in ("f32", "q6_k") else 512
    weight, values = weight_of(name, n_out, n)
    x, add = normal(rows, n), normal(rows, n_out, seed=3)
    out = torch.full((rows + 1, n_out), -7.0)
    matvec.products(torch.from_numpy(x), [weight], [out], torch.from_numpy(add))
    found = out.numpy()
    assert (found[rows:] == -7).all()
    exact = x.astype(np.float64) @ values.T + add
    size = size_of(name, x, values) + np.abs(add)
    assert (np.abs(found[:rows] - exact) <= size * (n + 4) * 2.0**-24).all()
    panel = torch.full((n_out + 1, n), -7.0)
    matvec.panel(weight, panel[:n_out])
    # the parts of a value: a scaled code, and a minimum of four times the largest value at most
    near = np.abs(panel[:n_out].numpy() - values)
    assert (near <= np.abs(values).max(1, keepdims=True) * 4 * 2.0**-23).all()
    assert (panel[n_out:] == -7).all()


TRIOS = [
    ("q4_0", "q4_0", "q4_0"),
    ("q4_k", "q4_k", "q6_k"),
    ("q8_0", "f16", "mxfp4"),
    ("q5_1",) * 2,
]


@pytest.mark.parametrize("names", TRIOS)
def test_several_weights_and_the_norm_before_them(names):
    rows, n = 3, 512
    counts = (70, 9, 64)[: len(names)]
    made = [
        weight_of(t, n_out, n, i) for i, (t, n_out) in enumerate(zip(names, counts, strict=True))
    ]
    x, norm_weight = normal(rows, n), normal(n, seed=4)
    outs = [torch.full((rows, n_out), -7.0) for n_out in counts]
    matvec.products(
        torch.from_numpy(x), [w for w, _ in made], outs, norm=(torch.from_numpy(norm_weight), 1e-5)
    )
    y = normed(x, norm_weight, 1e-5)
    for name, (_, values), out in zip(names, made, outs, strict=True):
        # as many roundings again for the norm, whose sum of squares has n
        bound = size_of(name, y, values) * (2 * n + 12) * 2.0**-24
        assert (np.abs(out.numpy() - y @ values.T) <= bound).all()


def act_of(name, x):
    if name == "silu":
        return x / (1 + np.exp(-x))
    return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("types", "act"), [(("q4_k", "q6_k"), "silu"), (("q4_1", "q4_1"), "gelu")])
def test_gated(types, act):
    rows, n, n_out = 2, 256, 37
    (gate, g), (up, u) = (weight_of(t, n_out, n, i) for i, t in enumerate(types))
    scale = np.float32(1 / np.abs(g).max() / 8)  # gates of a size where activations bend
    x, norm_weight = normal(rows, n), normal(n, seed=4) * scale
    out = torch.full((rows, n_out), -7.0)
    matvec.gated(torch.from_numpy(x), gate, up, out, act, (torch.from_numpy(norm_weight), 1e-6))
    y = normed(x, norm_weight, 1e-6)
    a, b = y @ g.T, y @ u.T
    share = (2 * n + 12) * 2.0**-24
    off_a, off_b = (size_of(t, y, v) * share for t, v in zip(types, (g, u), strict=True))
    # no activation is steeper than 1.2; its own roundings are a few of its value
    exact = act_of(act, a)
    bound = 1.2 * off_a * (np.abs(b) + off_b) + np.abs(exact) * (off_b + np.abs(b) * 2.0**-20)
    assert (np.abs(out.numpy() - exact * b) <= bound).all()


def test_a_rows_bits_do_not_depend_on_the_others():
    n, counts, names = 256, (40, 33), ("q4_0", "q4_k")
    weights = [weight_of(t, c, n)[0] for t, c in zip(names, counts, strict=True)]
    up = weight_of("q8_0", 40, n)[0]
    x, norm = torch.from_numpy(normal(10, n)), (torch.from_numpy(normal(n, seed=4)), 1e-6)

    def made(x):
        outs = [torch.full((len(x), c), -7.0) for c in (*counts, 40)]
        matvec.products(x, weights, outs[:2], norm=norm, deterministic=True)
        matvec.gated(x, weights[0], up, outs[2], "silu", deterministic=True)
        return outs

    whole = made(x)
    for first, last in ((0, 1), (2, 5), (1, 10)):
        for out, part in zip(whole, made(x[first:last].contiguous()), strict=True):
            assert torch.equal(out[first:last], part)


def test_panels_take_rows_and_say_what_is_too_large():
    weight, values = weight_of("q8_0", 50, 96)
    flag, half = torch.zeros(1, dtype=torch.int32), torch.zeros(7, 96, dtype=torch.float16)
    numbers = torch.tensor([3, 49, 0, 7, 7, 12, 48], dtype=torch.int32)
    matvec.panel(weight, half, numbers, flag=flag)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half.numpy(), values[numbers].astype(np.float16))
    assert int(flag) == 0
    matvec.panel(weight, half[:2], first=48)
    np.testing.assert_array_equal(half[:2].numpy(), values[48:].astype(np.float16))
    large, _ = weight_of("f32", 50, 96)
    large.data = torch.from_numpy(np.full((50, 96), 70_000, np.float32).view(np.uint8))
    matvec.panel(large, half, numbers, flag=flag)
    assert int(flag) == 1
    assert (half == 65504).all()


def test_rows_without_whole_blocks():
    weight, values = weight_of("f16", 5, 40)
    x, out = normal(2, 40), torch.zeros(2, 5)
    matvec.products(torch.from_numpy(x), [weight], [out])
    bound = size_of("f16", x, values) * 44 * 2.0**-24
    assert (np.abs(out.numpy() - x.astype(np.float64) @ values.T) <= bound).all()
