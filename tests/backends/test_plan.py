"""What is chosen at load, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from verbs import Source, source, values_of

from pykv.backends import plan
from pykv.backends.base import CacheFormats
from pykv.errors import UnsupportedError

RNG = np.random.default_rng(4)


def test_formats_by_role():
    assert plan.has_format("f16", "cache")
    assert plan.has_format("q6_k", "weight")
    assert not plan.has_format("q6_k", "cache")
    assert not plan.has_format("tq2_0", "weight")


@pytest.mark.parametrize("type_", ["f32", "f16", "bf16", "q8_0", "q4_1"])
def test_decode_gives_the_values_of_the_gguf_package(type_):
    tensor = source(type_, RNG.normal(0, 1, (3, 64)))
    values = plan.decode(tensor)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, values_of(tensor))


def test_decode_of_a_type_that_only_the_gguf_package_knows():
    data = RNG.integers(0, 256, (3, 2 * 82), dtype=np.uint8)  # iq2_s: a half, then codes
    data.reshape(3, 2, 82)[..., :2] = np.array([0.01], "<f2").view(np.uint8)
    tensor = Source("blk.0.ffn_up.weight", (3, 512), "iq2_s", data)
    np.testing.assert_array_equal(plan.decode(tensor), values_of(tensor))


@pytest.mark.parametrize("type_", ["q9_9", "q8_k"])
def test_a_type_that_nobody_decodes_is_refused_in_one_sentence(type_):
    tensor = Source("a.weight", (1, 256), type_, np.zeros((1, 292), np.uint8))
    with pytest.raises(UnsupportedError, match=f"^a.weight has type {type_}, which .*requantise"):
        plan.decode(tensor)


def test_weights_are_read_where_they_lie_or_the_warning_says_what_decoding_costs(caplog):
    assert plan.cpu_weight_module(source("q8_0", np.ones((2, 64)))).BLOCK_BYTES == 34
    assert caplog.text == ""
    assert plan.cpu_weight_module(source("f16", np.ones((1024, 80)), "x.weight")) is None
    assert "x.weight has rows of 80 values, no multiple of 32" in caplog.text
    assert "0.3 MiB" in caplog.text
    assert plan.cpu_weight_module(Source("y", (4, 256), "tq2_0", np.zeros((4, 66), "u1"))) is None
    assert "y has type tq2_0, for which there is no CPU kernel" in caplog.text


def test_cache_formats_need_kernels():
    modules = plan.cpu_cache_modules(CacheFormats("f32", "bf16", "f16", "f16"))
    assert set(modules) == {"f32", "bf16", "f16"}
    with pytest.raises(UnsupportedError, match=r"^cache type q4_k has no CPU kernels; use .*type$"):
        plan.cpu_cache_modules(CacheFormats("q4_k", "f16", "f16", "f16"))


def test_the_module_of_a_type():
    assert plan.cpu_module("q5_0").__name__ == "pykv.kernels.q5_0_numba"
    assert plan.cpu_module("tq2_0") is None
