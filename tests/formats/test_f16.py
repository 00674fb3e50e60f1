"""Where f16 ends: rows overflow, pages saturate."""

from __future__ import annotations

import numpy as np

from pykv.formats.f16 import FORMAT

X = np.array([65504, 65519, 65520, -1e30, 2.0**-25, 3 * 2.0**-25, np.inf], np.float32)


def test_rows_round_to_nearest_even_and_overflow():
    stored = FORMAT.encode(X).view("<f2").tolist()
    assert stored == [65504, 65504, np.inf, -np.inf, 0, 2.0**-23, np.inf]


def test_pages_hold_the_largest_value_in_place_of_a_finite_one_beyond_it():
    x = np.zeros((16, 7), np.float32)
    x[3] = X
    expected = [65504, 65504, 65504, -65504, 0, 2.0**-23, np.inf]
    assert FORMAT.decode_keys(FORMAT.encode_keys(x), 7, 16)[3].tolist() == expected
    assert FORMAT.decode_values(FORMAT.encode_values(x), 7, 16)[3].tolist() == expected


def test_a_short_page_is_rounded_up_to_64_bytes_of_which_the_rest_is_zero():
    page = FORMAT.encode_keys(np.ones((16, 3), np.float32))
    assert page.size == FORMAT.page_bytes(3, "key", 16) == 128
    assert page.view("<f2").tolist() == [1] * 48 + [0] * 16
    assert FORMAT.page_bytes(3, "value", 16) == 16 * 32 * 2
    assert FORMAT.bits_per_value(80, "key") == 16
    assert FORMAT.bits_per_value(80, "value") == 16 * 96 / 80
