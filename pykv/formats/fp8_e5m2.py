"""fp8_e5m2: five exponent bits (bias 15), two mantissa bits; 8 bits a value.

Layout and error: fp8_e4m3.py.
Source: that of fp8_e4m3: Micikevicius et al. 2022, arXiv:2209.05433, section 3.
"""

from __future__ import annotations

from pykv.formats.fp8_e4m3 import E4M3


class E5M2(E4M3):
    """Five exponent and two mantissa bits."""

    mantissa_bits, bias, largest = 2, 15, 0x7B


FORMAT = E5M2()
