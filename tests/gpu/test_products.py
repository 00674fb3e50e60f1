"""Products with every weight type on a GPU, beside the gguf package in float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from test_matvec_triton import TYPES, normal, size_of, weight_of  # noqa: E402
from verbs import Source, plain_step, result  # noqa: E402

from pykv.backends import cuda  # noqa: E402

pytestmark = pytest.mark.gpu

N_OUT, N_IN = 70, 768


@pytest.mark.parametrize("name", TYPES)
def test_products(device, name):
    backend = cuda.create(device=device, graphs=False)
    made, values = weight_of(name, N_OUT, N_IN)
    weight = backend.load(Source("w", (N_OUT, N_IN), name, made.data.numpy()))
    backend.prepare([], [])
    for rows in (1, 3, 8, 20):
        x, add = normal(rows, N_IN), normal(rows, N_OUT, seed=3)
        y = result(
            backend, lambda d, _, x, add: d.linear(x, weight, add), x, add, step=plain_step(rows)
        )
        exact = x.astype(np.float64) @ values.T + add
        size = size_of(name, x, values) + np.abs(add)
        bound = size * (N_IN + 4) * 2.0**-24
        if rows > 8:
            # through float16, which rounds both factors by 2**-11 of themselves and by 2**-25 at
            # least, inputs as a power of two makes them 512 and more; sums of a matrix unit
            # lose 2**-22
            small = np.abs(x).sum(1, keepdims=True) + np.abs(values).sum(1) * np.abs(x).max() / 512
            bound = bound * 4 + size * 2.1 * 2.0**-11 + small * 2.0**-25
        assert (np.abs(y - exact) <= bound).all(), rows
