"""Products with GGUF blocks in Triton's interpreter, beside the gguf package in float64."""

from __future__ import annotations

from importlib import import_module

import gguf
import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the GPU's compiler is not installed")
torch = pytest.importorskip("torch", reason="the GPU's tensors are not installed")

matvec = import_module("pykv.kernels.matvec_triton").matvec
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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", TYPES)
def test_products_are_those_of_the_gguf_package(name, rows):
    module, n_out, n = launch.module(name), 19, 768
    data = blocks_of(name, n_out, n, len(name))
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(over="ignore"):
        weights = gguf.quants.dequantize(data, kind).reshape(n_out, n).astype(np.float64)
    x = np.random.default_rng(2).standard_normal((rows, n)).astype(np.float32)
    add = np.random.default_rng(3).standard_normal((rows, n_out)).astype(np.float32)
    out = torch.full((rows, n_out + 5), -7.0)
    table = torch.tensor(MXFP4 if name == "mxfp4" else IQ4, dtype=torch.float32)
    padded = torch.zeros(rows, n_out + 5)
    padded[:, :n_out] = torch.from_numpy(add)
    matvec[(-(-n_out // launch.WEIGHT_ROWS),)](
        torch.from_numpy(data), torch.from_numpy(x), out, padded, table, data.shape[1],
        n // module.BLOCK_LEN, n_out, n, n_out + 5, **launch.product(name, rows, add=True),
    )  # fmt: skip
    found = out.numpy()
    assert (found[:, n_out:] == -7).all()
    exact = x.astype(np.float64) @ weights.T + add
    # float32: two roundings in a value, one in a product, and n sums; K types subtract a minimum
    size = np.abs(x).astype(np.float64) @ np.abs(weights).T + np.abs(add)
    if name in ("q2_k", "q4_k", "q5_k", "q4_1", "q5_1"):
        size += np.abs(x).sum(1, keepdims=True) * np.abs(weights).max(1) * 4
    assert (np.abs(found[:, :n_out] - exact) <= size * (n + 4) * 2.0**-24).all()
