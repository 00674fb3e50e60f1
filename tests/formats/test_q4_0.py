"""The bytes that ggml's reference quantiser writes for one block."""

from __future__ import annotations

import numpy as np

from pykv.formats.q4_0 import FORMAT

X = ((37 * np.arange(32) % 64 - 31) / 8).astype(np.float32)
GOLDEN = bytes.fromhex("00b8cf379d047be248bf269df36ad148ae15")


def test_one_block_has_ggml_bytes():
    assert FORMAT.encode(X).tobytes() == GOLDEN


def test_decoding_errs_by_what_the_codes_allow():
    back = FORMAT.decode(np.frombuffer(GOLDEN, np.uint8))
    d = float(np.frombuffer(GOLDEN[:2], "<f2")[0])
    # half a step, and a whole one opposite to the extremum, which has no code
    assert np.abs(back - X).max() <= abs(d)


def test_a_zero_block_has_a_negative_zero_scale_and_codes_of_eight():
    assert FORMAT.encode(np.zeros(32, np.float32)).tobytes() == b"\x00\x80" + b"\x88" * 16


def test_low_nibbles_are_the_first_half():
    block = np.array([0, 0x3C, 0x1F, *[0x88] * 15], np.uint8)  # d = 1
    expected = np.zeros(32)
    expected[0], expected[16] = 7, -7
    np.testing.assert_array_equal(FORMAT.decode(block), expected)
