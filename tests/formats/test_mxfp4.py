"""E2M1 values and the shared exponent, as the OCP microscaling page defines them."""

from __future__ import annotations

import numpy as np
import pytest

from pykv.formats.mxfp4 import FORMAT, TABLE


@pytest.mark.parametrize("code", range(16))
def test_a_code_is_its_e2m1_value(code):
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    assert TABLE[code] / 2 == (-value if sign else value)


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 128, 254])
def test_the_exponent_is_biased_by_127(exponent):
    block = np.full(17, 0x22, np.uint8)  # every code is 1.0
    block[0] = exponent
    np.testing.assert_array_equal(FORMAT.decode(block), np.full(32, 2.0 ** (exponent - 127)))
