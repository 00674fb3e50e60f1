"""The helpers that formats share, against loops."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.formats.base import bit_fields, extreme, join_nibbles, reciprocal


@pytest.mark.parametrize("width", [1, 2, 4])
def test_bit_fields_take_the_lowest_bits_of_all_bytes_first(width):
    codes = np.array([[0b10110100, 0b00011110, 0xFF]], np.uint8)
    expected = [
        [[int(c) >> (i * width) & ((1 << width) - 1) for c in codes[0]] for i in range(8 // width)]
    ]
    np.testing.assert_array_equal(bit_fields(codes, width), expected)


def test_nibbles_join_to_what_bit_fields_takes_apart():
    codes = np.arange(32, dtype=np.uint8)[::-1] % 16
    packed = join_nibbles(codes)
    assert packed[0] == codes[0] + 16 * codes[16]
    np.testing.assert_array_equal(bit_fields(packed, 4).reshape(-1), codes)


def test_the_first_of_two_extremes_wins():
    x = np.array([[1, -5, 5, 0], [1, 5, -5, 0]], np.float32)
    np.testing.assert_array_equal(extreme(x), [[-5], [5]])


def test_a_reciprocal_that_is_not_finite_is_zero():
    with np.errstate(divide="ignore", over="ignore"):
        result = reciprocal(np.array([4, -0.0, 0, 1e-39], np.float32))
    np.testing.assert_array_equal(result, [0.25, 0, 0, 0])
