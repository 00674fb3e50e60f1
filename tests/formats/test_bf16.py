"""How bf16 rounds, and where it ends."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.formats.bf16 import FORMAT


def test_ties_go_to_even_and_a_nan_stays_one():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFFFFFFFF], np.uint32)
    stored = FORMAT.encode(bits.view(np.float32)).view("<u2").tolist()
    assert stored == [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0xFFFF]


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_overflow_and_pages_saturate(sign):
    x = np.full((16, 32), sign * np.finfo(np.float32).max, np.float32)
    assert (FORMAT.decode(FORMAT.encode(x)) == sign * np.inf).all()
    largest = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]
    assert (FORMAT.decode_keys(FORMAT.encode_keys(x), 32, 16) == sign * largest).all()
