"""kivi2: kivi4 with two bits; 3 bits a value.

Layout and error: kivi4.py.
Source: that of kivi4: Liu et al. 2024, KIVI, arXiv:2402.02750, section 3.
"""

from __future__ import annotations

from pykv.formats.kivi4 import Kivi4


class Kivi2(Kivi4):
    """Two bits, a scale and a minimum."""

    bits, residual = 2, 128


FORMAT = Kivi2()
