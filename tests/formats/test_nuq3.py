"""nuq3 beside nuq4, which test_nuq4.py checks with it: 8 levels in 3 bits."""

from __future__ import annotations

import numpy as np

from pykv.formats import nuq3, nuq4
from pykv.formats.coded import HeadNumbers


def test_codes_are_those_of_nuq4_with_each_level_twice():
    levels = np.sort(np.random.default_rng(3).uniform(-1, 1, 2**3)).astype(np.float32)
    more = np.sort(np.repeat(levels, 16 // 2**3))
    x = np.random.default_rng(4).standard_normal((64, 40)).astype(np.float32)
    scale, centre = np.full(40, 2, np.float32), np.full(40, 0.1, np.float32)
    few, many = HeadNumbers(scale, centre, levels), HeadNumbers(scale, centre, more)
    page = nuq3.FORMAT.encode_keys(x, few)
    assert page.size == 64 * 40 * 3 // 8
    back = nuq3.FORMAT.decode_keys(page, 40, numbers=few)
    wide = nuq4.FORMAT.decode_keys(nuq4.FORMAT.encode_keys(x, many), 40, numbers=many)
    np.testing.assert_array_equal(back, wide)
