"""The bytes that ggml's reference quantiser writes for one block."""

from __future__ import annotations

import numpy as np

from pykv.formats.q5_0 import FORMAT

X = ((37 * np.arange(32) % 64 - 31) / 8).astype(np.float32)
GOLDEN = bytes.fromhex("00b4d54aa5568f5d3b08e6b3916e4c19f7c4a27f5d2a")


def test_one_block_has_ggml_bytes():
    assert FORMAT.encode(X).tobytes() == GOLDEN


def test_decoding_errs_by_what_the_codes_allow():
    back = FORMAT.decode(np.frombuffer(GOLDEN, np.uint8))
    d = float(np.frombuffer(GOLDEN[:2], "<f2")[0])
    # half a step, and a whole one opposite to the extremum, which has no code
    assert np.abs(back - X).max() <= abs(d)


def test_bit_j_of_the_fifth_bits_is_value_j():
    block = np.zeros(22, np.uint8)
    block[:2], block[2:6] = (0, 0x3C), (0x02, 0, 0, 0x80)  # d = 1
    expected = np.full(32, -16)
    expected[[1, 31]] = 0
    np.testing.assert_array_equal(FORMAT.decode(block), expected)
