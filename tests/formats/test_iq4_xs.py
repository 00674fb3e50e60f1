"""Where the six bits of a scale lie."""

from __future__ import annotations

import numpy as np

from pykv.formats.iq4_nl import TABLE
from pykv.formats.iq4_xs import FORMAT


def test_scales_and_codes_by_hand():
    block = np.zeros(136, np.uint8)
    block[:2] = 0, 0x40  # d = 2
    block[2:4] = 0b00001100, 0b01000000  # high bits: run 1 has 3, run 7 has 1
    block[4], block[7] = 0x50, 0xA0  # low bits: run 1 has 5, run 7 has 10
    block[8 + 16 * 7 + 3] = 0xF4
    values = FORMAT.decode(block).reshape(8, 32)
    scales = [-32, 0x35 - 32, -32, -32, -32, -32, -32, 0x1A - 32]
    expected = 2.0 * np.array(scales)[:, None] * np.full((8, 32), TABLE[0])
    expected[7, 3], expected[7, 19] = 2 * (0x1A - 32) * TABLE[4], 2 * (0x1A - 32) * TABLE[15]
    np.testing.assert_array_equal(values, expected)
