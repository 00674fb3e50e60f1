"""Where codes, their third bits and the six-bit scales lie."""

from __future__ import annotations

import numpy as np

from pykv.formats.q3_k import FORMAT


def test_scales_and_codes_by_hand():
    block = np.zeros(110, np.uint8)
    block[17] = 0b00100000  # third bit of value 17 of part 5
    block[32 + 32 + 17] = 0b00001100  # and its low bits, 3: a code of 7
    block[96 + 3] = 0xD0  # run 11: low four bits of the scale
    block[96 + 8 + 3] = 0b00100000  # and its high two: 2 in the field of runs 8 to 11
    block[108:110] = 0, 0x3C  # d = 1
    expected = np.full((16, 16), (0 - 32) * (0 - 4.0))
    expected[11] = (0x2D - 32) * (0 - 4.0)
    expected[11, 1] = (0x2D - 32) * (7 - 4.0)
    np.testing.assert_array_equal(FORMAT.decode(block).reshape(16, 16), expected)
