"""The kernels by name."""

from __future__ import annotations

import pytest

from pykv.backends.base import CacheFormats, LayerShape
from pykv.backends.kernels import Kernels, cache_key, tiles


@pytest.mark.parametrize("group", range(1, 20))
def test_tiles_cover_each_head_once_and_hold_four_at_most(group):
    heads = [
        head
        for size, first, count in tiles(group)
        for tile in range(count)
        for head in range(first + tile * size, first + (tile + 1) * size)
    ]
    assert heads == list(range(group))
    assert all(1 <= size <= 4 for size, _, _ in tiles(group))


def test_a_key_tells_every_combination_of_formats_apart():
    names = ("f16", "f32", "bf16")
    keys = {cache_key(CacheFormats(a, b, c, d))
            for a in names for b in names for c in names for d in names}  # fmt: skip
    assert len(keys) == 81


def test_a_kernel_has_one_address_and_others_have_others(kernels):
    names = ["rms_norm", "add", "matvec_q8_0_r1", "matvec_f16_r1", "panel_f16"]
    addresses = [kernels[n] for n in names]
    assert len(set(addresses)) == len(names)
    assert [kernels[n] for n in names] == addresses


def test_a_weight_type_without_kernels_is_no_kernel(kernels):
    with pytest.raises(KeyError, match="tq2_0"):
        kernels["matvec_tq2_0_r1"]
    assert kernels.block_len("q8_0") == 32
    assert kernels.block_len("q6_k") == 256


def test_what_a_cache_needs_is_loaded_before_it_is_asked_for(kernels):
    formats = CacheFormats("q4_0", "q4_0", "f16", "f16")
    kernels.load_cache([LayerShape(9, 1, 32, 32)], [formats])
    key = cache_key(formats)
    loaded = set(kernels._kernels)
    assert {f"attend_{key}_g4", f"attend_{key}_g1", f"prompt_{key}", "combine",
            "write_f16_f16", "encode_k_f16_q4_0", "encode_v_f16_q4_0"} <= loaded  # fmt: skip
    assert any(key in line for line in kernels.cache_plan)


def test_progress_is_told_each_kernel_that_is_compiled_and_none_that_is_loaded(tmp_path):
    from pykv.kernels import jit_numba

    before = jit_numba.cache_folder()
    try:
        told = []
        first = Kernels(told.append, tmp_path)
        _ = first["bias"]
        assert told[-1] == "bias"
        assert len(set(told)) == len(told) == 3  # the driver's two, and this one
        again = Kernels(told.append, tmp_path)
        _ = again["bias"]
        assert len(told) == 3
        assert first.compile_seconds > 0
    finally:
        jit_numba.set_cache_folder(before.parent.parent)
