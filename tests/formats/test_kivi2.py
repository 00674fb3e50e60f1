"""A group of kivi2 by hand; the rule that it shares is tested with kivi4."""

from __future__ import annotations

import numpy as np

from pykv.formats.kivi2 import FORMAT


def test_four_steps():
    x = np.array([-1, 2, 0.4, 0.6, -0.5, 0.5, 1.5], np.float32)  # steps of 1 from -1
    codes, (scale, minimum) = FORMAT.quantize(x)
    assert (scale, minimum) == (1, -1)
    assert codes.tolist() == [0, 3, 1, 2, 0, 2, 2]
    back = FORMAT.dequantize(codes, (scale, minimum))
    np.testing.assert_array_equal(back, np.array([-1, 2, 0, 1, -1, 1, 1], np.float32))


def test_a_value_page_by_hand():
    x = np.zeros((64, 40), np.float32)
    x[1, :32] = np.arange(32) % 4
    x[63, 32:] = 10, 13, 11, 12, 10, 10, 10, 10
    page = FORMAT.encode_values(x)
    # token 1's two runs are the third and the fourth of the first unit
    assert page[:16].tolist() == [(c % 4) * 0b01010000 for c in range(16)]
    # token 63 of the second block: run 254, the third of the last unit; its other half is padding
    assert page[1008:1024].tolist() == [0, 3 << 4, 1 << 4, 2 << 4] + [0] * 12
    scales, minima = page[1024:1280].view("<f2"), page[1280:1536].view("<f2")
    assert np.flatnonzero(scales).tolist() == [1, 127]
    assert scales[[1, 127]].tolist() == [1, 1]
    assert np.flatnonzero(minima).tolist() == [127]
    assert minima[127] == 10
    assert page.size == 1536
