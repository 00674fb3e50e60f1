"""A vector of tq3 by hand; what it shares is tested with tq4."""

from __future__ import annotations

import math

import numpy as np

from pykv.formats.tq3 import FORMAT


def test_eight_levels():
    # of length sqrt(8), so that its entries are compared with the levels as they are
    rest = math.sqrt((8 - 2**2 - 1.1**2 - 0.6**2 - 0.3**2 * 2) / 3)  # 0.865
    x = np.array([2, -1.1, 0.6, -0.3, 0.3, rest, rest, -rest], np.float32)
    codes, (scale,) = FORMAT.quantize(x)
    # levels from 4 up: 0.2451, 0.756, 1.3439, 2.1519; middles 0.50055, 1.04995, 1.7479
    assert codes.tolist() == [7, 1, 5, 3, 4, 5, 5, 2]
    decoded = 2.1519**2 + 1.3439**2 + 4 * 0.756**2 + 2 * 0.2451**2
    np.testing.assert_allclose(scale, math.sqrt(8 / decoded), rtol=1e-6)
