"""Where codes and the six-bit scales and minima lie."""

from __future__ import annotations

import numpy as np

from pykv.formats.q4_k import FORMAT


def test_scales_minima_and_codes_by_hand():
    block = np.zeros(144, np.uint8)
    block[:4] = 0, 0x3C, 0, 0x38  # d = 1, dmin = 0.5
    scales = block[4:16]
    scales[1] = 0b10_000011  # scale 1 is 3; the high bits of scale 5 are 2
    scales[5] = 0b01_000100  # minimum 1 is 4; the high bits of minimum 5 are 1
    scales[9] = 0xC7  # low bits of scale 5: 7, of minimum 5: 12
    block[16 + 9] = 0xB2  # value 9 of runs 0 and 1
    block[16 + 64 + 30] = 0x50  # value 30 of runs 4 and 5
    expected = np.zeros((8, 32))
    expected[1] = -0.5 * 4
    expected[1, 9] += 3 * 11
    expected[5] = -0.5 * 0b01_1100
    expected[5, 30] += 0b10_0111 * 5
    np.testing.assert_array_equal(FORMAT.decode(block).reshape(8, 32), expected)
