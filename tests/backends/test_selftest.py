"""The self-test: right kernels pass it, and whatever is wrong with one makes it refuse."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.backends import selftest
from pykv.backends.base import LayerShape
from pykv.cache.pages import HostMemory
from pykv.cache.store import Store
from pykv.config import CacheConfig
from pykv.errors import NumericsError
from pykv.registry import find

SHAPE = LayerShape(3, 1, 64, 64)


@pytest.fixture
def check(make_cpu):
    """check(type_k, type_v, shape) runs the test on fresh caches, fresh bytes being NaN."""

    def run(type_k, type_v=None, shape=SHAPE, **settings):
        config = CacheConfig(type_k, type_v or type_k, residual=0, **settings)
        backend, store = make_cpu(), Store([shape], config, 256, memory=HostMemory(255))
        backend.prepare([shape], store.formats)
        selftest.check(backend, store, shape, store.formats[0])

    return run


@pytest.mark.parametrize(
    ("type_k", "type_v", "group"),
    [
        ("q8_0", "q8_0", 4),
        ("q4_0", "q4_0", 3),
        ("kivi2", "kivi2", 3),
        ("fp8_e4m3", "tq4", 3),
        pytest.param("tq4", "fp8_e4m3", 3, marks=pytest.mark.slow),
    ],
)
def test_right_kernels_pass(check, type_k, type_v, group):
    check(type_k, type_v, LayerShape(group, 1, 64, 64))


@pytest.mark.parametrize("shape", [LayerShape(1, 1, 40, 40), LayerShape(9, 1, 80, 64)])
@pytest.mark.parametrize("sinks", [0, 64])
def test_heads_of_other_widths_and_groups(check, shape, sinks):
    check("q4_0", "q4_0", shape, sinks=sinks)


def test_another_type_of_the_tail(check):
    check("f16", "bf16", LayerShape(2, 1, 64, 64), tail_type="f32")


@pytest.mark.slow
def test_codes_made_from_another_type_of_the_tail(check):
    check("q4_0", tail_type="bf16")


def test_keys_that_are_turned_when_read(check):
    check("kivi2", "q4_0", position="read")


def other_values(factor):
    def patch(right):
        return lambda *args: right(*args) * np.float32(factor)

    return patch


def other_codes(right):
    def quantize(*args):
        codes, parameters = right(*args)
        return codes ^ np.uint8(1), parameters

    return quantize


@pytest.mark.parametrize("type_v", ["q4_0", "f16"])
@pytest.mark.parametrize("factor", [1.002, -1, 0, np.nan])
def test_pages_that_mean_other_values_are_refused(check, monkeypatch, factor, type_v):
    """The reference reads what the kernels read, and takes it for something else."""
    format_ = type(find("formats", "q4_0", "").FORMAT)
    monkeypatch.setattr(format_, "dequantize", other_values(factor)(format_.dequantize))
    with pytest.raises(NumericsError) as refused:
        check("q4_0", type_v)
    sentence = str(refused.value)
    for part in (f"q4_0 keys, {type_v} values", "64", "off the reference's", "another cache"):
        assert part in sentence


@pytest.mark.parametrize(
    ("type_k", "type_v", "position"), [("q4_0", "f16", "write"), ("kivi2", "q4_0", "read")]
)
def test_an_encoder_that_takes_other_codes_is_refused(check, monkeypatch, type_k, type_v, position):
    """Only the page that each backend has encoded for itself differs."""
    format_ = type(find("formats", "q4_0", "").FORMAT)
    monkeypatch.setattr(format_, "quantize", other_codes(format_.quantize))
    with pytest.raises(NumericsError, match="and 2e-02 is allowed"):
        check(type_k, type_v, position=position)


def test_another_matrix_is_refused(check, monkeypatch):
    """A transform's kernel form that is not the transform."""
    from pykv.backends import page_maps

    real = page_maps._filled
    monkeypatch.setattr(page_maps, "_filled", lambda m: np.ascontiguousarray(real(m)[:, ::-1]))
    with pytest.raises(NumericsError, match="kernels for q4_0 keys"):
        check("q4_0")


@pytest.mark.parametrize("kernel", ["attend", "prompt", "combine"])
def test_each_kernel_shows(check, make_cpu, monkeypatch, kernel):
    """One kernel that is never run leaves what lay there before."""
    from pykv.backends.cpu import CpuBackend

    real = CpuBackend.emit

    def emit(self, name, tasks, *params, **more):
        return real(self, name, 0 if name.startswith(kernel) else tasks, *params, **more)

    monkeypatch.setattr(CpuBackend, "emit", emit)
    with pytest.raises(NumericsError):
        check("q4_0")


def test_no_program_and_no_weight_is_left_behind(make_cpu):
    backend = make_cpu()
    store = Store([SHAPE], CacheConfig("q4_0", "q4_0", residual=0), 256)
    backend.prepare([SHAPE], store.formats)
    selftest.check(backend, store, SHAPE, store.formats[0])
    assert backend._programs == {}
    assert backend._weights == []


def test_one_head_of_a_layer_has_its_group_and_widths():
    assert selftest.one_head(LayerShape(32, 8, 128, 96, 512)) == LayerShape(4, 1, 128, 96)
