"""What kernels are told beside a page's bytes."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.backends.base import CacheFormats, LayerShape, Rope
from pykv.backends.page_maps import PageMaps, Turns
from pykv.backends.transforms import matrix
from pykv.formats.coded import HeadNumbers

SHAPE = LayerShape(4, 2, 40, 24)


def maps(page_k, page_v, transform_k="none", transform_v="none", numbers=()):
    formats = CacheFormats(page_k, page_v, "f16", "f16", transform_k, transform_v)
    return PageMaps(SHAPE, formats, numbers)


def test_without_maps_and_numbers_there_is_nothing_to_tell():
    plain = maps("q8_0", "kivi2")
    assert plain.matrix_k is plain.matrix_v is plain.back_v is None
    assert (plain.distance_k, plain.distance_v, plain.distance_back_v) == (0, 0, 0)
    assert (plain.d_k, plain.d_v) == (40, 24)


def test_a_shared_map_has_rows_of_whole_vectors_and_no_distance():
    mapped = maps("q8_0", "q8_0", "random", "random")
    for got, d, columns in ((mapped.matrix_k, 40, 48), (mapped.matrix_v, 24, 32)):
        assert got.shape == (1, d, columns)
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got[0, :, :d], matrix("random", d))
        assert not got[0, :, d:].any()
    np.testing.assert_array_equal(mapped.back_v[0, :, :24], matrix("random", 24).T)
    assert (mapped.distance_k, mapped.distance_v, mapped.distance_back_v) == (0, 0, 0)


def test_low_rank_maps_differ_by_head_and_lead_back():
    rng = np.random.default_rng(0)
    bases = [[rng.normal(size=(d, d)).astype(np.float32) for _ in range(2)] for d in (40, 24)]
    numbers = [[HeadNumbers(basis=basis) for basis in side] for side in bases]
    low = maps("q8_0", "q8_0", "lowrank:20", "lowrank:5", numbers)
    assert (low.d_k, low.d_v) == (20, 5)
    assert low.matrix_k.shape == (2, 40, 32)
    assert low.matrix_v.shape == (2, 24, 16)
    assert low.back_v.shape == (2, 5, 32)
    assert (low.distance_k, low.distance_v) == (40 * 32 * 4, 24 * 16 * 4)
    assert low.distance_back_v == 5 * 32 * 4
    for head in range(2):
        np.testing.assert_array_equal(low.matrix_k[head, :, :20], bases[0][head][:, :20])
        np.testing.assert_array_equal(low.back_v[head, :, :24], bases[1][head][:, :5].T)


@pytest.mark.parametrize("calibrated", [False, True])
def test_scales_of_heads(calibrated):
    numbers = [[HeadNumbers(scale=np.float32(s)) for s in (0.5, 3)], [HeadNumbers()] * 2]
    scaled = maps("fp8_e4m3", "fp8_e5m2", numbers=numbers if calibrated else ())
    np.testing.assert_array_equal(scaled.extra_k, [[0.5], [3]] if calibrated else [[1], [1]])
    np.testing.assert_array_equal(scaled.extra_v, [[1], [1]])


def test_levels_are_repeated_and_ranges_follow():
    levels = np.array([-1, -0.2, 0.3, 1], np.float32)
    ranges = [np.arange(40, dtype=np.float32) + n for n in (0, 100)]
    numbers = [[HeadNumbers(*ranges, levels)] * 2, [HeadNumbers(levels=levels)] * 2]
    extra = maps("nuq2:outliers=2%", "nuq2", numbers=numbers)
    np.testing.assert_array_equal(extra.extra_k[:, :16], np.tile(levels, (2, 4)))
    # 2% of 64 x 40, and of 40 at both ends together, rounded up
    np.testing.assert_array_equal(extra.extra_k[:, 16:18], [[52, 1]] * 2)
    np.testing.assert_array_equal(extra.extra_k[1, 32:], np.concatenate(ranges))
    np.testing.assert_array_equal(extra.extra_v[0, :18], [*np.tile(levels, 4), 0, 0])


@pytest.mark.parametrize("neox", [False, True])
def test_turns_are_those_of_offsets_and_of_first_positions(neox):
    """A page's first angle and an offset's add up to the token's; the magnitude counts once."""
    rope = Rope(neox, 10.0 ** -np.arange(3), 1.7)
    turns = Turns(rope, 5, 4)
    cos, sin, first_cos, first_sin = turns.tables
    assert cos.shape == sin.shape == (3, 64)
    assert first_cos.shape == first_sin.shape == (4, 3)
    for entry, start in enumerate((0, 5, 69, 133)):
        z = (cos + 1j * sin) * (first_cos + 1j * first_sin)[entry][:, None]
        exact = 1.7 * np.exp(1j * np.outer(rope.inv_freq, start + np.arange(64)))
        # four rounded numbers of at most 1.7, each within half an ulp
        assert np.abs(z - exact).max() <= 1.7 * 4 * 2.0**-24 * 2
    assert turns.words[:4].tolist() == [t.ctypes.data for t in turns.tables]
    # pairs, the distance within a pair, the distance between pairs
    assert turns.words[4:7].tolist() == ([3, 3, 1] if neox else [3, 1, 2])


def test_without_a_rope_nothing_turns():
    assert not Turns(None, 4, 3).words.any()
