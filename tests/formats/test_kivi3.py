"""A group of kivi3 by hand; the rule that it shares is tested with kivi4."""

from __future__ import annotations

import numpy as np

from pykv.formats.kivi3 import FORMAT


def test_eight_steps():
    x = np.array([1, 2, 3.5, 15, 14.1, 0.9999], np.float32)  # steps of 2 from 1
    codes, (scale, minimum) = FORMAT.quantize(x)
    assert (scale, minimum) == (2, 1)
    assert codes.tolist() == [0, 0, 1, 7, 7, 0]
    back = FORMAT.dequantize(codes, (scale, minimum))
    np.testing.assert_array_equal(back, np.array([1, 1, 3, 15, 15, 1], np.float32))


def test_a_key_page_by_hand():
    x = np.zeros((64, 32), np.float32)
    x[:, 0] = np.arange(64) % 8  # codes 0 to 7 over the tokens of channel 0
    page = FORMAT.encode_keys(x)
    # tokens 0 to 15 in bits 0 and 1, 16 to 31 in bits 2 and 3, and so on: all four hold the same
    assert page[:16].tolist() == [(t % 4) * 0b01010101 for t in range(16)]
    assert not page[16:512].any()
    # the high bits of channel 0 in bits 0 to 3, and of channel 1 in bits 4 to 7
    assert page[512:528].tolist() == [(t % 8 > 3) * 0b00001111 for t in range(16)]
    scales = page[768:896].view("<f2")
    assert scales[[0, 32]].tolist() == [1, 1]
    assert np.count_nonzero(scales) == 2
    assert page.size == 768 + 128 + 128
