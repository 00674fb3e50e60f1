"""Codes of e5m2 by hand; torch's are compared with e4m3's."""

from __future__ import annotations

import numpy as np

from pykv.formats.fp8_e5m2 import FORMAT


def test_it_is_the_upper_byte_of_a_half_float():
    # every finite code, as IEEE half precision has it
    codes = np.array([c for c in range(256) if c % 128 < 0x7C], np.uint8)
    expected = (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(FORMAT.dequantize(codes, ()), expected)
    np.testing.assert_array_equal(FORMAT.quantize(expected)[0], codes)


def test_codes_by_hand():
    x = np.array([1, 1.125, 1.375, -2, 57344, 61440, 2.0**-16, 2.0**-17, -(2.0**-17) * 3])
    # a half of the last place goes to even: 1.125 to 1, 1.375 to 1.5, 2**-17 to 0
    assert FORMAT.quantize(x.astype(np.float32))[0].tolist() == [
        0x3C, 0x3C, 0x3E, 0xC0, 0x7B, 0x7B, 0x01, 0x00, 0x82,
    ]  # fmt: skip
