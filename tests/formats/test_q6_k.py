"""Where codes and scales lie."""

from __future__ import annotations

import numpy as np

from pykv.formats.q6_k import FORMAT


def test_scales_and_codes_by_hand():
    block = np.zeros(210, np.uint8)
    block[64 + 32 + 20] = 0x5A  # second half: value 20 of runs 5 and 7 of 32
    block[128 + 32 + 20] = 0b01_00_11_00  # high bits of value 20: 3 in run 5, 1 in run 7
    block[192:208] = np.arange(-8, 8).astype(np.int8).view(np.uint8)
    block[208:210] = 0, 0x40  # d = 2
    expected = 2.0 * np.arange(-8, 8)[:, None] * np.full((16, 16), -32)
    expected[5 * 2 + 1, 4] = 2 * 3 * (0x3A - 32)
    expected[7 * 2 + 1, 4] = 2 * 7 * (0x15 - 32)
    np.testing.assert_array_equal(FORMAT.decode(block).reshape(16, 16), expected)
