"""Where codes, scales and minima lie."""

from __future__ import annotations

import numpy as np

from pykv.formats.q2_k import FORMAT


def test_a_byte_holds_four_runs():
    block = np.zeros(84, np.uint8)
    block[:16] = np.arange(16) | 0x20  # scales 0 to 15, minima 2
    block[16 + 32 + 17] = 0b11_10_01_00  # byte 17 of the second half
    block[80:84] = 0, 0x3C, 0, 0x38  # d = 1, dmin = 0.5
    expected = np.full((8, 32), -1.0)
    expected[[5, 6, 7], 17] += [1 * 11, 2 * 13, 3 * 15]  # codes 1 to 3; runs 11, 13, 15 of 16
    np.testing.assert_array_equal(FORMAT.decode(block).reshape(8, 32), expected)
