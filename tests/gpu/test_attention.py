"""Attention and encoding of every cache type on a GPU, through the store's oracle."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the GPU's compiler is not installed")
pytest.importorskip("torch", reason="the GPU's tensors are not installed")

from device_oracle import DeviceOracle  # noqa: E402
from page_oracle import Formats  # noqa: E402
from test_cuda_attention import conversation  # noqa: E402
from verbs import BackendOracle  # noqa: E402

from pykv.backends import cuda  # noqa: E402
from pykv.backends.base import LayerShape  # noqa: E402
from pykv.cache.layout import cache_types  # noqa: E402
from pykv.kernels import launch_triton  # noqa: E402

pytestmark = pytest.mark.gpu

TYPES, GROUPS, WIDTHS = cache_types(), (3, 4, 7), (64, 128)
# each type is once the keys' and once the values'
CASES = [
    (Formats(k, TYPES[(i * 3 + 5) % len(TYPES)], calibrated=True), WIDTHS[i % 2], GROUPS[i % 3])
    for i, k in enumerate(TYPES)
]
MORE = [
    (Formats("nuq4:outliers=1%", "nuq3:outliers=1%", calibrated=True), 128, 4),
    (Formats("kivi2", "q4_0", None, "none", "lowrank:20", position="read", calibrated=True), 40, 3),
    (Formats("q4_0", "kivi2", "bf16", "random", "random"), 80, 4),
]
NAMED = [
    pytest.param(*case, id=f"{case[0].page_k}-{case[0].page_v}-{case[1]}") for case in CASES + MORE
]
EXACT = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("kivi2", "kivi2")]


def converse(oracle, device, formats, d, group):
    # windows and counts that are multiples of 16 alike: both layers have the same kernels
    shapes = [LayerShape(2 * group, 2, d, d), LayerShape(2 * group, 2, d, d, window=80)]
    backend = cuda.create(device=device, graphs=False)
    o = oracle(formats.config(4, 0), shapes, 1000, d, backend, formats.calibrated)
    backend.prepare(shapes, o.store.formats)
    conversation(o)


@pytest.mark.parametrize(("formats", "d", "group"), NAMED)
def test_every_type(device, formats, d, group):
    if device == "cpu" and "bf16" in formats:
        pytest.skip("the interpreter multiplies bfloat16 as if it were whole numbers")
    converse(DeviceOracle, device, formats, d, group)


@pytest.mark.parametrize("types", EXACT)
def test_float32_operands_keep_the_designs_bound(device, types, monkeypatch):
    exact = launch_triton.operand(("f32",))
    monkeypatch.setattr(launch_triton, "operand", lambda types: exact)
    monkeypatch.setattr(DeviceOracle, "bound", BackendOracle.bound)
    converse(DeviceOracle, device, Formats(*types), 64, 4)
