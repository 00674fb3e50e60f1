"""Where the fifth bits lie; the rest is q4_k's."""

from __future__ import annotations

import numpy as np

from pykv.formats.q5_k import FORMAT


def test_bit_p_of_byte_i_is_value_i_of_run_p():
    block = np.zeros(176, np.uint8)
    block[:4] = 0, 0x3C, 0, 0x3C  # d = dmin = 1
    block[4:8], block[12:16] = 1, 0x01  # scales: 1
    block[16 + 6] = 0b1001_0000  # value 6 of runs 4 and 7
    block[48 + 96 + 6] = 0xA3  # nibbles of value 6 of runs 6 and 7
    expected = np.zeros((8, 32))
    expected[[4, 6, 7], 6] = 16, 3, 16 + 10
    np.testing.assert_array_equal(FORMAT.decode(block).reshape(8, 32), expected)
